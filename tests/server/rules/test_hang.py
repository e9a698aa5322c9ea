"""hang: judged by the clock, by the pauses that this run has made so far."""

from __future__ import annotations

from judging import START, fired, frame, make_evaluator, restored, state
from syrupy.assertion import SnapshotAssertion

from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.life.hang import Hang


def training(*, ranks: int = 1) -> Evaluator:
    evaluator = make_evaluator(rules=(Hang(),))
    for rank in range(ranks):
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)]))
    return evaluator


def steps(evaluator: Evaluator, first: int, last: int, at: float, *, took: float = 1.0, rank: int = 0) -> list[Change]:
    columns = {"step_time_s": [took] * (last - first + 1)}
    made = frame(columns, range(first, last + 1), rank=rank, ident=evaluator.upto + 1, received=at)
    return evaluator.take(made)


def wait(evaluator: Evaluator, since: float, seconds: float, every: float = 3.0) -> list[Change]:
    changes: list[Change] = []
    for tick in range(1, int(seconds / every) + 1):
        changes += evaluator.tick(since + tick * every)
    return changes


def test_pauses_that_a_run_has_made_before_are_no_hang() -> None:
    evaluator = training()
    at = START
    for begin in range(1, 60, 10):
        steps(evaluator, begin, begin + 9, at)
        assert wait(evaluator, at, 45.0) == [], "an evaluation of 45 seconds"
        at += 45
    steps(evaluator, 61, 70, at)
    assert wait(evaluator, at, 210.0) == []
    assert len(fired(wait(evaluator, at + 210, 30.0))) == 1


def test_a_jump_of_the_clock_or_a_server_away_is_no_hang() -> None:
    evaluator = training()
    steps(evaluator, 1, 10, START)
    evaluator.tick(START + 3)
    assert evaluator.tick(START + 86_400) == []
    evaluator = restored(evaluator)
    evaluator.start_clock(START + 200_000)
    assert evaluator.tick(START + 200_003) == []


def test_first_steps_no_agent_and_an_end_are_not_judged() -> None:
    few = training()
    steps(few, 1, 3, START)
    assert wait(few, START, 300.0) == []
    logs = training()
    logs.take(frame({"loss": [1.0] * 50}, range(50), ident=9, received=START))
    assert wait(logs, START, 300.0) == []
    ended = training()
    steps(ended, 1, 10, START)
    ended.take(frame({}, [], ident=9, received=START, events=[state("finished", step=10)]))
    assert wait(ended, START, 300.0) == []
    assert ended.due() is None


def test_silence_of_all_ranks_is_no_hang() -> None:
    evaluator = training(ranks=2)
    for rank in (0, 1):
        steps(evaluator, 1, 10, START, rank=rank)
    evaluator.silence({(1, 0): 31.0, (1, 1): 31.0}, START + 31)
    assert wait(evaluator, START + 31, 300.0) == []


def test_a_run_that_stands_for_a_minute_hangs_until_a_step_ends(words: SnapshotAssertion) -> None:
    evaluator = training()
    steps(evaluator, 1, 10, START)
    assert wait(evaluator, START, 57.0) == []
    [change] = wait(evaluator, START + 57, 6.0)
    assert (change.kind, change.finding.rule, change.finding.severity) == ("fire", "hang", "critical")
    assert (change.finding.title, change.finding.message, change.finding.ranks) == words
    assert steps(evaluator, 11, 11, START + 64) == []
    assert [change.kind for change in wait(evaluator, START + 64, 3.0)] == ["resolve"]
