"""recompiles: what torch.compile compiles again and again, counted and in words."""

from __future__ import annotations

from typing import Any

import pytest
from timed_job import TimedJob

from perfagent.wire import Event
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.speed.compile_reasons import compiled_functions
from perfagent_server.rules.speed.recompiles import Recompiles

STEP = {"forward": 0.04, "backward": 0.05, "other": 0.01}
SIZE = "tensor 'tokens' size mismatch at index 1. expected {}, actual {}"


def event(reason: str, *, limit: int = 0, function: str = "forward", line: str = "model.py:9") -> dict[str, Any]:
    told = {"function": function, "line": line, "reason": reason, "seconds": 2.0, "limit_reached": bool(limit)}
    return told | ({"limit": limit} if limit else {})


def tell(job: TimedJob, data: dict[str, Any], rank: int = 0) -> None:
    job.send([], rank=rank, events=[Event(kind="compile", time=job.now, step=job.step, data=data)])


def nine_lengths(job: TimedJob) -> None:
    for length in range(3, 10):
        job.train(1, STEP | {"compile": 2.0})
        tell(job, event(SIZE.format(length, length + 1)))
    tell(job, event(SIZE.format(10, 11), limit=8))


def keeps_compiling(*, every: int, seconds: float = 2.0, steps: int = 600, first: int = 60) -> TimedJob:
    job = TimedJob(Recompiles())
    job.train(first, STEP)
    for number in range(steps // every):
        job.train(1, STEP | {"compile": seconds})
        tell(job, event(SIZE.format(number + 3, number + 4)))
        job.train(every - 1, STEP)
    return job


def test_nine_lengths_up_to_the_limit_are_named_with_the_dimension() -> None:
    job = TimedJob(Recompiles())
    job.train(1, STEP | {"compile": 5.0})
    nine_lengths(job)
    job.train(20, STEP)
    [found] = job.found("recompiles")
    assert found.severity == "warning"
    assert found.title == "torch.compile gave up on forward after 8 compilations"
    assert "`forward` (model.py:9) 8 times for 9 lengths of dimension 1 of `tokens`." in found.message
    assert "the limit of 8 (torch._dynamo.config.recompile_limit)" in found.message
    assert "mark_dynamic" in found.fix
    assert "pad_to_multiple_of" in found.fix
    assert found.since_step == 8
    assert found.evidence["functions"][0]["times"] == 8


def test_a_limit_stays_named_when_events_of_many_ranks_have_pushed_it_out() -> None:
    job = TimedJob(Recompiles(), ranks=2)
    nine_lengths(job)
    for number in range(600):
        tell(job, event(f"x == {number}", function="other"), rank=1)
    job.train(2, STEP)
    [found] = job.found("recompiles")
    assert "`forward`" in found.message


def test_compiling_that_goes_on_is_a_share_of_the_time() -> None:
    job = keeps_compiling(every=100)
    [found] = job.found("recompiles")
    assert found.title.startswith("Compiling takes ")
    assert 10 <= found.evidence["share_pct"] <= 20, "2 s in every 12 s"
    assert "lengths of dimension 1 of `tokens`" in found.message
    assert "limit" not in found.message
    assert found.gain_pct == pytest.approx(found.evidence["share_pct"])


def test_less_than_the_threshold_is_silent() -> None:
    assert keeps_compiling(every=100, seconds=0.3).changes == []


def test_the_first_compilations_are_no_finding() -> None:
    job = TimedJob(Recompiles())
    for seconds in (30.0, 20.0, 10.0, 5.0):
        job.train(10, STEP | {"compile": seconds})
    job.train(1000, STEP)
    assert job.changes == []


def test_shapes_of_a_first_evaluation_and_a_last_batch_are_no_habit() -> None:
    job = TimedJob(Recompiles())
    job.train(200, STEP)
    job.train(1, STEP | {"compile": 20.0})
    tell(job, event(SIZE.format(32, 17)))
    job.train(1, STEP | {"eval": 30.0})
    job.train(1, STEP | {"compile": 20.0})
    tell(job, event("GLOBAL_STATE changed: grad_mode"))
    job.train(400, STEP)
    assert job.changes == []


def test_one_long_compilation_counts_as_the_second_longest() -> None:
    job = TimedJob(Recompiles())
    job.train(100, STEP)
    for seconds in (0.1, 0.1, 60.0):
        job.train(100, STEP)
        job.train(1, STEP | {"compile": seconds})
    job.train(100, STEP)
    assert job.changes == []


def test_it_is_over_when_nothing_is_compiled_any_more() -> None:
    job = keeps_compiling(every=100, steps=400)
    assert len(job.found("recompiles")) == 1
    job.train(9000, STEP)
    assert [change.kind for change in job.changes][-1] == "resolve"


def test_it_survives_a_restart_of_the_server() -> None:
    job = TimedJob(Recompiles())
    nine_lengths(job)
    job.train(2, STEP)
    job.restart_server()
    job.train(300, STEP)
    assert len(job.found("recompiles")) == 1
    assert [change.kind for change in job.changes if change.kind == "resolve"] == []


@pytest.mark.parametrize(
    ("reasons", "said", "kind"),
    [
        ([f"self.scale == {n}" for n in range(1, 9)], "9 times for 9 values of `self.scale`", "values"),
        ([f"len(xs) == {n}" for n in range(1, 9)], "9 times for 9 lengths of `xs`", "values"),
        (["self.name == 'a'", "self.name == 'b'"], "3 times for 3 values of `self.name`", "values"),
        ([SIZE.format(n, n + 1) for n in range(3, 11)], "9 times for 9 lengths of dimension 1 of `tokens`", "sizes"),
        ([SIZE.format(3, n) for n in range(4, 12)], "9 times for 9 lengths of dimension 1 of `tokens`", "sizes"),
        (["tensor 'x' dtype mismatch. expected Float, actual Double"],
         "2 times because of `tensor 'x' dtype mismatch. expected Float, actual Double`", "other"),
        ([""], "2 times for a reason unknown", "other"),
        (["d['{0}'] == 1", "d['{0}'] == 2", SIZE.format(3, 4)],
         "4 times for 3 values of `d['{0}']` and for 2 lengths of dimension 1 of `tokens`", "values"),
    ],
)  # fmt: skip
def test_reasons_are_counted_by_what_changed(reasons: list[str], said: str, kind: str) -> None:
    [one] = compiled_functions([event(reason) for reason in reasons])
    assert one.said() == f"`forward` (model.py:9) {said}"
    assert one.kind == kind


def test_a_function_that_was_given_up_comes_first() -> None:
    told = [event(f"n == {n}", function="often") for n in range(20)] + [event(SIZE.format(3, 4), limit=8)]
    assert [one.function for one in compiled_functions(told)] == ["forward", "often"]


@pytest.mark.parametrize(
    "data", [{}, {"function": 3, "reason": None, "seconds": "x", "limit_reached": "yes"}, {"limit_reached": True}]
)
def test_an_event_of_another_agent_breaks_nothing(data: dict[str, Any]) -> None:
    job = TimedJob(Recompiles())
    tell(job, data)
    job.train(100, STEP)
    assert len(job.found("recompiles")) == (data.get("limit_reached") is True)


def test_a_step_that_compiles_says_nothing_about_the_speed_of_the_others() -> None:
    job = TimedJob(Recompiles())
    job.train(100, STEP)
    job.train(1, STEP | {"compile": 2.0})
    job.train(10, STEP)
    assert job.evaluator.window.wall.interrupted == {101}


def test_of_all_rules_only_this_one_speaks_of_it() -> None:
    job = TimedJob(*all_rules())
    job.train(100, STEP)
    for number in range(8):
        job.train(1, STEP | {"compile": 2.0})
        tell(job, event(SIZE.format(number + 3, number + 4), limit=8 if number == 7 else 0))
        job.train(99, STEP)
    assert {change.finding.rule for change in job.changes if change.kind == "fire"} == {"recompiles"}


def test_a_run_that_only_compiled_at_its_start_is_healthy_and_says_where_the_time_went() -> None:
    job = TimedJob(*all_rules())
    job.train(1, STEP | {"compile": 30.0})
    job.train(2, STEP | {"compile": 20.0})
    job.train(600, STEP)
    verdict = job.evaluator.verdict()
    assert verdict.rule == "healthy"
    assert verdict.evidence["wall_time_pct"]["compiling"] == pytest.approx(40, abs=1)
