"""straggler and comm_bound: what one rank does beside the others."""

from __future__ import annotations

import random

import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.speed.comm_bound import CommBound
from perfagent_server.rules.speed.straggler import Straggler


def train(
    own: list[float],
    *,
    transfer: float = 0.002,
    steps: int = 60,
    phase: str = "forward",
    noise: float = 0.02,
    seed: int = 0,
) -> list[Change]:
    """Synchronous steps of so many ranks: each works for `own` seconds, and waits for the slowest. phase: where a rank
    that is slower than the first one spends what it needs more."""
    evaluator = make_evaluator(rules=(CommBound(), Straggler()))
    changes: list[Change] = []
    for rank in range(len(own)):
        changes += evaluator.take(
            frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=len(own))])
        )
    return changes + go_on(evaluator, own, range(1, steps + 1), transfer=transfer, phase=phase, noise=noise, seed=seed)


def go_on(
    evaluator: Evaluator,
    own: list[float],
    steps: range,
    *,
    transfer: float = 0.002,
    phase: str = "forward",
    noise: float = 0.02,
    seed: int = 0,
) -> list[Change]:
    draw = random.Random(seed)
    changes: list[Change] = []
    for step in steps:
        now = START + 0.5 * step
        works = [seconds * (1 + draw.gauss(0, noise)) for seconds in own]
        whole = max(works) + transfer
        for rank, work in enumerate(works):
            more = work - min(works)
            columns = {
                "step_time_s": [whole], "phase/comm_s": [whole - work], "phase/forward_s": [min(works) * 0.4],
                "phase/backward_s": [min(works) * 0.6], "phase/data_s": [0.0], "phase/other_s": [0.0],
            }  # fmt: skip
            columns[f"phase/{phase}_s"] = [columns[f"phase/{phase}_s"][0] + more]
            changes += evaluator.take(frame(columns, [step], rank=rank, ident=evaluator.upto + 1, received=now))
        changes += evaluator.tick(now)
    return changes


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_one_rank_that_is_a_third_slower_is_named(ranks: int) -> None:
    own = [0.1] * ranks
    own[ranks - 1] = 0.14
    [change] = fired(train(own))
    assert (change.finding.rule, change.finding.ranks) == ("straggler", [ranks - 1])
    assert change.finding.evidence["phase"] == "forward"
    assert f"Rank {ranks - 1} needs" in change.finding.message
    assert f"; medians of the newest {change.finding.evidence['steps']} steps, P90 of its own" in change.finding.message
    assert len(change.finding.title) <= 90


def test_its_cause_is_the_phase_that_takes_longer() -> None:
    [change] = fired(train([0.1] * 7 + [0.3], phase="data"))
    assert (change.finding.cause, change.finding.severity) == ("data", "critical")
    assert "disk and the network of its node" in change.finding.fix


def test_ranks_that_are_as_fast_or_only_a_little_slower_are_no_stragglers() -> None:
    for seed in range(3):
        assert train([0.1] * 8, noise=0.05, seed=seed) == []
        assert train([0.1] * 7 + [0.11], seed=seed) == []


def test_a_stage_with_more_work_is_no_straggler() -> None:
    assert fired(train([0.1] * 6 + [0.2] * 2)) == []
    assert fired(train([0.1] * 32 + [0.15] * 32)) == []


def test_communication_that_takes_a_third_of_every_ranks_step_is_told() -> None:
    [change] = fired(train([0.1] * 4, transfer=0.08))
    assert change.finding.rule == "comm_bound"
    assert 40 < change.finding.evidence["share_pct"] < 50
    assert f"{change.finding.evidence['share_pct']:.0f} %" in change.finding.message
    assert "medians of the newest 20 steps on the rank that waits least" in change.finding.message


def test_a_wait_for_one_slow_rank_is_not_communication() -> None:
    assert [change.finding.rule for change in fired(train([0.1] * 7 + [0.3]))] == ["straggler"]


def test_one_rank_alone_has_neither() -> None:
    assert train([0.1]) == []


def started(ranks: int) -> Evaluator:
    evaluator = make_evaluator(rules=(CommBound(), Straggler()))
    for rank in range(ranks):
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)]))
    return evaluator


def test_a_straggler_stays_one_alert_while_the_server_is_away() -> None:
    slow, even = [0.1] * 7 + [0.14], [0.1] * 8
    evaluator = started(8)
    assert len(fired(go_on(evaluator, slow, range(1, 61)))) == 1
    evaluator = restored(evaluator)  # the rows of ranks are not in a snapshot
    kinds = {change.kind for change in go_on(evaluator, slow, range(120, 200))}  # it was away for half a minute
    assert kinds <= {"update"}
    assert [change.kind for change in go_on(evaluator, even, range(200, 320)) if change.kind != "update"] == ["resolve"]


def test_one_step_after_a_restart_is_not_taken_for_the_newest_twenty() -> None:
    evaluator = started(4)
    for first, last in ((1, 101), (101, 141)):
        for step in range(first, last):
            waited = 0.09 if step == 101 else 0.03
            for rank in range(4):
                columns = {"step_time_s": [0.15], "phase/comm_s": [waited]}
                one = frame(columns, [step], rank=rank, ident=evaluator.upto + 1, received=START + 0.5 * step)
                assert evaluator.take(one) == [], step
        evaluator = restored(evaluator)


def test_frames_longer_than_the_rows_of_ranks_are_one_alert() -> None:
    """Steps of 5 ms in frames of one second: when a frame's first steps are judged, only its last ones are kept apart."""
    evaluator = started(2)
    columns = {"step_time_s": [0.005] * 200, "phase/comm_s": [0.003] * 200}
    changes: list[Change] = []
    for begin in range(1, 2001, 200):
        for rank in range(2):
            changes += evaluator.take(
                frame(columns, range(begin, begin + 200), rank=rank, ident=evaluator.upto + 1, step_s=0.005)
            )
    assert [change.kind for change in changes if change.kind != "update"] == ["fire"]
    assert changes[0].finding.rule == "comm_bound"
