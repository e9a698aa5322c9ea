"""scripts/mutants: the tests that touch a line are found, and two measurements are compared."""

from __future__ import annotations

from pathlib import Path

from mutants.comparing import report
from mutants.rooms import ROOMS, in_room
from mutants.running import Result

FILE = f"{ROOMS['rules']}/slow.py"


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
