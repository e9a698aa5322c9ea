"""Which tests touch a line, the most specific first: kept of a run of all tests of the rooms, in one small file for a commit."""

from __future__ import annotations

import ast
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case", "Touched", "gathered"]


@dataclass(frozen=True)
class Case:
    """One of the run. seconds: by the clock; cpu_s: of its own process; lines: how many of all rooms it touches."""

    id: str
    passed: bool
    seconds: float
    cpu_s: float
    lines: int


class Touched:
    """lines: file -> line -> the places of tests in the list. A line that runs when a file is imported has none."""

    def __init__(self, tests: list[Case], lines: Mapping[str, Mapping[int, list[int]]]) -> None:
        self.tests, self.lines = tests, lines

    def of(self, file: str, line: int, sources: Mapping[str, str]) -> list[Case]:
        """The tests that pass and touch this line; those first that touch little else than its file.

        Of a line that runs at import, such as a constant, a default or a decorator: those that touch a function that uses
        what it defines, in its file or else in another one; or else any function of its file.
        """
        tree = ast.parse(sources[file])
        places = self._at(file, _statement(tree, line))
        if not places and not _is_in_a_body(tree, line):
            places = self._at(file, _body_of_header(tree, line))
            names = _defined(tree, line)
            places = places or self._at(file, _uses(tree, names))
            for other in () if places else sorted(self.lines):
                if other in sources and any(name in sources[other] for name in names):
                    places |= self._at(other, _uses(ast.parse(sources[other]), names))
            places = places or self._at(file, self.lines.get(file, {}))
        in_file = Counter(place for of_line in self.lines.get(file, {}).values() for place in of_line)
        ordered = sorted(places, key=lambda place: (-in_file[place] / self.tests[place].lines, self.tests[place].id))
        return [self.tests[place] for place in ordered if self.tests[place].passed]

    def _at(self, file: str, numbers: Iterable[int]) -> set[int]:
        lines = self.lines.get(file, {})
        return {place for number in numbers for place in lines.get(number, ())}

    def write(self, path: Path) -> None:
        kept = {
            "tests": [[test.id, test.passed, test.seconds, test.cpu_s, test.lines] for test in self.tests],
            "lines": self.lines,
        }
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump(kept, file, separators=(",", ":"))

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

    results: dict[str, dict[str, object]] = {}
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
    counts = [0] * len(by_test)
    for of_file in lines.values():
        for places in of_file.values():
            for place in places:
                counts[place] += 1
    tests = [
        Case(test, bool(row["passed"]), float(row["seconds"]), float(row["cpu_s"]), counts[place])  # type: ignore[arg-type]
        for (test, row), place in zip(sorted(results.items()), by_test.values(), strict=True)
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
