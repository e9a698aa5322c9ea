"""update_ratio: measured now and then, of the model and of its layers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from step_job import StepJob

from perfagent_server.rules.model.update_ratio import UpdateRatio

Measured = Mapping[int, Mapping[str, float]]
"""step -> layer -> ratio; "" for the model"""
DRAW = random.Random(3)
FLAT = [2.3 + 0.01 * (step % 3) for step in range(800)]
LEARNING = [2.3 * math.exp(-step / 150) + 0.1 for step in range(800)]
GAN = [math.log(2) + DRAW.gauss(0, 0.02) for _ in range(800)]  # at ln 2 the discriminator cannot tell
RESTLESS = [math.exp(DRAW.gauss(0, 0.8)) for _ in range(800)]
RISEN = [2.3, *[2.9 + one for one in FLAT[1:]]]


def train(measured: Measured, losses: Sequence[float] = FLAT, rates: Sequence[float] = (1e-3,) * 800) -> StepJob:
    names = {"": "update/ratio", "clipped": "grad/clipped_scaled"}
    ratios = {
        step: {names.get(layer, f"update_ratio/{layer}"): ratio for layer, ratio in layers.items()}
        for step, layers in measured.items()
    }
    columns = {"loss": losses, "lr": rates}
    return StepJob(UpdateRatio(), restarts=50).go_on(columns, rows=1, step_s=1.0, measured=ratios)


RATE, LATE = [1e-3] * 800, (9, 300, 500)


@pytest.mark.parametrize(
    ("measured", "losses", "rates", "told"),
    [
        ({9: {"": 0.42}}, FLAT, RATE, (200, "warning", "")),
        ({9: {"": 0.29}}, FLAT, RATE, (200, "info", "")),
        ({300: {"": 0.05}}, LEARNING, RATE, (300, "info", "")),
        ({step: {"": 0.06} for step in LATE}, GAN, RATE, (200, "info", "")),
        ({step: {"": 0.06} for step in LATE}, RISEN, RATE, (200, "warning", "")),
        ({step: {"body": 1e-3, "head": 10.0} for step in (20, 300, 500)}, FLAT, RATE, (500, "warning", "one layer")),
        ({step: {"": 9e-9, "a": 2e-9} for step in (300, 500)}, FLAT, RATE, (500, "warning", "small")),
        ({step: {"": 0.049, "a": 9.9} for step in (20, 200, 400)}, FLAT, RATE, None),
        ({20: {"a": 50.0}, 60: {"a": 20.0}, 300: {"a": 0.5}, 500: {"a": 0.1}}, FLAT, RATE, None),
        ({step: {"": 1e-9} for step in (400, 600)}, FLAT, [1e-3] * 350 + [9e-6] * 450, None),
        ({step: {"": 0.0, "a": 0.0} for step in (300, 500)}, FLAT, RATE, None),
        ({step: {"": 1e-8, "a": 1e-8} for step in (300, 500)}, FLAT, RATE, None),
        ({9: {"": 0.15}}, RESTLESS, RATE, None),
        ({9: {"": 0.15}}, LEARNING, RATE, None),
        ({5: {"": 0.42}}, FLAT, RATE, None),
    ],
    ids=[
        "high, and flat", "less high", "high, and learns", "a GAN", "above the first loss", "a layer", "small", "usual",
        "begins at zero", "end of a schedule", "frozen", "not so small", "restless", "learns", "first steps",
    ],
)  # fmt: skip
def test_unusual_ratios_are_told(
    measured: Measured, losses: list[float], rates: list[float], told: tuple[int, str, str] | None
) -> None:
    job = train(measured, losses, rates)
    assert [(one.finding.severity, one.finding.cause) for one in job.fired] == ([told[1:]] if told else [])
    assert all(told and told[0] <= one.step <= told[0] + 11 for one in job.fired)


def test_two_steps_as_large_as_the_weights_are_a_warning() -> None:
    job = train({300: {"": 10.0}, 500: {"": 10.0}}, LEARNING)
    assert job.alert.step == 300
    assert {one.finding.severity for one in job.changes if one.step >= 500} == {"warning"}
    assert train({step: {"body": 1e-3, "head": 30.0} for step in (300, 500)}).found.evidence["layers"] == {"head": 30.0}


def test_gradients_clipped_with_the_loss_scale_on_them() -> None:
    told = {step: {"": 2e-6} for step in (300, 500)}
    assert train(told).fired == []
    clipped = train({step: {**layers, "clipped": 1.0} for step, layers in told.items()})
    assert clipped.found.cause == "clipped scaled"
    assert clipped.found.severity == "warning"
    learns = train({step: {**layers, "clipped": 1.0} for step, layers in told.items()}, LEARNING)
    assert learns.found.severity == "info"
    usual = train({step: {"": 1e-3, "clipped": 1.0} for step in (300, 500)})
    assert usual.fired == []
