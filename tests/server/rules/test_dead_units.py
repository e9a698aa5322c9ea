"""dead_units: measured now and then, and healthy where the network is sparse by design."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from step_job import StepJob

from perfagent_server.rules.model.dead_units import DeadUnits

Measured = Mapping[int, Mapping[str, float]]
"""step -> layer -> share of dead units"""
FLAT = [2.3] * 600
LEARNING = [2.3 * math.exp(-step / 150) + 0.1 for step in range(600)]

HURT = [loss + 0.6 * (step > 300) for step, loss in enumerate(LEARNING)]


def falling(first: float, last: float) -> list[float]:
    draw = random.Random(0)
    return [last + (first - last) * math.exp(-step / 250) + draw.gauss(0, 0.03) for step in range(600)]


def train(measured: Measured, losses: Sequence[float] = FLAT) -> StepJob:
    shares = {
        step: {f"dead_share/{layer}": share for layer, share in layers.items()} for step, layers in measured.items()
    }
    return StepJob(DeadUnits(), restarts=150).go_on({"loss": losses}, rows=1, step_s=1.0, measured=shares)


@pytest.mark.parametrize(
    ("measured", "losses", "told"),
    [
        ({20: {"a": 0.1, "b": 0.4}, 200: {"b": 0.5}, 400: {"b": 0.7}}, FLAT, [(400, "warning", "")]),
        ({11: {"relu": 0.9}}, FLAT, [(101, "warning", "from the start")]),
        ({11: {"relu": 0.999}}, LEARNING, [(11, "warning", "from the start")]),
        ({11: {"relu": 0.1}, 250: {"relu": 0.95}, 500: {"relu": 0.95}}, LEARNING, [(250, "info", "")]),
        ({11: {"relu": 0.3}, 200: {"relu": 0.6}, 400: {"relu": 0.7}}, falling(2.2, 1.8), [(400, "warning", "")]),
        ({11: {"relu": 0.5}, 200: {"relu": 0.61}}, falling(2.2, 1.8), [(200, "warning", "from the start")]),
        ({11: {"relu": 0.5}, 200: {"relu": 0.59}, 400: {"relu": 0.59}}, falling(2.2, 1.8), [(200, "info", "")]),
        ({11: {"relu": 0.93}, 200: {"relu": 0.95}}, falling(2.2, 1.8), [(101, "info", "")]),
        ({200: {"a": 0.1}, 400: {"a": 0.78}, 500: {"a": 0.78}}, HURT, [(500, "warning", "")]),
        ({20: {"a": 0.6}, 200: {"a": 0.7}}, [-0.1] * 600, [(200, "info", "")]),
        ({20: {"a": 0.3}, 200: {"a": 0.49}, 400: {"a": 0.6}}, FLAT, []),
        ({5: {"a": 0.98}, 200: {"a": 0.1}}, FLAT, []),
        ({200: {"a": 0.89}}, FLAT, []),
        ({200: {"a": 0.7}, 300: {"b": 0.7}, 400: {"a": 0.2}}, FLAT, []),
        ({step: {"layers.3.experts.17.act": 1.0, "moe.1.relu": 0.97} for step in (20, 200, 400)}, FLAT, []),
    ],
    ids=[
        "half of it, twice", "nearly all, once", "none alive", "it learns", "they died", "a tenth more died", "few more died",
        "sparse before", "after it had learned", "a loss below zero", "few",
        "only in the first steps", "once", "not in a row", "experts without tokens",
    ],
)  # fmt: skip
def test_dead_layers_are_told(measured: Measured, losses: list[float], told: list[tuple[int, str, str]]) -> None:
    job = train(measured, losses)
    assert [(one.step, one.finding.severity, one.finding.cause) for one in job.fired] == told


def test_the_layer_with_most_dead_units_leads() -> None:
    found = train({200: {"a": 0.0, "b": 0.6, "c": 0.8}, 400: {"a": 0.1, "b": 0.7, "c": 0.9}}).found
    assert found.evidence["layers"] == {"c": 0.9, "b": 0.7}
    assert (found.evidence["measured"], found.evidence["loss_left_pct"]) == (3, 100)


def test_units_that_live_again_resolve_the_alert() -> None:
    job = train({150: {"a": 0.95}, 300: {"a": 0.3}})
    assert (job.kinds, job.changes[-1].step) == (["fire", "resolve"], 300)
