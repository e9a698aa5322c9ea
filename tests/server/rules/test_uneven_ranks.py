"""straggler, comm_bound, stage_imbalance and load_imbalance: what one rank does beside the others."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from joint_steps import JointSteps, Work
from judging import START, frame, restored

from perfagent.wire import Event
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import replay
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.speed.comm_bound import CommBound
from perfagent_server.rules.speed.load_imbalance import LoadImbalance
from perfagent_server.rules.speed.stage_imbalance import StageImbalance
from perfagent_server.rules.speed.straggler import Straggler

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / "detection")]

import traces  # noqa: E402

RULES = (CommBound(), Straggler(), StageImbalance(), LoadImbalance())


def work_of(own: Sequence[float], noise: float) -> Work:
    draw = random.Random(7)
    return lambda rank, _: own[rank] * (1 + draw.gauss(0, noise))


def train(
    own: Sequence[float], *, steps: int = 100, noise: float = 0.0, stages: Sequence[int] = (), with_loss: Sequence[int] = (),
    **more: Any,
) -> JointSteps:  # fmt: skip
    """Each rank works for so many seconds."""
    job = JointSteps(*RULES, ranks=len(own), stages=stages, with_loss=with_loss)
    return job.go_on(steps, work_of(own, noise), **more)


@pytest.mark.parametrize(
    ("own", "more", "severity", "cause"),
    [
        ([0.1] * 7 + [0.133], {}, None, ""),
        ([0.1] * 7 + [0.134], {}, "warning", ""),
        ([0.1, 0.14], {"noise": 0.02}, "warning", ""),
        ([0.1] * 7 + [0.3], {"phase": "data"}, "critical", "data"),
        ([0.1] * 7 + [0.14], {"transfer": 0.3}, None, ""),
        ([0.1] * 16 + [0.14], {"transfer": 0.24}, "warning", ""),
        ([0.1] * 7 + [0.3], {"transfer": 0.35}, "critical", ""),
        ([0.1] * 31 + [0.2], {}, "critical", ""),
        ([0.1] * 29 + [0.2, 0.1, 0.2], {}, "critical", ""),
        ([0.1], {}, None, ""),
        ([0.1] * 8, {"noise": 0.05}, None, ""),
        ([0.1] * 7 + [0.11], {"noise": 0.02}, None, ""),
        ([0.1] * 5 + [0.2] * 2, {"noise": 0.02}, None, ""),
        ([0.1] * 4 + [0.108] * 4, {"noise": 0.02, "stages": [0] * 4 + [1] * 4}, None, ""),
    ],
    ids=[
        "less", "a third", "one of two", "its data", "costs little", "a tenth of the step", "30 % of it", "one of 32",
        "two of 32", "alone", "as fast", "a little slower", "too many", "even stages",
    ],
)  # fmt: skip
def test_a_slow_rank_is_told_by_what_it_costs(
    own: list[float], more: dict[str, Any], severity: str | None, cause: str
) -> None:
    found = [one for one in train(own, **more).found if one.rule == "straggler"]
    assert [(one.severity, one.cause) for one in found] == ([(severity, cause)] if severity else [])
    for one in found:
        assert one.ranks == [rank for rank, seconds in enumerate(own) if seconds > 0.1]
        assert one.evidence["phase"] == ("data" if cause else "forward")
        assert one.evidence["typical_own_s"] == pytest.approx(0.1, rel=0.02)


def test_a_straggler_is_one_alert_while_the_server_is_away() -> None:
    job = train([0.1] * 7 + [0.14], noise=0.02)
    job.evaluator = restored(job.evaluator)  # the rows of ranks are not in a snapshot
    job.step += 60  # it was away for half a minute
    job.go_on(80, work_of([0.1] * 7 + [0.14], 0.02))
    assert job.kinds == ["fire"]
    assert job.go_on(120, work_of([0.1] * 8, 0.02)).kinds == ["fire", "resolve"]


@pytest.mark.parametrize(
    ("transfer", "severities"), [(0.0425, []), (0.0435, ["info"]), (0.098, ["info"]), (0.102, ["warning"])]
)
def test_communication_of_every_rank_is_told_from_30_percent(transfer: float, severities: list[str]) -> None:
    found = train([0.1] * 4, transfer=transfer, gpu__utilization_pct=60.0).found
    assert [one.severity for one in found if one.rule == "comm_bound"] == severities
    on_cores = train([0.1] * 4, transfer=transfer).found
    assert [one.severity for one in on_cores] == [one for one in severities if one == "warning"]
    for one in found:
        assert one.evidence["share_pct"] == pytest.approx(100 * transfer / (0.1 + transfer))


def test_a_straggler_is_named_although_frames_are_apart() -> None:
    """Frames hold a second of steps each, and those of the ranks are half a second apart."""
    job = JointSteps(CommBound(), Straggler(), ranks=2)
    for begin in range(1, 3001, 50):
        for rank, own in enumerate((0.005, 0.02)):
            columns = {"step_time_s": [0.02] * 50, "phase/comm_s": [0.02 - own] * 50, "phase/forward_s": [own] * 50}
            now, ident = START + 0.02 * (begin + 49) + 0.5 * rank, job.evaluator.upto + 1
            steps = range(begin, begin + 50)
            job.changes += job.evaluator.take(frame(columns, steps, rank=rank, ident=ident, received=now, step_s=0.02))
            job.changes += job.evaluator.tick(now)
    assert [(one.rule, one.ranks) for one in job.found] == [("straggler", [1])]


@pytest.mark.parametrize("told", [True, False])
def test_recorded_jobs_are_named_with_or_without_stages(told: bool) -> None:
    plan = Plan(RULES[1:])
    slowed, unequal = (replay(moments_of(name, told), plan).alerts for name in ("AR", "SE"))
    assert [(one.rule, one.ranks) for one in slowed] == [("straggler", (0,))]
    found = {one.rule: one for one in unequal}
    assert {rule: one.severity for rule, one in found.items()} == {
        "stage_imbalance": "warning",
        "load_imbalance": "info",
    }
    assert found["stage_imbalance"].ranks == tuple(range(32, 64))


def moments_of(name: str, told: bool) -> list[Moment]:
    """A recorded job. told: with the stages of its ranks, as the framework tells them."""

    def without(event: Event) -> Event:
        return msgspec.structs.replace(
            event, data={name: value for name, value in event.data.items() if name != "pipeline_stage"}
        )

    moments = traces.read_trace(name).moments
    return [one if told else dataclasses.replace(one, events=tuple(map(without, one.events))) for one in moments]


@pytest.mark.parametrize(("ranks", "last"), [(8, 2), (2, 1)])
def test_a_last_stage_that_is_too_long_is_no_straggler(ranks: int, last: int) -> None:
    own = [0.1] * (ranks - last) + [0.15] * last
    [found] = train(own, noise=0.02, stages=[rank // last for rank in range(ranks)]).found
    assert (found.rule, found.ranks) == ("stage_imbalance", list(range(ranks - last, ranks)))
    assert (found.evidence["stage"], found.evidence["stages"]) == (ranks // last - 1, ranks // last)
    assert found.evidence["times"] == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(
    ("longer", "transfer", "severity"),
    [
        (0.1145, 0, None),
        (0.116, 0, "info"),
        (0.124, 0, "info"),
        (0.126, 0, "warning"),
        (0.2, 0.78, "info"),
        (0.2, 0.82, None),
    ],
)
def test_stages_are_uneven_by_15_percent_that_cost_5(longer: float, transfer: float, severity: str | None) -> None:
    """What even ones would save is the slowest less the mean of all: a remark, and a warning from a tenth of the step."""
    found = train([0.1] * 2 + [longer] * 2, stages=[0, 0, 1, 1], transfer=transfer).found
    uneven = [one for one in found if one.rule == "stage_imbalance"]
    assert [one.severity for one in uneven] == ([severity] if severity else [])
    for one in uneven:
        assert one.evidence["lost_s"] == pytest.approx((longer - 0.1) / 2)
        assert one.gain_pct == pytest.approx(100 * (longer - 0.1) / 2 / (longer + transfer))


@pytest.mark.parametrize(("ranks", "slow"), [(8, 2), (12, 4)])
def test_without_a_word_rows_of_ranks_with_equal_work_are_stages(ranks: int, slow: int) -> None:
    [found] = train([0.1] * (ranks - slow) + [0.15] * slow, noise=0.02).found
    assert (found.rule, found.cause) == ("stage_imbalance", "by their work")
    assert found.ranks == list(range(ranks - slow, ranks))


def in_turn(more: float) -> Work:
    """In each step another rank has so much more work."""
    return lambda rank, step: 0.1 * (1 + more * (rank == 3 * step % 8))


@pytest.mark.parametrize(("more", "severity"), [(0.108, None), (0.118, "info"), (0.335, "info"), (0.345, "warning")])
def test_work_that_is_longer_on_another_rank_is_told_by_its_cost(more: float, severity: str | None) -> None:
    job = JointSteps(*RULES, ranks=8).go_on(140, in_turn(more))
    found = job.found
    assert [(one.rule, one.severity) for one in found] == ([("load_imbalance", severity)] if severity else [])
    for one in found:
        assert (one.evidence["slowest_ranks"], one.evidence["phase"]) == (8, "forward")
        assert one.gain_pct == pytest.approx(100 * 0.1 * more / (0.102 + 0.1 * more))
        assert job.go_on(260, in_turn(0.0)).kinds == ["fire", "resolve"]


@pytest.mark.parametrize(("pressure", "fires"), [(20.0, False), (19.9, True)])
def test_ranks_that_fight_for_the_same_cores_are_not_judged(pressure: float, fires: bool) -> None:
    job = JointSteps(LoadImbalance(), ranks=8).go_on(140, in_turn(0.6), host__cpu_pressure_pct=pressure)
    assert len(job.found) == fires
