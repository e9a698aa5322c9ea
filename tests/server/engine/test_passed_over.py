"""What no rule can judge and no table can hold costs itself, and nothing else: not the run, not the other runs, not a
restart."""

from __future__ import annotations

import logging
import math

import pytest
from clocks import Clock
from engine_bench import NOW, Bench, OddRule
from judging import make_evaluator

from perfagent.wire import Event, Finding
from perfagent_server.alerts import tables
from perfagent_server.database import StorageError
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.window import Window
from perfagent_server.store.tables import alert, cursor, delivery, rule_state

POISON = 13


class Fragile(OddRule):
    """A rule with a fault: it raises at one step."""

    def judge(self, window: Window) -> Finding | None:
        if window.at == POISON:
            raise ZeroDivisionError("a spread of zero")
        return None


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames with the step POISON cannot be judged at all: half of them is taken in when it raises."""
    take = Window.take

    def fails(self: Window, rank: int, groups: list) -> set[str]:
        ready = take(self, rank, groups)
        if any(POISON in group.step_list() for group in groups):
            raise OverflowError("a frame nobody foresaw")
        return ready

    monkeypatch.setattr(Window, "take", fails)


def _told(bench: Bench) -> list[tuple[str, str, int]]:
    return sorted((row["run"], row["rule"], row["since_step"]) for row in bench.rows(alert))


def test_a_rule_that_raises_is_left_out_at_that_step(bench: Bench) -> None:
    plan = Plan((*all_rules(), Fragile()))
    engine = bench.engine(plan_of=lambda *_: plan)
    bench.send({"loss": [2.0] * 15 + [math.nan]}, range(1, 17))
    assert engine.run_once() == 1
    assert _told(bench) == [("r", "nonfinite_loss", 16)]
    assert (engine.counters["passed_over"], engine.counters["failures"]) == (1, 0)


def test_a_rule_that_raises_is_heard_of_in_tests_and_backtests() -> None:
    judge = make_evaluator(rules=(Fragile(),))
    judge.window.at = POISON
    with pytest.raises(ZeroDivisionError):
        judge._judge(Fragile())


@pytest.mark.usefixtures("poisoned")
def test_frame_that_cannot_be_judged_stops_no_run(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    engine = bench.engine()
    bench.send({"loss": [2.0] * 10}, range(1, 11), name="a")
    engine.run_once()
    with caplog.at_level(logging.ERROR, "perfagent.server"):
        for _ in range(3):
            bench.send({"loss": [2.0]}, [POISON], name="a")
            bench.send({"loss": [2.0, math.nan]}, [1, 2], name="b")
        bench.send({"loss": [2.0, math.nan]}, [14, 15], name="a")
        engine.run_once()
        engine.run_once()
    assert _told(bench) == [("a", "nonfinite_loss", 15), ("b", "nonfinite_loss", 2)]
    assert engine.counters["passed_over"] == 3
    assert [record.getMessage() for record in caplog.records] == [
        "a frame of run a is passed over, and so is what fails in this way later"
    ]
    engine.checkpoint()
    assert bench.rows(cursor)[0]["tail_id"] == 8
    again = bench.engine()
    bench.send({"loss": [2.0]}, [1], name="other")
    assert (again.run_once(), again.counters["passed_over"]) == (1, 0), "it costs a restarted server nothing"


@pytest.mark.usefixtures("poisoned")
def test_servers_killed_by_a_poisonous_frame_tell_all_once(bench: Bench) -> None:
    for step in (1, 2, POISON, 14, POISON, 15):
        bench.send({"loss": [math.nan if step == 14 else 2.0]}, [step])
        bench.send({"loss": [math.nan if step == 15 else 2.0]}, [step], name="other")
        bench.engine().run_once()  # and never a checkpoint: it is killed
    assert _told(bench) == [("other", "nonfinite_loss", 15), ("r", "nonfinite_loss", 14)]
    assert len(bench.rows(delivery)) == 2


def test_a_waiting_step_that_cannot_be_judged_is_passed_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(NOW)
    engine = bench.engine(clock=clock)
    bench.send({"loss": [2.0]}, [1], events=[Event(kind="state", time=NOW, data={"state": "running", "world_size": 2})])
    engine.run_once()
    monkeypatch.setattr(Evaluator, "tick", lambda self, now: 1 / 0)
    clock.at += 10
    bench.send({"loss": [math.nan]}, [1], name="other")
    engine.run_once()
    assert _told(bench) == [("other", "nonfinite_loss", 1)]
    assert engine.counters["passed_over"] >= 1


def test_an_alert_that_no_table_takes_costs_no_other_alert(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """But nothing is passed over while the database cannot be written."""
    apply, errors = tables.apply, [StorageError("the disk is full")] * 3

    def picky(connection, changes, now, link):  # type: ignore[no-untyped-def]
        if errors:
            raise errors.pop()
        if any(change.finding.rule == "nonfinite_gradient" and run == "a" for run, change in changes):
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return apply(connection, changes, now, link)

    monkeypatch.setattr(tables, "apply", picky)
    engine = bench.engine()
    bench.send({"grad/norm": [math.nan]}, [1], name="a")
    bench.send({"loss": [2.0, math.nan]}, [1, 2], name="b")
    bench.send({}, [], name="a", events=[Event(kind="state", time=NOW, step=1, data={"state": "failed"})])
    while errors:
        with pytest.raises(StorageError):
            engine.run_once()
    engine.run_once()
    assert bench.told() == [("a", "process_crash"), ("b", "nonfinite_loss")]
    assert engine.counters["passed_over"] == 1
    assert {row["run"] for row in bench.rows(rule_state)} == {"a", "b"}
    assert engine.run_once() == 0
