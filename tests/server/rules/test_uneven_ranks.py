"""stage_imbalance, load_imbalance, and straggler among the ranks of one stage."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.backtest.replay import replay
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.speed.load_imbalance import LoadImbalance
from perfagent_server.rules.speed.stage_imbalance import StageImbalance
from perfagent_server.rules.speed.straggler import Straggler

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / "detection")]

import traces  # noqa: E402

RULES = (Straggler(), StageImbalance(), LoadImbalance())
Work = Callable[[int, int], float]
"""(rank, step) -> seconds of own work."""


def started(ranks: int, *, stages: Sequence[int] = ()) -> Evaluator:
    evaluator = make_evaluator(rules=RULES)
    evaluator.start_clock(START)
    for rank in range(ranks):
        told = {"pipeline_stage": stages[rank]} if stages else {}
        event = state("starting", world_size=ranks, **told)
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[event]))
    return evaluator


def go_on(
    evaluator: Evaluator,
    ranks: int,
    steps: range,
    work: Work,
    *,
    with_loss: Sequence[int] = (),
    pressure: float | None = None,
) -> list[Change]:
    """Steps in which all wait for the slowest; the whole work is in the forward pass."""
    changes: list[Change] = []
    for step in steps:
        now = START + 0.5 * step
        own = [work(rank, step) for rank in range(ranks)]
        for rank, seconds in enumerate(own):
            columns = {
                "step_time_s": [max(own) + 0.002],
                "phase/comm_s": [max(own) + 0.002 - seconds],
                "phase/forward_s": [seconds],
            }
            if rank in with_loss:
                columns["loss"] = [2.0]
            if rank == 0 and pressure is not None:
                columns["host/cpu_pressure_pct"] = [pressure]
            changes += evaluator.take(
                frame(columns, [step], rank=rank, ident=evaluator.upto + 1, received=now, step_s=0.5)
            )
        changes += evaluator.tick(now)
    return changes


def train(
    own: Sequence[float], *, stages: Sequence[int] = (), noise: float = 0.02, with_loss: Sequence[int] = ()
) -> list[Change]:
    draw = random.Random(7)
    work = lambda rank, _: own[rank] * (1 + draw.gauss(0, noise))  # noqa: E731
    return go_on(started(len(own), stages=stages), len(own), range(1, 120), work, with_loss=with_loss)


# ---- stages


@pytest.mark.parametrize(("ranks", "last"), [(8, 2), (8, 1), (64, 8), (2, 1)])
def test_a_last_stage_that_is_too_long_is_no_straggler(ranks: int, last: int) -> None:
    own = [0.1] * (ranks - last) + [0.15] * last
    stages = [rank // last for rank in range(ranks)]
    [change] = fired(train(own, stages=stages))
    found = change.finding
    assert found.rule == "stage_imbalance"
    assert found.ranks == list(range(ranks - last, ranks))
    assert f"Stage {ranks // last} of {ranks // last} (rank" in found.message
    assert "has 1.5 times the work of another" in found.title
    assert found.evidence["phase"] in ("forward", "")


def test_the_cost_of_an_uneven_stage_is_what_even_ones_would_save() -> None:
    [change] = fired(train([0.1] * 6 + [0.2] * 2, stages=[0, 0, 1, 1, 2, 2, 3, 3], noise=0.0))
    assert change.finding.evidence["lost_s"] == pytest.approx(0.075)
    assert change.finding.gain_pct == pytest.approx(100 * 0.075 / 0.202, abs=0.1)


@pytest.mark.parametrize(("ranks", "slow"), [(8, 2), (64, 32), (12, 4)])
def test_without_a_word_on_stages_rows_of_ranks_with_equal_work_are_some(ranks: int, slow: int) -> None:
    [change] = fired(train([0.1] * (ranks - slow) + [0.15] * slow))
    assert (change.finding.rule, change.finding.cause) == ("stage_imbalance", "by their work")
    assert change.finding.ranks == list(range(ranks - slow, ranks))
    assert "compare their node with another" in change.finding.fix


def test_the_only_rank_with_a_loss_is_the_last_stage_and_no_straggler() -> None:
    [change] = fired(train([0.1] * 3 + [0.2], with_loss=[3]))
    assert (change.finding.rule, change.finding.evidence["stages_known"]) == ("stage_imbalance", "by the loss")
    assert [change.finding.rule for change in fired(train([0.1] * 3 + [0.2], with_loss=[0, 1, 2, 3]))] == ["straggler"]
    assert [change.finding.rule for change in fired(train([0.2] + [0.1] * 3, with_loss=[0]))] == ["straggler"]


def test_even_stages_are_silent() -> None:
    assert train([0.1] * 4 + [0.108] * 4, stages=[0] * 4 + [1] * 4) == []
    assert train([0.1] * 16, noise=0.05) == []


@pytest.mark.parametrize("told", [True, False])
def test_a_slow_rank_of_a_stage_is_found_beside_a_stage_that_is_longer(told: bool) -> None:
    own = [0.1] * 8 + [0.15] * 8
    own[2] = 0.16  # as slow as the other stage
    changes = fired(train(own, stages=[0] * 8 + [1] * 8 if told else ()))
    assert [
        (change.finding.rule, change.finding.ranks) for change in changes if change.finding.rule == "straggler"
    ] == [("straggler", [2])]
    [straggler] = [change.finding for change in changes if change.finding.rule == "straggler"]
    assert straggler.evidence["typical_own_s"] == pytest.approx(0.1, abs=0.003)


def test_what_ranks_said_of_their_stage_outlives_a_restart_of_the_server() -> None:
    draw = random.Random(7)
    own = [0.1] * 3 + [0.2]
    work = lambda rank, _: own[rank] * (1 + draw.gauss(0, 0.02))  # noqa: E731
    evaluator = started(4, stages=[0, 1, 2, 3])
    assert [change.finding.rule for change in fired(go_on(evaluator, 4, range(1, 60), work))] == ["stage_imbalance"]
    evaluator = restored(evaluator)
    evaluator.start_clock(START + 30)
    assert fired(go_on(evaluator, 4, range(60, 180), work)) == []
    assert [one.rule for one in evaluator.findings()] == ["stage_imbalance"]


@pytest.mark.parametrize("told", [True, False])
def test_the_recorded_jobs_are_named_right_with_and_without_a_word_on_stages(told: bool) -> None:
    slowed, unequal = (without_stages(traces.read_trace(name), told) for name in ("AR", "SE"))
    assert [(one.rule, one.ranks) for one in replay(slowed, Plan(RULES)).alerts] == [("straggler", (0,))]
    found = replay(unequal, Plan(RULES)).alerts
    assert {one.rule: one.severity for one in found} == {"stage_imbalance": "warning", "load_imbalance": "info"}
    assert [one.ranks for one in found if one.rule == "stage_imbalance"] == [tuple(range(32, 64))]


def without_stages(trace: traces.Trace, told: bool) -> list[object]:
    if told:
        return [*trace.moments]
    return [replace(one, events=tuple(_without_stage(event) for event in one.events)) for one in trace.moments]


def _without_stage(event: Event) -> Event:
    data = {name: value for name, value in event.data.items() if name != "pipeline_stage"}
    return Event(kind=event.kind, time=event.time, data=data)


# ---- work that differs from step to step


def lengths(share: float, seed: int = 3) -> Work:
    """In each step a third of the ranks at random has longer sequences."""
    draw = random.Random(seed)
    return lambda _rank, _step: 0.1 * (1 + share * (draw.random() < 0.3)) * (1 + draw.gauss(0, 0.01))


@pytest.mark.parametrize(("share", "severity"), [(0.1, None), (0.25, "info"), (0.6, "warning")])
def test_sequences_that_are_long_on_another_rank_in_each_step_are_told_by_what_they_cost(
    share: float, severity: str | None
) -> None:
    changes = fired(go_on(started(8), 8, range(1, 140), lengths(share)))
    assert [change.finding.rule for change in changes] == (["load_imbalance"] if severity else [])
    for change in changes:
        assert change.finding.severity == severity
        assert (
            "8 different ranks, so it is the work and no slow rank. The most of it is in forward"
            in change.finding.message
        )
        assert "TokenBudgetBatchSampler" in change.finding.fix


def test_one_slow_rank_is_no_uneven_work() -> None:
    changes = train([0.1] * 7 + [0.16])
    assert [change.finding.rule for change in fired(changes)] == ["straggler"]


def test_ranks_that_fight_for_the_same_cores_are_not_judged() -> None:
    assert fired(go_on(started(8), 8, range(1, 200), lengths(0.6), pressure=70.0)) == []
    assert len(fired(go_on(started(8), 8, range(1, 200), lengths(0.6), pressure=2.0))) == 1


def test_an_alert_on_uneven_work_is_resolved_when_it_is_even() -> None:
    evaluator = started(8)
    assert len(fired(go_on(evaluator, 8, range(1, 140), lengths(0.6)))) == 1
    changes = go_on(evaluator, 8, range(140, 400), lengths(0.0))
    assert [change.kind for change in changes if change.kind != "update"] == ["resolve"]


def test_a_straggler_is_named_although_the_frames_of_one_rank_are_ahead() -> None:
    """Frames hold a second of steps each, and those of the ranks are half a second apart."""
    evaluator = started(2)
    changes: list[Change] = []
    columns = [
        {"step_time_s": [0.02] * 50, "phase/comm_s": [0.015] * 50, "phase/forward_s": [0.005] * 50},
        {"step_time_s": [0.02] * 50, "phase/comm_s": [0.0] * 50, "phase/forward_s": [0.02] * 50},
    ]
    for second in range(1, 60):
        steps = range(50 * (second - 1) + 1, 50 * second + 1)
        for rank in (0, 1):
            now = START + second + 0.5 * rank
            taken = frame(columns[rank], steps, rank=rank, ident=evaluator.upto + 1, received=now, step_s=0.02)
            changes += evaluator.take(taken)
            changes += evaluator.tick(now)
    assert [(change.kind, change.finding.rule) for change in changes] == [("fire", "straggler")]
