"""scripts/mutants: the tests that touch a line are found, and two measurements are compared."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from mutants.comparing import report
from mutants.rooms import ROOMS, in_room
from mutants.running import Result
from mutants.touching import Case, Touched

FILE = f"{ROOMS['rules']}/slow.py"
SOURCE = textwrap.dedent(
    '''\
    """Says what is slow."""

    from __future__ import annotations

    MOST_S = 30.0


    class Slow:
        patience: int = 3

        def judge(self, took_s: float, seen: int | None = None) -> bool:
            if seen is None:
                return False
            return took_s > MOST_S and seen >= self.patience


    def total(times: list[float]) -> float:
        return sum(
            time * 2 for time in times
        )
    '''
)
LINES = {text.strip(): number for number, text in enumerate(SOURCE.splitlines(), 1)}
TESTS = [
    Case("a.py::test_of_much", True, 1.0, 1.0),
    Case("b.py::test_slow", True, 1.0, 1.0),
    Case("b.py::test_total", True, 1.0, 1.0),
    Case("b.py::test_that_fails", False, 1.0, 1.0),
]


def touching(text: str, lines: dict[int, list[int]]) -> list[str]:
    return [test.id for test in Touched(TESTS, {FILE: lines}).of(FILE, LINES[text], {FILE: SOURCE})]


def test_tests_that_touch_little_come_first_failing_ones_never() -> None:
    lines = {LINES["if seen is None:"]: [0, 1, 3], LINES["return False"]: [1]}
    assert touching("if seen is None:", lines) == ["b.py::test_slow", "a.py::test_of_much"]
    assert touching("return False", lines) == ["b.py::test_slow"]


@pytest.mark.parametrize(
    "text", ["MOST_S = 30.0", "patience: int = 3", "def judge(self, took_s: float, seen: int | None = None) -> bool:"]
)
def test_a_line_that_runs_at_import_is_touched_by_what_uses_it(text: str) -> None:
    used = LINES["return took_s > MOST_S and seen >= self.patience"]
    assert touching(text, {used: [1], LINES["return sum("]: [2]}) == ["b.py::test_slow"]


def result(name: str, ended: str) -> Result:
    return Result(name, "rules", FILE, "total", "return sum(", "AddNot", 0, 18, ended, "b.py::test_total", 3, 0, 1.0)


def test_comparison_leaves_out_gone_lines_and_names_losses() -> None:
    before = {
        name: result(name, ended)
        for name, ended in [("a", "killed"), ("b", "late"), ("c", "killed"), ("d", "survived")]
    }
    now = {"a": result("a", "survived"), "b": result("b", "killed"), "c": result("c", "gone")}
    text = report(before, now, ("old", "new"))
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["rules"]]
    assert row == ["rules", "3", "2", "1", "67%", "33%", "1"]
    assert "killed before and not now: 1; now and not before: 0" in text
    assert f"{FILE}:18" in text
    assert "killed by b.py::test_total" in text


def test_each_room_is_there() -> None:
    root = Path(__file__).resolve().parents[2]
    for room, folder in ROOMS.items():
        assert any(in_room(room, str(path.relative_to(root))) for path in (root / folder).rglob("*.py")), room
    assert not in_room("store", "server/perfagent_server/store/clickhouse/rows.py")
