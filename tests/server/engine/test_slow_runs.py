"""A run whose frames take long to judge delays neither the alerts of others nor its own for ever."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from clocks import Clock
from engine_bench import NOW, Bench, OddRule
from sqlalchemy import update

from perfagent.wire import Event, Finding
from perfagent_server.engine.scheduler import Engine
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.window import Window
from perfagent_server.store.tables import alert, cursor, rule_state, run

MONOTONIC = Clock(1000.0)


class Slow(OddRule):
    """A rule that takes a quarter of a second for each step of a slow run."""

    def judge(self, window: Window) -> Finding | None:
        if window.run.startswith("slow"):
            MONOTONIC.at += 0.25
        return None


def plan_of(_project: str, _off: Sequence[str]) -> Plan:
    return Plan((*all_rules(), Slow()))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


def engine_of(bench: Bench) -> Engine:
    return bench.engine(clock=Clock(NOW), monotonic=MONOTONIC, plan_of=plan_of)


def told(bench: Bench) -> list[tuple[str, str]]:
    return sorted((row["run"], row["rule"]) for row in bench.rows(alert))


def send_slow(bench: Bench, frames: int, *, last: float = 1.0, events: Sequence[Event] = ()) -> None:
    for step in range(1, frames):
        bench.send({"loss": [1.0]}, [step], name="slow")
    bench.send({"loss": [last]}, [frames], name="slow", events=events)


def judge_all(engine: Engine) -> None:
    while engine.run_once():
        pass


def test_a_slow_run_delays_the_nan_of_another_by_seconds(bench: Bench) -> None:
    engine = engine_of(bench)
    send_slow(bench, 300, last=math.nan)
    bench.send({"loss": [1.0, math.nan]}, [1, 2], name="sick")
    began = MONOTONIC.at
    while ("sick", "nonfinite_loss") not in told(bench):
        assert engine.run_once()
    assert MONOTONIC.at - began < 10
    judge_all(engine)
    assert told(bench) == [("sick", "nonfinite_loss"), ("slow", "nonfinite_loss")]
    assert engine.counters["frames"] == 301


def test_two_late_runs_are_judged_in_turn(bench: Bench) -> None:
    engine = engine_of(bench)
    send_slow(bench, 100)
    for step in range(1, 20):
        bench.send({"loss": [1.0]}, [step], name="slow too")
    bench.send({"loss": [math.nan]}, [20], name="slow too")
    began = MONOTONIC.at
    while not told(bench):
        assert engine.run_once()
    assert MONOTONIC.at - began < 20


def test_what_many_runs_have_caused_is_told_after_seconds(bench: Bench) -> None:
    engine = engine_of(bench)
    bench.send({"loss": [1.0, math.nan]}, [1, 2], name="sick")
    for number in range(100):
        bench.send({"loss": [1.0]}, [1], name=f"slow {number}")
    began = MONOTONIC.at
    engine.run_once()
    assert told(bench) == [("sick", "nonfinite_loss")]
    assert MONOTONIC.at - began < 5


def slow_plan_of(_project: str, _off: Sequence[str]) -> Plan:
    """Each run takes a second to load."""
    MONOTONIC.at += 1.0
    return plan_of("", ())


def test_the_verdicts_of_runs_that_ended_delay_no_round(bench: Bench) -> None:
    end = Event(kind="state", time=NOW, step=1, data={"state": "finished"})
    for number in range(12):
        bench.send({"loss": [1.0]}, [1], name=f"ended {number}", events=[end])
    before = engine_of(bench)
    judge_all(before)
    before.checkpoint()
    engine = bench.engine(clock=Clock(NOW), monotonic=MONOTONIC, plan_of=slow_plan_of)
    engine.run_once()
    began = MONOTONIC.at
    engine.settle_outcomes()
    assert MONOTONIC.at - began < 5
    while engine.settle_outcomes():
        pass
    assert {row["outcome"] for row in bench.rows(run)} == {"healthy"}


def test_a_nan_is_told_before_many_other_runs_are_loaded(bench: Bench) -> None:
    engine = bench.engine(clock=Clock(NOW), monotonic=MONOTONIC, plan_of=slow_plan_of)
    bench.send({"loss": [1.0, math.nan]}, [1, 2], name="sick")
    for number in range(60):
        bench.send({"loss": [1.0]}, [1], name=f"other {number}")
    began = MONOTONIC.at
    engine.run_once()
    assert told(bench) == [("sick", "nonfinite_loss")]
    assert MONOTONIC.at - began < 15
    judge_all(engine)
    assert engine.counters["frames"] == 61


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_late_run_goes_on_after_a_restart(bench: Bench, has_snapshot: bool) -> None:
    engine = engine_of(bench)
    send_slow(bench, 50, last=math.nan)
    engine.run_once()
    engine.checkpoint()
    assert min(row["tail_id"] for row in bench.rows(cursor)) < 50, "what was not judged stays in the tail"
    if not has_snapshot:
        bench.database.write(lambda connection: connection.execute(update(rule_state).values(version=0)))
    again = engine_of(bench)
    judge_all(again)
    assert told(bench) == [("slow", "nonfinite_loss")]
    again.checkpoint()
    assert {row["tail_id"] for row in bench.rows(cursor)} == {50}


def test_a_late_run_is_not_called_by_what_was_judged_so_far(bench: Bench) -> None:
    engine = engine_of(bench)
    end = Event(kind="state", time=NOW, step=50, data={"state": "finished"})
    send_slow(bench, 50, last=math.nan, events=[end])
    engine.run_once()
    engine.settle_outcomes()
    assert bench.rows(run)[0]["outcome"] is None
    judge_all(engine)
    engine.settle_outcomes()
    assert bench.rows(run)[0]["outcome"] == "critical"
