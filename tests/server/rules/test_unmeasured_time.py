"""unmeasured_time: a fact about time that no phase accounts for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.unmeasured_time import UnmeasuredTime

TWO, MOST = {"forward": 0.04, "other": 0.038}, {"forward": 0.04, "other": 0.07}


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


@pytest.mark.parametrize(
    ("phases", "plots", "severity"),
    [
        (MOST, 57, "warning"),
        (MOST, 30, "info"),
        (TWO, 57, "info"),
        (MOST | {"rollout": 0.0001}, 57, "info"),
    ],
)
def test_most_of_the_time_at_one_line_is_a_warning(phases: dict[str, float], plots: int, severity: str) -> None:
    """Not of a loop whose model plays: there it is the game."""
    made = job((50, phases))
    lines = [
        {"line": "train.py:88", "in": "plot", "count": plots}, {"line": "train.py:12", "in": "<module>", "count": 60 - plots},
    ]  # fmt: skip
    made.event("lines", {"looks": 120, "lines": lines})
    made.train(200, phases)
    [found] = made.found("unmeasured_time")[-1:]
    assert found.severity == severity
    assert "train.py:88 (plot)" in found.message
    assert found.evidence["lines"] == lines


USUAL, LONG = {"forward": 0.1, "other": 0.01}, {"forward": 0.1, "other": 60.0}


@pytest.mark.parametrize(
    ("made", "causes"),
    [
        (lambda: job((99, {"forward": 0.1, "other": 0.001}), (1, {"forward": 0.1, "other": 10.0}), times=5), ["now and then"]),
        (lambda: job((10, TWO), times=60, gpu__utilization_pct=89.0), [""]),
        (lambda: job((10, TWO), times=60, gpu__utilization_pct=90.0), []),
        (lambda: job((2, USUAL), (1, LONG), (400, USUAL)), []),
        (lambda: job((5000, {"forward": 0.0004, "other": 0.0009})), []),
        (lambda: job((300, dict.fromkeys(("forward", "eval", "checkpoint", "plot", "rollout"), 0.05))), []),
        (lambda: job((300, {})), []),
        (lambda: job((18, {"forward": 4.0, "other": 6.0})), []),
    ],
    ids=["bursts", "GPUs that wait", "busy GPUs", "one long step", "a toy", "measured phases", "no phases", "few steps"],
)  # fmt: skip
def test_only_a_habit_that_costs_something_is_told(made: Callable[[], TimedJob], causes: list[str]) -> None:
    assert [one.cause for one in made().found("unmeasured_time")] == causes


def test_it_heals_and_survives_a_restart() -> None:
    made = job((200, TWO))
    made.restart_server()
    made.train(7000, {"forward": 0.1, "other": 0.001})
    assert made.kinds == ["fire", "resolve"]
