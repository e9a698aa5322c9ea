"""The mutants: a fixed random sample of lines of four rooms, each line with one change of cosmic-ray's.

The sample is drawn from the source of one commit, DRAWN_FROM, and found again in any other by the file, the function, and the
text of the line. The place of a line in the list is a hash of these three, so that the first 25 of a room are among its first
50, and a line that goes moves no other.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from mutants.rooms import MUTANTS, Mutant, Placed, hashed, in_room

__all__ = ["draw", "place"]


def draw(room: str, sources: Mapping[str, str], count: int = MUTANTS) -> list[Mutant]:
    """The first mutants of a room. sources: text by file, also files of other rooms."""
    lines = {}
    for file, source in sources.items():
        if in_room(room, file):
            for line in _lines(source):
                lines[hashed(file, line.function, line.text, line.repeat)] = file, line
    drawn: Iterator[Mutant] = (
        mutant
        for line_id, (file, line) in sorted(lines.items())
        if (mutant := _one_of(room, file, line, line_id, sources[file])) is not None
    )
    return list(islice(drawn, count))


def place(mutant: Mutant, source: str) -> Placed | None:
    """The mutant in a file of another commit, or None where the line is no more."""
    for line in _lines(source):
        if (line.function, line.text, line.repeat) == (mutant.function, mutant.text, mutant.repeat):
            occurrences = line.places.get(mutant.operator, ())
            if mutant.nth < len(occurrences) and (
                changed := _changed(source, mutant.operator, occurrences[mutant.nth])
            ):
                return Placed(line.number, changed)
    return None


# ---- one line


@dataclass(frozen=True)
class _Line:
    """A line with something to change. places: operator -> which of its occurrences in the file are on this line."""

    number: int
    function: str
    text: str
    repeat: int
    places: dict[str, list[int]]


def _one_of(room: str, file: str, line: _Line, line_id: str, source: str) -> Mutant | None:
    """One of the mutants of the line: each kind of change is as likely, however many operators it has."""
    choices = [(operator, nth) for operator, occurrences in line.places.items() for nth in range(len(occurrences))]
    for operator, nth in sorted(
        choices, key=lambda choice: (hashed(line_id, _kind(choice[0])), hashed(line_id, *choice))
    ):
        if _changed(source, operator, line.places[operator][nth]):
            return Mutant(room, file, line.function, line.text, line.repeat, operator, nth)
    return None


def _kind(operator: str) -> str:
    """`ReplaceComparisonOperator_Lt` of `ReplaceComparisonOperator_Lt_GtE`."""
    return "_".join(operator.split("_")[:2])


def _changed(source: str, operator: str, occurrence: int) -> str | None:
    """The source with the change, or None where it would be no Python, or the same."""
    changed: str | None = mutate_code(source, _OPERATORS[operator](), occurrence)
    try:
        if changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
            return None
        compile(changed, "mutant", "exec")
    except SyntaxError:
        return None
    return changed


# ---- the lines of a file

_PROVIDER = OperatorProvider()
_LEFT_OUT = {  # `==` and `is` do the same to most that we compare; those of variables want names
    "ReplaceComparisonOperator_Eq_Is",
    "ReplaceComparisonOperator_Is_Eq",
    "ReplaceComparisonOperator_IsNot_NotEq",
    "ReplaceComparisonOperator_NotEq_IsNot",
    "VariableInserter",
    "VariableReplacer",
}
_OPERATORS: dict[str, Callable[[], Any]] = {name: _PROVIDER[name] for name in sorted(set(_PROVIDER) - _LEFT_OUT)}


def _lines(source: str) -> Iterable[_Line]:
    """Each line that some operator changes, but for what is not run: annotations, and what only a type checker reads."""
    texts = source.splitlines()
    tree = ast.parse(source)
    functions = _functions(tree)
    skipped = _skipped(tree)
    places: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    nodes = [(node, _groups(node)) for node in ast_nodes(parso.parse(source))]
    for name, operator in _OPERATORS.items():
        group, mutations, occurrence = _group(name), operator().mutation_positions, 0
        for node, groups in nodes:
            if group in groups:
                for (line, column), _ in mutations(node):
                    if not any(start <= (line, column) < end for start, end in skipped.get(line, ())):
                        places[line][name].append(occurrence)
                    occurrence += 1
    repeats: dict[tuple[str, str], int] = defaultdict(int)
    for number, text in enumerate(texts, 1):
        key = functions.get(number, ""), text.strip()
        if number in places:
            yield _Line(number, *key, repeats[key], places[number])
        repeats[key] += 1


def _group(operator: str) -> str:
    return {"ReplaceBinaryOperator": "binary", "ReplaceComparisonOperator": "comparison"}.get(
        operator.partition("_")[0], "any"
    )


def _groups(node: Any) -> tuple[str, ...]:
    """Which operators to ask about a node: the 132 of binary operators and the 50 of comparisons only about theirs."""
    if node.type == "comparison":
        return "any", "comparison"
    return ("any", "binary") if node.type == "operator" else ("any",)


def _functions(tree: ast.AST) -> dict[int, str]:
    """Line -> the dotted name of the innermost function or class that it is part of."""
    found: dict[int, str] = {}

    def walk(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{path}.{child.name}".lstrip(".")
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.update(dict.fromkeys(range(first, (child.end_lineno or child.lineno) + 1), inner))
            walk(child, inner)

    walk(tree, "")
    return found


_Span = tuple[tuple[int, int], tuple[int, int]]


def _skipped(tree: ast.AST) -> dict[int, list[_Span]]:
    """Line -> the spans on it that no run reads: annotations (all our modules have them as strings) and TYPE_CHECKING."""
    unread: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            unread.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            unread.append(node.returns)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            unread.append(node)
    spans: dict[int, list[_Span]] = defaultdict(list)
    for node in unread:
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        for line in range(start[0], end[0] + 1):
            spans[line].append((start, end))
    return spans
