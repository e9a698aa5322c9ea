"""A loss that stands still is remarked, with what is known about why; one that falls, however slowly, is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from step_job import StepJob

from perfagent_server.rules.loss.loss_plateau import LossPlateau


def noise(steps: int) -> Any:
    return 0.05 * np.random.default_rng(1).normal(size=steps)


def train(losses: Any, **series: Any) -> StepJob:
    return StepJob(LossPlateau()).go_on({"loss": losses, **series}, rows=250)


def test_a_loss_that_stopped_falling_is_a_remark() -> None:
    job = train(3 + 2 * np.exp(-np.arange(5000) / 300) + noise(5000))
    assert (job.found.severity, job.found.cause) == ("info", "")
    assert 2000 < job.alert.step < 4000
    assert job.found.evidence["values"] >= 1000
    assert job.found.evidence["standard_error"] == pytest.approx(
        0.05 * (4 / job.found.evidence["values"]) ** 0.5, rel=0.1
    )


@pytest.mark.parametrize(("left", "cause"), [(0.05, "late"), (0.051, "")])
def test_a_rate_that_is_used_up_is_why(left: float, cause: str) -> None:
    losses = 3 + noise(4000)
    losses[:500] += np.linspace(2, 0, 500)
    lr = [*np.linspace(1e-3, left * 1e-3, 1500), *[left * 1e-3] * 2500]
    assert train(losses, lr=lr).found.cause == cause


def test_a_loss_that_never_fell_is_told_so() -> None:
    job = train(2.303 + noise(2500))
    assert (job.found.cause, job.alert.step) == ("never fell", 1350)


@pytest.mark.parametrize(("fall", "fires"), [(0.0, True), (0.0015, True), (0.0045, False)])
def test_improving_by_four_thousandths_of_the_level_is_none(fall: float, fires: bool) -> None:
    """fall: from one half of the newest 1,000 values to the next, as a share of the level."""
    losses = 3 * (1 - fall * np.arange(1250) / 500) + noise(1250) / 100
    assert len(train(losses).fired) == fires


@pytest.mark.parametrize(
    ("losses", "fires"),
    [
        (20 * noise(4000), True), (-4 + 20 * noise(4000), True),  # at zero or below the spread is the measure
        (-0.002 * np.arange(4000) + 20 * noise(4000), False), (8 * (1 + np.arange(900)) ** -0.1 + noise(900), False),
        (8 * (1 + np.arange(12_000)) ** -0.1 + noise(12_000), False), (3 + np.arange(4000) / 1000 + noise(4000), False),
    ],
    ids=["zero", "below", "falls below", "short power law", "power law", "rises"],
)  # fmt: skip
def test_a_loss_that_moves_is_no_plateau(losses: Any, fires: bool) -> None:
    assert len(train(losses).fired) == fires
