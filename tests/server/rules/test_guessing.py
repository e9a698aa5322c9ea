"""A run whose loss is where guessing would put it has learned nothing, and is told so with the likely cause."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from judging import START
from step_job import StepJob

from perfagent.wire import Event
from perfagent_server.rules.loss.loss_plateau import LossPlateau

STEPS = 1000
CLASSES = {"kind": "cross_entropy", "classes": 10, "mean": True}
BROADCAST = {"kind": "mse", "broadcast": [[64, 1], [64, 64]]}


def noise(share: float = 0.02) -> Any:
    return 1 + share * np.random.default_rng(1).normal(size=STEPS)


def train(losses: Any, loss: dict[str, Any] | None = None, **series: Any) -> StepJob:
    told = {5: [Event(kind="loss", time=START, step=5, data=loss)]} if loss else {}
    return StepJob(LossPlateau()).go_on({"loss": losses, **series}, rows=50, events=told)


GUESS = math.log(10) * noise()
FALLS = 2.3 * np.exp(-np.arange(STEPS) / 400) * noise()


@pytest.mark.parametrize(
    ("losses", "loss", "series", "cause"),
    [
        (GUESS, CLASSES, {}, "guess"),
        (1.1 * GUESS, CLASSES, {}, "guess"),  # an unlucky start that nothing improves
        (GUESS, CLASSES, {"update/ratio": [1e-9] * STEPS, "lr": [1e-10] * STEPS}, "tiny steps"),
        (GUESS, CLASSES, {"update/ratio": [2e-6] * STEPS, "grad/clipped_scaled": [1.0] * STEPS}, "clipped scaled"),
        (GUESS, CLASSES, {"update/ratio": [1e-3] * STEPS, "grad/clipped_scaled": [1.0] * STEPS}, "guess"),
        (GUESS, CLASSES | {"fed_by": "softmax"}, {}, "guess fed by softmax"),
        (0.65 * GUESS, CLASSES | {"fed_by": "softmax"}, {}, "fed by softmax"),
        (FALLS, BROADCAST, {}, "broadcast"),
        (5.0 * noise(), {"kind": "mse"}, {}, "flat"),
        (GUESS, CLASSES | {"mean": False}, {}, "flat"),
    ],
    ids=["guess", "above", "tiny", "clipped", "clipped, Adam", "softmax", "floor", "broadcast", "flat", "sum"],
)
def test_loss_at_chance_is_told_with_its_cause(losses: Any, loss: Any, series: Any, cause: str) -> None:
    job = train(losses, loss, **series)
    assert (job.found.cause, job.kinds) == (cause, ["fire"])
    assert job.found.severity == ("info" if cause == "flat" else "warning")
    assert job.alert.step <= {"broadcast": 75, "flat": 525}.get(cause, 325)


@pytest.mark.parametrize(
    ("losses", "loss", "series"),
    [
        (FALLS, CLASSES, {}),
        (FALLS + 1.4612, CLASSES | {"fed_by": "softmax"}, {}),
        (GUESS * (1 - 0.06 * np.minimum(1, np.arange(STEPS) / 300)), CLASSES, {}),  # slowly, but it does
        (GUESS, CLASSES, {"lr": np.arange(1, STEPS + 1) * 1e-6}),  # warming up
        (5.0 * noise(), None, {}),
        (1.386 * noise(), {"kind": "binary_cross_entropy_with_logits"}, {}),  # of a discriminator
        (3.0 * GUESS * np.linspace(1, 0.8, STEPS), CLASSES, {}),
        (40.0 * noise(0.002) + FALLS, CLASSES, {}),  # the sum with a part that stays
    ],
    ids=["falls", "falls fed by softmax", "slow", "warm-up", "unknown", "adversary", "elsewhere", "a part of a sum"],
)
def test_loss_that_may_be_well_is_left_alone(losses: Any, loss: Any, series: Any) -> None:
    assert train(losses, loss, **series).fired == []


def test_run_that_learns_late_is_well_again() -> None:
    job = train(np.where(np.arange(STEPS) < 500, GUESS, FALLS), CLASSES)
    assert job.kinds == ["fire", "resolve"]
