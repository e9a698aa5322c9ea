"""Which tests touch a line, the most specific first: kept of a run of all tests of the rooms, in one small file for a commit."""

from __future__ import annotations

import ast
import difflib
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Case", "Touched", "gathered"]


_START_S = 0.2  # what a test costs that does nothing


@dataclass(frozen=True)
class Case:
    """A test of the run. seconds: by the clock; cpu_s: of its own process."""

    id: str
    passed: bool
    seconds: float
    cpu_s: float


class Touched:
    """lines: file -> line -> the places of tests in the list. A line that runs when a file is imported has none."""

    def __init__(self, tests: list[Case], lines: Mapping[str, Mapping[int, list[int]]]) -> None:
        self.tests, self.lines = tests, lines

    def of(self, file: str, line: int, sources: Mapping[str, str]) -> list[Case]:
        """The tests that pass and touch this line; those first that touch lines of its function that few others touch, for
        their CPU time.

        Of a line that runs at import, such as a constant, a default or a decorator: those that touch a function that uses
        what it defines, in its file; or else in another one, or any function of its file.
        """
        tree = ast.parse(sources[file])
        near = {(file, number) for number in _function(tree, line)}
        places = self._at({(file, number) for number in _statement(tree, line)})
        if not places and not _is_in_a_body(tree, line):
            near = {(file, number) for number in _body_of_header(tree, line)}
            if not (places := self._at(near)):
                names = _defined(tree, line)
                near = {(file, number) for number in _uses(tree, names)}
            if not places and not (places := self._at(near)):
                near = {(file, number) for number in self.lines.get(file, {})}
                places = self._at(near) | self._at(
                    (other, number)
                    for other in self.lines
                    if other in sources and any(name in sources[other] for name in names)
                    for number in _uses(ast.parse(sources[other]), names)
                )
        worth: dict[int, float] = defaultdict(float)
        for other, number in near:
            touching = self.lines.get(other, {}).get(number, ())
            for place in touching:
                worth[place] += 1 / len(touching)
        tests = [(worth[place] / (_START_S + self.tests[place].cpu_s), self.tests[place]) for place in places]
        return [test for _, test in sorted(tests, key=lambda one: (-one[0], one[1].id)) if test.passed]

    def _at(self, lines: Iterable[tuple[str, int]]) -> set[int]:
        return {place for file, number in lines for place in self.lines.get(file, {}).get(number, ())}

    def with_fresh(
        self, fresh: Touched, stays: Callable[[str], bool], before: Mapping[str, str], now: Mapping[str, str]
    ) -> Touched:
        """Those tests of an older commit that stay, and the fresh ones. before, now: the sources of the two commits."""
        stay = {
            place: len(fresh.tests) + new
            for new, place in enumerate(place for place, test in enumerate(self.tests) if stays(test.id))
        }
        lines = {
            file: {line: list(places) for line, places in of_file.items()} for file, of_file in fresh.lines.items()
        }
        for file in set(self.lines) & set(now):
            of_file = lines.setdefault(file, {})
            matcher = difflib.SequenceMatcher(None, before[file].splitlines(), now[file].splitlines(), autojunk=False)
            for block in matcher.get_matching_blocks():
                for line in range(1, block.size + 1):
                    places = [stay[place] for place in self.lines[file].get(block.a + line, ()) if place in stay]
                    if places:
                        of_file.setdefault(block.b + line, []).extend(places)
        return Touched([*fresh.tests, *(self.tests[place] for place in stay)], lines)

    def write(self, path: Path) -> None:
        tests = [[test.id, test.passed, test.seconds, test.cpu_s] for test in self.tests]
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump({"tests": tests, "lines": self.lines}, file, separators=(",", ":"))

    @classmethod
    def read(cls, path: Path) -> Touched:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            kept = json.load(file)
        lines = {
            name: {int(line): places for line, places in of_file.items()} for name, of_file in kept["lines"].items()
        }
        return cls([Case(*test) for test in kept["tests"]], lines)


def gathered(folder: Path, checkout: Path) -> Touched:
    """What in_pytest/touched_lines.py wrote. A test that did not pass, or has run in no process to its end, counts as failed."""
    import coverage

    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        results.update((row["test"], row) for row in map(json.loads, path.read_text().splitlines()))
    by_test: dict[str, int] = {test: place for place, test in enumerate(sorted(results))}
    lines: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted(folder.glob("touched.*")):
        data = coverage.CoverageData(str(path))
        data.read()
        for measured in data.measured_files():
            file = str(Path(measured).relative_to(checkout))
            for line, contexts in data.contexts_by_lineno(measured).items():
                lines[file][line].update(by_test[context] for context in contexts if context in by_test)
    tests = [
        Case(test, bool(row["passed"]), float(row["seconds"]), float(row["cpu_s"]))
        for test, row in sorted(results.items())
    ]
    kept = {
        file: {line: sorted(places) for line, places in sorted(of_file.items()) if places}
        for file, of_file in sorted(lines.items())
    }
    return Touched(tests, kept)


# ---- what a line is part of


def _spans(tree: ast.AST) -> Iterator[tuple[range, ast.AST]]:
    """Each statement with its lines, of a compound one those before its body."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        if body := getattr(node, "body", None):
            inside = [body[0].lineno, *(decorator.lineno for decorator in getattr(body[0], "decorator_list", []))]
            last = max(first, min(inside) - 1)
        yield range(min([first, *(decorator.lineno for decorator in decorators)]), last + 1), node


def _statement(tree: ast.AST, line: int) -> range:
    return min((span for span, _ in _spans(tree) if line in span), key=len, default=range(line, line + 1))


def _function(tree: ast.AST, line: int) -> range:
    """The innermost one around the line, or else the statement."""
    around = (
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return min((span for span in around if line in span), key=len, default=_statement(tree, line))


def _is_in_a_body(tree: ast.AST, line: int) -> bool:
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body[0].lineno <= line <= (node.end_lineno or 0)
        and line not in _statement(tree, node.lineno)
        for node in ast.walk(tree)
    )


def _body_of_header(tree: ast.AST, line: int) -> list[int]:
    """The lines of what a decorator, or the default of a parameter, belongs to."""
    for span, node in _spans(tree):
        if line in span and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return [number for inner in node.body for number in range(inner.lineno, (inner.end_lineno or 0) + 1)]
    return []


def _defined(tree: ast.AST, line: int) -> set[str]:
    """The names that the statement assigns to."""
    names = set()
    for span, node in _spans(tree):
        if line in span and isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names |= {inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return names


def _uses(tree: ast.AST, names: set[str]) -> set[int]:
    """The lines of the statements that name one of these, or an attribute of that name."""
    used = set()
    for span, node in _spans(tree):
        parts = [inner for inner in ast.walk(node) if getattr(inner, "lineno", 0) in span]
        if any(getattr(part, "id", getattr(part, "attr", None)) in names for part in parts):
            used |= set(span)
    return used
