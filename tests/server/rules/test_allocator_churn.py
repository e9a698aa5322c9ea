"""allocator_churn: page faults of the training thread beside the step time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from step_job import StepJob

from perfagent_server.rules.speed.allocator_churn import AllocatorChurn

STEP_S = 0.006


def train(
    faults: float | Sequence[float], kernel: float | None = 30.0, *, step_s: float = STEP_S, busy: float | None = None,
    pause_every: int = 0,
) -> StepJob:  # fmt: skip
    """Two minutes of a run, with a reading every two seconds. pause_every: steps from one evaluation to the next."""
    job, each = StepJob(AllocatorChurn()), int(2 / step_s)
    for number in range(60):
        steps = range(1 + each * number, 1 + each * (number + 1))
        pauses = [1.4 if pause_every and step % pause_every == 0 else 0.0 for step in steps]
        told = {"process/page_faults_per_step": faults if isinstance(faults, float) else faults[number]}
        told |= {} if kernel is None else {"process/system_cpu_pct": kernel}
        told |= {} if busy is None else {"gpu/utilization_pct": busy}
        columns = {"step_time_s": [step_s + pause for pause in pauses], "phase/eval_s": pauses}
        job.go_on(columns, rows=each, step_s=step_s, measured={steps[-1]: told})
    return job


@pytest.mark.parametrize(
    ("faults", "more", "severity", "gain_pct"),
    [
        (1150.0, {"kernel": 10.0}, "info", 10.0),
        (1150.0, {"kernel": 24.9}, "info", 24.9),
        (1150.0, {"kernel": 25.0}, "warning", 25.0),
        (400.0, {"kernel": 60.0}, "info", 100 * 400 * 2e-6 / STEP_S),  # no more than faults can take
        (1150.0, {"kernel": None}, "info", 100 * 1150 * 0.7e-6 / STEP_S),
        (1150.0, {"pause_every": 40}, "warning", 30.0),
        (1150.0, {"kernel": 15.0, "busy": 79.0}, "info", 15.0),
    ],
    ids=["a tenth", "less than a quarter", "a quarter", "few faults", "no account", "evaluations", "a GPU that waits"],
)
def test_faults_that_take_a_tenth_of_the_step_are_told(
    faults: float, more: dict[str, Any], severity: str, gain_pct: float
) -> None:
    found = train(faults, **more).found
    assert (found.rule, found.severity) == ("allocator_churn", severity)
    assert found.gain_pct == pytest.approx(gain_pct)
    assert found.evidence["bytes_per_step"] == faults * 4096


@pytest.mark.parametrize(
    ("faults", "more"),
    [
        (49.0, {"step_s": 0.0004}),
        (1150.0, {"step_s": 0.1}),
        (1150.0, {"kernel": 9.9}),
        (2600.0, {"busy": 80.0}),
        ([20000.0 if number < 2 else 3.0 for number in range(60)], {}),
        ([5000.0 if number % 5 == 0 else 10.0 for number in range(60)], {}),
    ],
    ids=["few", "long steps", "the kernel says otherwise", "a busy GPU", "at the start", "now and then"],
)
def test_healthy_steps_are_silent(faults: float, more: dict[str, Any]) -> None:
    assert train(faults, **more).changes == []


def test_the_alert_is_over_when_the_faults_are() -> None:
    assert train([1150.0 if number < 30 else 5.0 for number in range(60)]).kinds == ["fire", "resolve"]
