"""unmeasured_time: a fact about time that no phase accounts for."""

from __future__ import annotations

import pytest
from timed_job import TimedJob

from perfagent.wire import Event
from perfagent_server.rules.speed.unmeasured_time import UnmeasuredTime


def job(*parts: tuple[int, dict[str, float]], times: int = 1, **readings: float) -> TimedJob:
    made = TimedJob(UnmeasuredTime())
    for _ in range(times):
        for steps, phases in parts:
            made.train(steps, phases)
            if readings:
                made.read(**readings)
    return made


@pytest.mark.parametrize(("other_s", "found"), [(0.02, False), (0.07, True)])
def test_a_third_of_the_step_in_no_phase_is_said_as_a_fact(other_s: float, found: bool) -> None:
    made = job((300, {"forward": 0.04, "backward": 0.06, "other": other_s}))
    assert [one.severity for one in made.found("unmeasured_time")] == (["info"] if found else [])
    for one in made.found("unmeasured_time"):
        assert "41 % of the time" in one.message
        assert "(70 ms a step)" in one.message
        assert "logging, own Python code, or sleep" in one.message
        assert one.evidence["usual_s"] == pytest.approx(0.07)
        assert one.cause == ""


def test_bursts_are_told_as_such() -> None:
    made = job((99, {"forward": 0.1, "other": 0.001}), (1, {"forward": 0.1, "other": 10.0}), times=5)
    [found] = made.found("unmeasured_time")
    assert found.cause == "now and then"
    assert "in some steps only" in found.message


def test_lines_that_the_agent_met_then_are_named() -> None:
    made = job((50, {"forward": 0.04, "other": 0.06}))
    lines = [{"line": "train.py:88", "in": "plot", "count": 57}, {"line": "train.py:12", "in": "<module>", "count": 3}]
    made.send([], events=[Event(kind="lines", time=made.now, step=made.step, data={"looks": 120, "lines": lines})])
    made.train(200, {"forward": 0.04, "other": 0.06})
    [found] = made.found("unmeasured_time")
    assert "Most often the script is in train.py:88 (plot) then." in found.message
    assert found.evidence["lines"] == lines


def test_one_long_step_is_no_habit() -> None:
    made = job(
        (2, {"forward": 0.1, "other": 0.01}),
        (1, {"forward": 0.1, "other": 60.0}),
        (400, {"forward": 0.1, "other": 0.01}),
    )
    assert made.changes == []


def test_gpus_that_work_all_the_time_are_not_waiting_for_the_script() -> None:
    parts = (10, {"forward": 0.04, "other": 0.06})
    assert job(parts, times=60, gpu__utilization_pct=96.0).changes == []
    assert len(job(parts, times=60, gpu__utilization_pct=50.0).found("unmeasured_time")) == 1


def test_the_loop_of_a_toy_is_silent() -> None:
    assert job((5000, {"forward": 0.0004, "other": 0.0006})).changes == []


def test_evaluations_saves_and_named_phases_are_measured() -> None:
    assert job((300, {"forward": 0.05, "eval": 0.05, "checkpoint": 0.05, "plot": 0.05, "rollout": 0.05})).changes == []


def test_a_loop_without_phases_says_nothing() -> None:
    made = TimedJob(UnmeasuredTime())
    made.train(300, {})
    assert made.changes == []


def test_it_heals_and_survives_a_restart() -> None:
    made = job((200, {"forward": 0.04, "other": 0.06}))
    made.restart_server()
    made.train(20_000, {"forward": 0.04, "other": 0.001})
    assert [change.kind for change in made.changes if change.kind != "update"] == ["fire", "resolve"]


def test_it_never_comes_before_what_is_wrong_with_the_loss() -> None:
    made = TimedJob()
    made.train(300, {"forward": 0.04, "backward": 0.03, "other": 0.06})
    assert made.evaluator.verdict().rule in ("healthy", "unmeasured_time")
    for _ in range(20):
        made.step += 1
        made.wait(0.13)
        made.send(
            [made._group({"loss": float("nan"), "step_time_s": 0.13, "phase/other_s": 0.06, "phase/forward_s": 0.07})]
        )
    assert made.evaluator.verdict().rule == "nonfinite_loss"
