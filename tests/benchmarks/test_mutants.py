"""scripts/mutants: the sample stays the same from commit to commit, and the tests that touch a line are found."""

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


def test_line_inside_a_statement_is_touched_with_its_first() -> None:
    assert touching("time * 2 for time in times", {LINES["return sum("]: [2]}) == ["b.py::test_total"]


@pytest.mark.parametrize(
    "text", ["MOST_S = 30.0", "patience: int = 3", "def judge(self, took_s: float, seen: int | None = None) -> bool:"]
)
def test_a_line_that_runs_at_import_is_touched_by_what_uses_it(text: str) -> None:
    used = LINES["return took_s > MOST_S and seen >= self.patience"]
    assert touching(text, {used: [1], LINES["return sum("]: [2]}) == ["b.py::test_slow"]


def test_line_of_a_function_without_tests_is_touched_by_none() -> None:
    assert touching("return False", {LINES["return sum("]: [2]}) == []


def test_unchanged_results_of_an_older_run_stay_at_new_lines() -> None:
    older = Touched(TESTS, {FILE: {LINES["return False"]: [0, 1], LINES["return sum("]: [2]}})
    fresh = Touched([Case("b.py::test_new", True, 1.0, 1.0)], {FILE: {LINES["return False"] + 1: [0]}})
    now = {FILE: SOURCE.replace("MOST_S = 30.0", "MOST_S = 30.0\n")}
    both = older.with_fresh(fresh, lambda test: test.startswith("a.py"), {FILE: SOURCE}, now)
    assert [test.id for test in both.tests] == ["b.py::test_new", "a.py::test_of_much"]
    assert both.lines == {FILE: {LINES["return False"] + 1: [0, 1]}}


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


class TestSample:
    """Wants the packages that scripts/mutants installs."""

    @pytest.fixture(autouse=True)
    def packages(self) -> None:
        pytest.importorskip("cosmic_ray")

    def test_the_first_mutants_of_a_room_stay_the_first(self) -> None:
        from mutants.sample import draw

        few, all_of_them = draw("rules", {FILE: SOURCE}, 2), draw("rules", {FILE: SOURCE}, 100)
        assert few == all_of_them[:2]
        assert {mutant.text for mutant in all_of_them} == {
            *("MOST_S = 30.0", "patience: int = 3", "if seen is None:", "return False"),
            *("return took_s > MOST_S and seen >= self.patience", "time * 2 for time in times"),
        }

    def test_mutant_follows_a_moved_line_but_not_a_changed_one(self) -> None:
        from mutants.sample import draw, place

        (mutant,) = [one for one in draw("rules", {FILE: SOURCE}, 100) if one.text == "if seen is None:"]
        moved = SOURCE.replace("MOST_S = 30.0", "MOST_S = 30.0\nLEAST_S = 1.0\n\n")
        placed = place(mutant, moved)
        assert placed is not None
        assert placed.line == LINES["if seen is None:"] + 3
        changes = [
            pair for pair in zip(moved.splitlines(), placed.source.splitlines(), strict=True) if len({*pair}) > 1
        ]
        assert [before.strip() for before, _ in changes] == ["if seen is None:"]
        assert place(mutant, SOURCE.replace("if seen is None:", "if not seen:")) is None
