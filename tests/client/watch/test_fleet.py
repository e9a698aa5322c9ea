"""The table of runs: its order, its filter, and what the WebSocket's messages change in it."""

from __future__ import annotations

import itertools
import math
from typing import Any

from perfagent.wire import Alert, RunSummary
from perfagent_client.watch.acts import to_acknowledge, to_mute
from perfagent_client.watch.fleet import Fleet
from perfagent_client.watch.fleet_screen import columns_for
from perfagent_client.watch.words import age, cut


def run(name: str, started: int = 0, **more: Any) -> RunSummary:
    moment = f"2026-01-01T00:00:{started:02}Z"
    given: dict[str, Any] = {"state": "running", **more}
    return RunSummary(run=name, project="p", name=name, step=1, started=moment, updated=moment, **given)


def alert(of: str, severity: str = "critical", **more: Any) -> Alert:
    given: dict[str, Any] = {"state": "firing", **more}
    given |= {"id": f"{of}-{severity}", "run": of, "rule": "r", "message": f"{of} is ill", "since": "2026"}
    return Alert(severity=severity, **given)  # type: ignore[arg-type]


def test_what_needs_somebody_comes_first() -> None:
    fleet = Fleet()
    runs = [
        run("over", 9, state="finished"), run("fine", 1), run("newer", 2), run("taken", 8), run("warned", 3),
        run("broken", 0, state="failed"),
        run("noted", 7), run("stands", 0, state="lost"), run("quiet", 6),
    ]  # fmt: skip
    alerts = [
        alert("taken", acknowledged="2026", acknowledged_by="ann"), alert("warned", "warning"), alert("broken"),
        alert("noted", "info"),
        alert("quiet", muted_until="2027"),
    ]  # fmt: skip
    fleet.load(runs, alerts)
    order = [row.run.run for row in fleet.listed()]
    assert order == ["broken", "warned", "stands", "taken", "quiet", "noted", "newer", "fine", "over"]
    assert [row.run.run for row in fleet.listed("ANN seen")] == ["taken"]
    assert [row.run.run for row in fleet.listed("warning")] == ["warned"]
    assert fleet.rows["taken"].title == "seen by ann: taken is ill"


def test_messages_change_the_rows() -> None:
    fleet = Fleet()
    fleet.load([run("a"), run("b")], [])
    change = {"step": 9, "state": "finished", "values": {"loss": "NaN", "tokens_per_s": 5.0}}
    assert fleet.take({"fleet": {"a": change, "b": None}}) is False
    row = fleet.rows["a"]
    assert (row.run.step, row.run.state, row.values["tokens_per_s"]) == (9, "finished", 5.0)
    assert row.loss is not None and math.isnan(row.loss)
    assert "b" not in fleet.rows
    assert fleet.take({"fleet": {"new": {"step": 1}}}) is True, "a run that is not known is asked for"
    fires = {
        "id": "x",
        "state": "firing",
        "run": "a",
        "rule": "r",
        "severity": "warning",
        "message": "m",
        "since": "2026",
    }
    assert fleet.take({"alert": fires}) is False and row.severity == "warning"
    fleet.take({"alert": {**fires, "state": "resolved"}})
    assert row.severity == "unknown", "its alert is over, and its verdict not settled"
    assert fleet.take({"fleet": {"a": {"severity": "critical"}}}) is False and row.severity == "critical"
    assert fleet.take({"subscribed": True}) is False


def test_keys_mean_the_worst_alert_that_is_left() -> None:
    first, second = alert("a", "warning"), alert("a", "critical", acknowledged="2026", muted_until="2027")
    assert to_acknowledge([second, first]) is first
    assert to_mute([second, first]) is first
    assert to_acknowledge([second]) is None
    assert to_mute([second]) is second, "its mute ends"
    assert to_mute([]) is None


def test_the_columns_fit_the_terminal() -> None:
    for width, longest in itertools.product(range(30, 200, 7), (0, 12, 300)):
        columns = columns_for(width, longest)
        assert sum(wide + 2 for _, wide in columns) <= max(width, 47)
        assert {"severity", "run", "verdict", "step"} <= {column.key for column, _ in columns}


def test_words_are_short_and_steer_no_terminal() -> None:
    assert [age(seconds) for seconds in (-3, 0.4, 59, 61, 7300, 9e5)] == ["0 s", "0 s", "59 s", "1 min", "2 h", "10 d"]
    assert cut("a\x1b[31m\nb", 20) == "a\ufffd[31m b"
    assert cut("abcdef", 4) == "abc…"
