"""Where the time of a run went, and which of its steps are a measure of its speed."""

from __future__ import annotations

import pytest
from judging import START, frame, make_evaluator, restored, state

from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.steady_steps import steady_steps


def trained(
    steps: range, evaluator: Evaluator | None = None, *, rank: int = 0, attempt: int = 1, every: int = 10, late_s: float = 0.0
) -> Evaluator:  # fmt: skip
    """Steps of a second; each tenth evaluates for nine seconds more."""
    evaluator = evaluator or make_evaluator()
    evals = [9.0 if step % every == 0 else 0.0 for step in steps]
    columns = {"step_time_s": [1.0 + one for one in evals], "phase/data_s": [0.2] * len(steps)}
    columns |= {"phase/forward_s": [0.8] * len(steps), "phase/eval_s": evals}
    ident = evaluator.upto + 1
    evaluator.take(frame(columns, steps, rank=rank, attempt=attempt, ident=ident, step_s=1.9, late_s=late_s))
    return evaluator


def test_wall_time_adds_up_over_all_steps_and_the_newest_minutes() -> None:
    evaluator = trained(range(1, 401))
    whole = evaluator.window.wall.whole()
    assert (whole.wall_s, sum(whole.seconds.values())) == (pytest.approx(760.0), pytest.approx(760.0))
    assert (whole.steps, whole.often["eval"], whole.longest_s["eval"]) == (400, 40, 9.0)
    evaluator = restored(trained(range(401, 801), evaluator, every=10_000))
    assert evaluator.window.wall.recent().share("eval") == 0.0
    assert evaluator.window.wall.whole().share("eval") == pytest.approx(360 / 1160)


def test_only_the_lowest_rank_counts_also_after_the_last_step() -> None:
    evaluator = restored(trained(range(1, 61), trained(range(1, 101), rank=1), rank=0))
    evaluator = trained(range(61, 111), evaluator, rank=0)
    evaluator.take(frame({"phase/eval_s": [5.0]}, [110], rank=0, ident=evaluator.upto + 1))
    whole = evaluator.window.wall.whole()
    assert (whole.steps, whole.seconds["eval"]) == (110, pytest.approx(11 * 9.0 + 5.0))


def test_a_new_attempt_goes_on_where_the_older_one_ended() -> None:
    evaluator = trained(range(1, 101))
    late = START + 20_000  # by the clock of the server, which counts for nothing here
    evaluator.take(frame({}, [], attempt=2, ident=1000, events=[state("starting")], received=late))
    whole = trained(range(101, 111), restored(evaluator), attempt=2, late_s=59.1).window.wall.whole()
    assert whole.steps == 110
    assert whole.stopped_s == pytest.approx(60.0), "from the last step to the beginning of the first"


def test_steps_with_an_evaluation_are_not_steady() -> None:
    window = restored(trained(range(1, 61))).window
    steps, values = steady_steps(window, 20)
    assert (len(steps), set(values)) == (20, {1.0})
    assert not any(step % 10 == 0 for step in steps)
    assert min(steady_steps(window, 1000)[0]) == 6
