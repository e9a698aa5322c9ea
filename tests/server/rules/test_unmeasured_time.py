"""unmeasured_time: a fact about time that no phase accounts for."""

from __future__ import annotations

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.unmeasured_time import UnmeasuredTime

TWO = {"forward": 0.04, "other": 0.06}


def job(*parts: tuple[int, dict[str, float]], times: int = 1, **readings: float) -> TimedJob:
    made = TimedJob(UnmeasuredTime())
    for _ in range(times):
        for steps, phases in parts:
            made.train(steps, phases)
            made.read(**readings)
    return made


@pytest.mark.parametrize(("other_s", "fires"), [(0.0427, False), (0.0432, True)])
def test_30_percent_of_the_step_in_no_phase_are_said_as_a_fact(other_s: float, fires: bool) -> None:
    found = job((300, {"forward": 0.04, "backward": 0.06, "other": other_s})).found("unmeasured_time")
    assert [(one.severity, one.cause) for one in found] == ([("info", "")] if fires else [])
    for one in found:
        assert one.evidence["share_pct"] == pytest.approx(100 * other_s / (0.1 + other_s), abs=0.2)
        assert one.evidence["usual_s"] == pytest.approx(other_s)


def test_bursts_are_told_as_such() -> None:
    made = job((99, {"forward": 0.1, "other": 0.001}), (1, {"forward": 0.1, "other": 10.0}), times=5)
    assert [one.cause for one in made.found("unmeasured_time")] == ["now and then"]


def test_lines_that_the_agent_met_then_are_named() -> None:
    made = job((50, TWO))
    lines = [{"line": "train.py:88", "in": "plot", "count": 57}, {"line": "train.py:12", "in": "<module>", "count": 3}]
    made.event("lines", {"looks": 120, "lines": lines})
    made.train(200, TWO)
    [found] = made.found("unmeasured_time")
    assert "train.py:88 (plot)" in found.message
    assert found.evidence["lines"] == lines


USUAL = {"forward": 0.1, "other": 0.01}


@pytest.mark.parametrize(
    "parts",
    [
        [(2, USUAL), (1, {"forward": 0.1, "other": 60.0}), (400, USUAL)],
        [(5000, {"forward": 0.0004, "other": 0.0009})],
        [(300, {"forward": 0.05, "eval": 0.05, "checkpoint": 0.05, "plot": 0.05, "rollout": 0.05})],
        [(300, {})],
        [(18, {"forward": 4.0, "other": 6.0})],
    ],
    ids=["one long step", "a toy", "measured phases", "a loop without phases", "few steps"],
)
def test_what_is_no_habit_or_is_measured_is_silent(parts: list[tuple[int, dict[str, float]]]) -> None:
    assert job(*parts).changes == []


@pytest.mark.parametrize(("busy", "fires"), [(90.0, False), (89.0, True)])
def test_gpus_that_work_all_the_time_wait_for_no_script(busy: float, fires: bool) -> None:
    assert len(job((10, TWO), times=60, gpu__utilization_pct=busy).found("unmeasured_time")) == fires


def test_it_heals_and_survives_a_restart() -> None:
    made = job((200, TWO))
    made.restart_server()
    made.train(7000, {"forward": 0.1, "other": 0.001})
    assert made.kinds == ["fire", "resolve"]
