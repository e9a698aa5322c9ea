"""Overfitting is an evaluation that rises while training goes on falling; a gap alone is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from judging import fired, frame, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.loss.overfit import Overfit

RULES = (Overfit(),)
EVERY = 50


def _run(
    training: np.ndarray, evaluation: np.ndarray, *, name: str = "val_loss", restart: bool = False, epochs: bool = False
) -> list[Change]:
    """An evaluation after every 50 steps, counted in steps or in epochs."""
    evaluator, changes = make_evaluator(rules=RULES), []
    for number, value in enumerate(evaluation):
        begin = number * EVERY
        steps = range(begin + 1, begin + EVERY + 1)
        stored = frame({"train_loss": training[begin : begin + EVERY].tolist()}, steps, ident=evaluator.upto + 1)
        stored.groups.extend(frame({name: [float(value)]}, [number + 1 if epochs else steps[-1]]).groups)
        changes += evaluator.take(stored)
        evaluator = restored(evaluator) if restart else evaluator
    return changes


def _training(evaluations: int, *, last: float = 0.2, seed: int = 1) -> np.ndarray:
    at = np.arange(evaluations * EVERY)
    return last + (2.3 - last) * np.exp(-at / 400) + 0.03 * np.random.default_rng(seed).normal(size=len(at))


def _evaluation(evaluations: int, *, rise: float, best: int = 8, noise: float = 0.005, seed: int = 2) -> np.ndarray:
    at = np.arange(evaluations)
    return (
        0.8
        + 1.5 * np.exp(-at / 3)
        + rise * np.maximum(0, at - best)
        + noise * np.random.default_rng(seed).normal(size=evaluations)
    )


@pytest.mark.parametrize("name", ["val_loss", "eval/loss", "test/loss"])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("epochs", [False, True])
def test_an_evaluation_that_rises_while_training_falls_is_told(name: str, restart: bool, epochs: bool) -> None:
    changes = _run(_training(30), _evaluation(30, rise=0.03), name=name, restart=restart, epochs=epochs)
    [alert] = fired(changes)
    found = alert.finding
    assert found.severity == "warning"
    assert 11 <= len(found.evidence["evaluations"]) <= 18
    assert found.since_step == found.evidence["best_step"]
    assert "was best at step" in found.message
    assert found.evidence["training"] < found.evidence["training_at_best"]
    assert "resolve" not in {change.kind for change in changes}


HEALTHY: dict[str, tuple[Any, Any]] = {
    "a gap that stays": (_training(40), _evaluation(40, rise=0.0)),
    "noisy evaluations": (_training(40), _evaluation(40, rise=0.0, noise=0.1)),
    "a training loss above the evaluation's (augmentation)": (_training(40, last=1.5), _evaluation(40, rise=0.0)),
    "both rise (a restart)": (
        _training(40) + np.repeat(np.arange(40) > 20, EVERY) * 0.5,
        _evaluation(40, rise=0.0) + (np.arange(40) > 20) * 0.3,
    ),
    "both fall": (_training(40), 0.3 + 2 * np.exp(-np.arange(40) / 10)),
    "three evaluations only": (_training(3), np.array([1.0, 1.2, 1.4])),
    "evaluations that say nothing": (_training(40), np.full(40, math.nan)),
    "one bad evaluation": (_training(40), _evaluation(40, rise=0.0) + (np.arange(40) == 20) * 1.0),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEALTHY)
def test_what_is_no_overfitting_is_silent(kind: str) -> None:
    assert _run(*HEALTHY[kind]) == []


def test_it_is_over_when_the_evaluation_is_good_again() -> None:
    evaluation = np.concatenate((_evaluation(20, rise=0.05), np.full(10, 0.75)))
    assert [change.kind for change in _run(_training(30), evaluation)] == ["fire", "resolve"]


def test_a_loss_below_zero_is_measured_by_how_far_it_came_down() -> None:
    training, evaluation = _training(30) - 3, _evaluation(30, rise=0.05) - 3
    assert len(fired(_run(training, evaluation))) == 1
