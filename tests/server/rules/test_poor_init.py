"""An initialization that gradients do not get through is told in the first steps; healthy beginnings are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from judging import fired, frame, judge_series, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.loss.poor_init import PoorInit

RULES = (PoorInit(),)
FLAT = [2.303 + 0.01 * ((7 * step) % 11 - 5) / 5 for step in range(400)]
FALLING = [2.303 * 0.98**step + 0.2 for step in range(400)]


def _run(losses: list[float], norms: Any, *, restart: bool = False, every: int = 16) -> list[Change]:
    """norms: of a measurement (0, 1, ...) -> the gradient norm of each layer, measured in every 16th step."""
    evaluator, changes = make_evaluator(rules=RULES), []
    for begin in range(0, len(losses), every):
        steps = range(begin + 1, min(begin + every, len(losses)) + 1)
        stored = frame({"loss": losses[begin : begin + every]}, steps, ident=evaluator.upto + 1)
        layers = {f"grad_norm/layer.{place}": [float(norm)] for place, norm in enumerate(norms(begin // every))}
        stored.groups.extend(frame(layers, [steps[0]]).groups if layers else [])
        changes += evaluator.take(stored)
        evaluator = restored(evaluator) if restart else evaluator
    return changes


@pytest.mark.parametrize("restart", [False, True])
def test_gradients_that_vanish_with_depth_while_the_loss_is_flat_are_told(restart: bool) -> None:
    """Measured: twelve sigmoid layers."""
    [alert] = fired(_run(FLAT, lambda _: [0.3 * 0.1**depth for depth in range(10)], restart=restart))
    assert (alert.finding.severity, alert.finding.cause) == ("warning", "")
    assert alert.step <= 100
    assert "times that of the median layer" in alert.finding.message
    assert alert.finding.evidence["first"] == FLAT[0]


def test_layers_that_never_get_a_gradient_are_counted() -> None:
    [alert] = fired(_run(FLAT, lambda _: [0.0] * 7 + [0.5]))
    assert alert.finding.cause == "zeros"
    assert alert.finding.title == "7 of 8 layers never got a gradient"
    assert len(alert.finding.evidence["silent_layers"]) == 7


HEALTHY = {
    "a transformer": (FALLING, lambda _: np.geomspace(4e-4, 1.0, 24)),
    "a warm-up in which the loss is flat yet": (FLAT, lambda _: np.geomspace(4e-4, 1.0, 24)),
    "LoRA, whose A gets its first gradient when B has moved": (FLAT, lambda at: [0.0 if at == 0 else 0.01] * 7 + [1.0]),
    "residual branches that begin at zero": (FLAT, lambda at: [1e-9 if at == 0 else 0.1] * 7 + [1.0]),
    "experts that get no token now and then": (
        FLAT,
        lambda at: [0.0 if (place + at) % 8 else 0.1 for place in range(16)],
    ),
    "steep, but it learns": (FALLING, lambda _: [0.3 * 0.1**depth for depth in range(10)]),
    "it broke later": (FLAT, lambda at: [0.1] * 8 if at == 0 else [0.0] * 7 + [1.0]),
    "nothing measured": (FLAT, lambda _: []),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_beginnings_are_silent(kind: str) -> None:
    losses, norms = HEALTHY[kind]
    assert _run(losses, norms) == []


def test_it_is_over_when_the_loss_falls() -> None:
    losses = [*FLAT[:200], *FALLING[:200]]
    changes = _run(losses, lambda _: [0.3 * 0.1**depth for depth in range(10)])
    assert [change.kind for change in changes] == ["fire", "resolve"]


def test_first_steps_that_only_undo_the_beginning_are_a_remark() -> None:
    draw = np.random.default_rng(1)
    losses = 3.3 + 25 * np.exp(-np.arange(400) / 4) + 0.05 * draw.normal(size=400)
    [alert] = fired(judge_series({"loss": losses.tolist()}, rules=RULES)[0])
    assert (alert.finding.severity, alert.finding.cause) == ("info", "first loss")
    assert alert.step == 220


@pytest.mark.parametrize("losses", [FALLING, [10 * (1 + step) ** -0.3 for step in range(400)]])
def test_a_loss_that_simply_falls_is_no_remark(losses: list[float]) -> None:
    assert judge_series({"loss": losses}, rules=RULES)[0] == []
