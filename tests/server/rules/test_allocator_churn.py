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
        (1150.0, {"pause_every": 40}, "info", 30.0),  # which may be those of the evaluations
        (1150.0, {"pause_every": 600}, "warning", 30.0),
        (1150.0, {"kernel": 15.0, "busy": 79.0}, "info", 15.0),
        (49.0, {"step_s": 0.0004}, None, 0),
        (1150.0, {"step_s": 0.1}, None, 0),
        (1150.0, {"kernel": 9.9}, None, 0),
        (2600.0, {"busy": 80.0}, None, 0),
        ([20000.0 if number < 2 else 3.0 for number in range(60)], {}, None, 0),  # at the start
        ([5000.0 if number % 5 == 0 else 10.0 for number in range(60)], {}, None, 0),  # now and then
    ],
)
def test_faults_that_take_a_tenth_of_the_step_are_told(
    faults: Any, more: dict[str, Any], severity: str | None, gain_pct: float
) -> None:
    job = train(faults, **more)
    assert job.severities == ([severity] if severity else [])
    for change in job.fired:
        assert change.finding.gain_pct == pytest.approx(gain_pct)
        assert change.finding.evidence["bytes_per_step"] == faults * 4096


def test_the_alert_is_over_when_the_faults_are() -> None:
    assert train([1150.0 if number < 30 else 5.0 for number in range(60)]).kinds == ["fire", "resolve"]
