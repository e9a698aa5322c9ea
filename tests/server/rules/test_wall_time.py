"""Where the time of a run went, and which of its steps are a measure of its speed."""

from __future__ import annotations

import pytest
from judging import frame, make_evaluator, restored, state

from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.steady_steps import steady_steps


def train(
    evaluator: Evaluator, steps: range, *, rank: int = 0, attempt: int = 1, every: int = 10, late_s: float = 0.0
) -> None:
    """Steps of a second; each tenth evaluates for nine seconds more."""
    for step in steps:
        columns = {"step_time_s": [1.0], "phase/data_s": [0.2], "phase/forward_s": [0.8]}
        if step % every == 0:
            columns |= {"phase/eval_s": [9.0]}
            columns["step_time_s"] = [10.0]
        ident = evaluator.upto + 1
        evaluator.take(frame(columns, [step], rank=rank, attempt=attempt, ident=ident, step_s=1.9, late_s=late_s))


def test_wall_time_adds_up_over_all_steps() -> None:
    evaluator = make_evaluator()
    train(evaluator, range(1, 101))
    whole = evaluator.window.wall.whole()
    assert whole.wall_s == pytest.approx(190.0)
    assert (whole.steps, whole.often["eval"], whole.longest_s["eval"]) == (100, 10, 9.0)
    assert whole.share("eval") == pytest.approx(90 / 190)
    assert sum(whole.seconds.values()) == pytest.approx(190.0)


def test_the_newest_minutes_forget_what_was_before() -> None:
    evaluator = make_evaluator()
    train(evaluator, range(1, 401))
    train(evaluator, range(401, 801), every=10_000)
    evaluator = restored(evaluator)
    assert evaluator.window.wall.recent().share("eval") == 0.0
    assert evaluator.window.wall.whole().share("eval") > 0.3


def test_an_evaluation_after_the_last_step_counts() -> None:
    evaluator = make_evaluator()
    for rank in (0, 1):
        train(evaluator, range(1, 11), rank=rank, every=10_000)
        evaluator.take(frame({"phase/eval_s": [5.0]}, [10], rank=rank, ident=evaluator.upto + 1))
    whole = evaluator.window.wall.whole()
    assert (whole.wall_s, whole.steps, whole.seconds["eval"]) == (pytest.approx(15.0), 10, 5.0)


def test_only_one_rank_counts() -> None:
    evaluator = make_evaluator()
    for rank in (0, 1):
        train(evaluator, range(1, 101), rank=rank)
    assert evaluator.window.wall.whole().steps == 100


def test_steps_that_a_higher_rank_told_first_do_not_count_twice() -> None:
    evaluator = make_evaluator()
    train(evaluator, range(1, 101), rank=1)
    train(evaluator, range(1, 61), rank=0)
    evaluator = restored(evaluator)
    train(evaluator, range(61, 111), rank=0)
    assert evaluator.window.wall.whole().steps == 110


def test_a_new_attempt_goes_on_where_the_older_one_ended() -> None:
    evaluator = make_evaluator()
    train(evaluator, range(1, 101))
    hours_later = 1_700_000_000.0 + 20_000  # by the clock of the server, which counts for nothing here
    evaluator.take(frame({}, [], attempt=2, ident=1000, events=[state("starting")], received=hours_later))
    evaluator = restored(evaluator)
    train(evaluator, range(101, 111), attempt=2, late_s=59.1)
    whole = evaluator.window.wall.whole()
    assert whole.steps == 110
    assert whole.stopped_s == pytest.approx(60.0), "from the last step to the beginning of the first"


def test_steps_with_an_evaluation_are_not_steady() -> None:
    evaluator = make_evaluator()
    train(evaluator, range(1, 61))
    evaluator = restored(evaluator)
    steps, values = steady_steps(evaluator.window, 20)
    assert set(values) == {1.0}
    assert len(steps) == 20
    assert not any(step % 10 == 0 for step in steps)
    assert min(steady_steps(evaluator.window, 1000)[0]) == 6
