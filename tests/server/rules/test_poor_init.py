"""An initialization that gradients do not get through is told in the first steps; healthy beginnings are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from judging import START, fired, frame, state
from step_job import StepJob

from perfagent.wire import Event
from perfagent_server.rules.loss.poor_init import PoorInit

FLAT = [2.303 + 0.01 * ((7 * step) % 11 - 5) / 5 for step in range(400)]
FALLING = [2.303 * 0.98**step + 0.2 for step in range(400)]
Norms = Callable[[int], Any]
"""The gradient norm of each layer, by the number of the measurement."""


def vanishing(_: int) -> list[float]:
    """Measured: twelve sigmoid layers."""
    return [0.3 * 0.1**depth for depth in range(10)]


def transformer(_: int) -> Any:
    return np.geomspace(4e-4, 1.0, 24)


def train(losses: Sequence[float], norms: Norms = lambda _: []) -> StepJob:
    """Layers are measured in every 16th step."""
    measured = {
        step: {f"grad_norm/layer.{place}": float(norm) for place, norm in enumerate(norms(step // 16))}
        for step in range(1, len(losses), 16)
    }
    return StepJob(PoorInit(), restarts=2).go_on({"loss": losses}, rows=16, measured=measured)


def test_gradients_that_vanish_with_depth_are_told() -> None:
    job = train(FLAT, vanishing)
    assert (job.found.severity, job.found.cause, job.found.evidence["first"]) == ("warning", "", FLAT[0])
    assert job.alert.step <= 100


def test_layers_that_never_get_a_gradient_are_counted() -> None:
    found = train(FLAT, lambda _: [0.0] * 7 + [0.5]).found
    assert (found.cause, len(found.evidence["silent_layers"])) == ("zeros", 7)


@pytest.mark.parametrize(
    ("first", "last", "alone", "step"),
    [(175.0, 8.0, True, 200), (175.0, 5.0, True, None), (25.0, 8.0, True, None), (175.0, 8.0, False, None)],
)
def test_a_start_far_above_guessing_is_told(first: float, last: float, alone: bool, step: int | None) -> None:
    """Guessing gives 6.9: one that is below it soon began well enough, and a sum of losses may be above it."""
    losses = [last + (first - last) * 0.96**at for at in range(400)]
    made = {"kind": "cross_entropy", "classes": 1000, "mean": True, "alone": alone}
    told = {5: [Event(kind="loss", time=START, step=5, data=made)]}
    job = StepJob(PoorInit(), restarts=2).go_on({"loss": losses}, rows=16, events=told)
    assert [(one.finding.cause, one.step) for one in job.fired] == [("too large", step)] * (step is not None)


HEALTHY: dict[str, tuple[Sequence[float], Norms]] = {
    "a transformer": (FALLING, transformer),
    "a warm-up in which the loss is flat yet": (FLAT, transformer),
    "LoRA, whose A gets its first gradient when B has moved": (FLAT, lambda at: [0.0 if at == 0 else 0.01] * 7 + [1.0]),
    "experts that get no token": (FLAT, lambda at: [0.0 if (place + at) % 8 else 0.1 for place in range(16)]),
    "steep, but it learns": (FALLING, vanishing),
    "it broke later": (FLAT, lambda at: [0.1] * 8 if at == 0 else [0.0] * 7 + [1.0]),
    "nothing measured": (FLAT, lambda _: []),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_beginnings_are_silent(kind: str) -> None:
    assert train(*HEALTHY[kind]).changes == []


@pytest.mark.parametrize(("loss", "causes"), [(2.2, ["not restored"]), (0.5, []), (0.2, [])])
def test_weights_that_were_not_restored_are_told(loss: float, causes: list[str]) -> None:
    judge = train(FALLING).evaluator
    judge.take(frame({}, [], attempt=2, ident=1000, events=[state("starting", start_step=390)]))
    changes = judge.take(frame({"loss": [loss] * 50}, range(391, 441), attempt=2, ident=1001))
    assert [one.finding.cause for one in fired(changes)] == causes


def test_it_is_over_when_the_loss_falls() -> None:
    assert train([*FLAT[:200], *FALLING[:200]], vanishing).kinds == ["fire", "resolve"]
