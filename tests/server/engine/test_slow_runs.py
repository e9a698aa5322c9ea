"""A run whose frames take long to judge delays neither the alerts of others nor its own for ever."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from clocks import Clock
from engine_bench import NOW, Bench, OddRule
from sqlalchemy import update

from perfagent.wire import Event, Finding
from perfagent_server.engine.scheduler import Engine
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.window import Window
from perfagent_server.store.tables import cursor, rule_state, run

MONOTONIC = Clock(1000.0)


class Slow(OddRule):
    """A rule that takes a quarter of a second for each step of a slow run."""

    def judge(self, window: Window) -> Finding | None:
        if window.run.startswith("slow"):
            MONOTONIC.at += 0.25
        return None


def engine_of(bench: Bench, *, load_s: float = 0.0) -> Engine:
    """load_s: how long each run takes to load."""

    def plan_of(_project: str, _off: Sequence[str], _tags: Sequence[str]) -> Plan:
        MONOTONIC.at += load_s
        return Plan((*all_rules(), Slow()))

    return bench.engine(clock=Clock(NOW), monotonic=MONOTONIC, plan_of=plan_of)


def send(bench: Bench, frames: int, *, last: float = 1.0, events: Sequence[Event] = (), name: str = "slow") -> None:
    for step in range(1, frames):
        bench.send({"loss": [1.0]}, [step], name=name)
    bench.send({"loss": [last]}, [frames], name=name, events=events)


def judge_all(engine: Engine) -> None:
    while engine.run_once():
        pass


def test_a_slow_run_delays_the_nan_of_another_by_seconds(bench: Bench) -> None:
    engine = engine_of(bench)
    send(bench, 300, last=math.nan)
    bench.send({"loss": [1.0, math.nan]}, [1, 2], name="sick")
    began = MONOTONIC.at
    while ("sick", "nonfinite_loss") not in bench.told():
        assert engine.run_once()
    assert MONOTONIC.at - began < 10
    judge_all(engine)
    assert bench.told() == [("sick", "nonfinite_loss"), ("slow", "nonfinite_loss")]
    assert engine.counters["frames"] == 301


def test_two_late_runs_are_judged_in_turn(bench: Bench) -> None:
    engine = engine_of(bench)
    send(bench, 100)
    send(bench, 20, last=math.nan, name="slow too")
    began = MONOTONIC.at
    while not bench.told():
        assert engine.run_once()
    assert MONOTONIC.at - began < 20


@pytest.mark.parametrize(("load_s", "name", "within_s"), [(0.0, "slow", 5), (1.0, "other", 15)])
def test_a_nan_is_told_before_many_runs_are_loaded_or_judged(
    bench: Bench, load_s: float, name: str, within_s: float
) -> None:
    engine = engine_of(bench, load_s=load_s)
    bench.send({"loss": [1.0, math.nan]}, [1, 2], name="sick")
    for number in range(60):
        bench.send({"loss": [1.0]}, [1], name=f"{name} {number}")
    began = MONOTONIC.at
    engine.run_once()
    assert bench.told() == [("sick", "nonfinite_loss")]
    assert MONOTONIC.at - began < within_s
    judge_all(engine)
    assert engine.counters["frames"] == 61


def test_the_verdicts_of_runs_that_ended_delay_no_round(bench: Bench) -> None:
    end = Event(kind="state", time=NOW, step=1, data={"state": "finished"})
    for number in range(12):
        send(bench, 1, events=[end], name=f"ended {number}")
    before = engine_of(bench)
    judge_all(before)
    before.checkpoint()
    engine = engine_of(bench, load_s=1.0)
    engine.run_once()
    began = MONOTONIC.at
    engine.settle_outcomes()
    assert MONOTONIC.at - began < 5
    while engine.settle_outcomes():
        pass
    assert {row["outcome"] for row in bench.rows(run)} == {"healthy"}


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_late_run_goes_on_after_a_restart(bench: Bench, has_snapshot: bool) -> None:
    engine = engine_of(bench)
    send(bench, 50, last=math.nan)
    engine.run_once()
    engine.checkpoint()
    assert min(row["tail_id"] for row in bench.rows(cursor)) < 50, "what was not judged stays in the tail"
    if not has_snapshot:
        bench.write(update(rule_state).values(version=0))
    again = engine_of(bench)
    judge_all(again)
    assert bench.told() == [("slow", "nonfinite_loss")]
    again.checkpoint()
    assert {row["tail_id"] for row in bench.rows(cursor)} == {50}
