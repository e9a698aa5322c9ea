"""low_mfu on made-up series: no device has told its own yet."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from step_job import StepJob

from perfagent_server.rules.speed.low_mfu import LowMfu
from perfagent_server.rules.speed.throughput_regression import ThroughputRegression

PEAK = 989e12
SHARES = {"forward": 0.33, "backward": 0.6, "optimizer": 0.05, "other": 0.02}


def train(
    mfu_of: Callable[[int], float], steps: int = 359, *, noise: float = 0.005, job: StepJob | None = None
) -> StepJob:
    """Steps at that utilization of an H100."""
    job = job or StepJob(LowMfu())
    draw = random.Random(job.step + 1)
    numbers = range(job.step + 1, job.step + 1 + steps)
    mfu = [mfu_of(step) * (1 + draw.gauss(0, noise)) for step in numbers]
    took = [1.2e14 / (one * PEAK) for one in mfu]
    columns = {"step_time_s": took, "mfu": mfu, "flops_per_s": [one * PEAK for one in mfu]}
    columns |= {f"phase/{phase}_s": [share * one for one in took] for phase, share in SHARES.items()}
    return job.go_on(columns, rows=1, step_s=0.3)


@pytest.mark.parametrize(
    ("mfu", "noise", "told"),
    [(0.45, 0.005, []), (0.45, 0.05, []), (0.45, 0.2, []), (0.203, 0.0, []), (0.198, 0.0, ["info"])],
)
def test_below_a_fifth_is_a_remark_and_a_good_level_is_silent(mfu: float, noise: float, told: list[str]) -> None:
    assert train(lambda _: mfu, 700, noise=noise).severities == told


def test_a_low_level_is_over_when_it_rises() -> None:
    job = train(lambda _: 0.08, 200)
    assert (job.found.severity, job.found.evidence["mfu_pct"]) == ("info", pytest.approx(8.0, 0.01))
    assert "resolve" not in train(lambda _: 0.21, 300, job=job).kinds
    assert "resolve" in train(lambda _: 0.45, 700, job=job).kinds


def test_a_fall_by_ten_percent_is_slower_steps_and_one_alert() -> None:
    job = train(lambda step: 0.40 if step <= 300 else 0.36, job=StepJob(ThroughputRegression(), LowMfu()))
    assert [change.finding.rule for change in job.fired] == ["throughput_regression"]
