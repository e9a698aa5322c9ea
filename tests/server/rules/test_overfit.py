"""Overfitting is an evaluation that rises while training goes on falling; a gap alone is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from step_job import StepJob

from perfagent_server.rules.loss.overfit import Overfit

EVERY = 50


def train(training: Any, evaluation: Any, *, name: str = "val_loss", epochs: bool = False) -> StepJob:
    """An evaluation after every 50 steps, counted in steps or in epochs."""
    job = StepJob(Overfit())
    for number, value in enumerate(evaluation, 1):
        columns = {"train_loss": training[(number - 1) * EVERY : number * EVERY]}
        job.go_on(columns, rows=EVERY, measured=None if epochs else {number * EVERY: {name: float(value)}})
        if epochs:
            step, job.step = job.step, number - 1
            job.go_on({name: [float(value)]})
            job.step = step
    return job


def trained(evaluations: int, last: float = 0.2) -> Any:
    at = np.arange(evaluations * EVERY)
    return last + (2.3 - last) * np.exp(-at / 400) + 0.03 * np.random.default_rng(1).normal(size=len(at))


def evaluated(evaluations: int, rise: float, noise: float = 0.005) -> Any:
    """Best at the ninth."""
    at = np.arange(evaluations)
    bends = noise * np.random.default_rng(2).normal(size=evaluations)
    return 0.8 + 1.5 * np.exp(-at / 3) + rise * np.maximum(0, at - 8) + bends


@pytest.mark.parametrize(("name", "epochs"), [("val_loss", False), ("eval/loss", True)])
def test_evaluation_that_rises_while_training_falls_is_told(name: str, epochs: bool) -> None:
    job = train(trained(30), evaluated(30, 0.03), name=name, epochs=epochs)
    found = job.found
    assert (found.severity, job.kinds, found.since_step) == ("warning", ["fire"], found.evidence["best_step"])
    assert 11 <= len(found.evidence["evaluations"]) <= 18
    assert found.evidence["training"] < found.evidence["training_at_best"]


def plain(*values: float, best: float = 1.0) -> list[float]:
    """Evaluations that fall to `best` in a line, and these."""
    return [best + 0.1 * (8 - number) for number in range(9)] + [*values]


@pytest.mark.parametrize(
    ("evaluations", "gap", "fires"),
    [
        (plain(1.031, 1.031, 1.031), 0.5, True),
        (plain(1.029, 1.031, 1.031), 0.5, False),
        (plain(1.04, 1.04, 1.035), 0.5, False),
        (plain(1.04, 1.04), 0.5, False),
        (plain(1.05, 1.05, 1.05), 0.94, True),
        (plain(1.05, 1.05, 1.05), 0.96, False),
    ],
    ids=["3 %", "less", "on its way back", "two", "gap of a tenth", "smaller gap"],
)
def test_three_evaluations_above_the_best_decide(evaluations: list[float], gap: float, fires: bool) -> None:
    """gap: the training loss that is reached; noise_times is held off by the straight line before."""
    count = len(evaluations)
    falling = gap + np.linspace(1, 0, count * EVERY) * 0.02
    assert len(train(falling, evaluations).fired) == fires


HEALTHY = {
    "a gap that stays": (trained(40), evaluated(40, 0.0)),
    "noisy evaluations": (trained(40), evaluated(40, 0.0, noise=0.1)),
    "a training loss above the evaluation's (augmentation)": (trained(40, last=1.5), evaluated(40, 0.0)),
    "both rise (a restart)": (
        trained(40) + np.repeat(np.arange(40) > 20, EVERY) * 0.5, evaluated(40, 0.0) + (np.arange(40) > 20) * 0.3,
    ),
    "three evaluations only": (trained(3), [1.0, 1.2, 1.4]),
    "evaluations that say nothing": (trained(40), [math.nan] * 40),
    "one bad evaluation": (trained(40), evaluated(40, 0.0) + (np.arange(40) == 20) * 1.0),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEALTHY)
def test_what_is_no_overfitting_is_silent(kind: str) -> None:
    assert train(*HEALTHY[kind]).changes == []


@pytest.mark.parametrize(
    ("evaluations", "causes"),
    [
        (5 + 2 * np.exp(-np.arange(30) / 10), ["never good"]),
        (40 * 0.995 ** np.arange(0, 30 * EVERY, EVERY), []),
        (np.linspace(2.2, 2.0, 30), []),
    ],
    ids=["BatchNorm", "a sum over the batch", "a hard task"],
)
def test_evaluations_no_better_than_at_the_start_are_told(evaluations: Any, causes: list[str]) -> None:
    job = StepJob(Overfit())
    losses = 2.3 * 0.995 ** np.arange(30 * EVERY) + 1e-4
    for number, value in enumerate(evaluations, 1):
        job.go_on(
            {"loss": losses[(number - 1) * EVERY : number * EVERY]}, measured={number * EVERY: {"val/loss": value}}
        )
    assert [change.finding.cause for change in job.fired] == causes


def test_training_loss_at_the_best_evaluation_is_near_it() -> None:
    job = StepJob(Overfit())
    losses = 0.7 * 0.97 ** np.arange(300)
    for number in range(1, 15):
        evaluated = {number * 20: {"val_loss": 0.5 + 0.1 * abs(number - 5)}}
        job.go_on({"loss": losses[(number - 1) * 20 : number * 20]}, rows=20, measured=evaluated)
    assert job.found.since_step == 100
    assert job.found.evidence["training_at_best"] == pytest.approx(losses[90], rel=0.1)


def test_evaluations_that_come_before_the_training_loss_count() -> None:
    """A busy agent sends what the script logs before it has read the losses."""
    job = StepJob(Overfit())
    losses = 2.3 * 0.99 ** np.arange(8 * EVERY) + 1e-4
    for _ in range(4):
        job.go_on({"val/loss": [2.5]}, every=EVERY)
    job.step = 0
    job.go_on({"loss": losses[: 4 * EVERY]}, rows=4 * EVERY)
    job.go_on({"loss": losses[4 * EVERY :]}, rows=EVERY, measured={step: {"val/loss": 2.6} for step in (250, 300, 350)})
    assert (job.found.cause, job.found.since_step) == ("never good", EVERY)


def test_lowest_of_hundreds_of_noisy_evaluations_is_chance() -> None:
    """60 healthy runs of 300 evaluations each. A rise by a fifth in the second half is found."""
    falling, draw = trained(300) - np.arange(300 * EVERY) / 1e5, np.random.default_rng(7)
    healthy = 2.0 + 1.5 * np.exp(-np.arange(300) / 30)
    noisy = [healthy * np.exp(0.03 * draw.normal(size=300)) for _ in range(60)]
    assert sum(bool(train(falling, one).fired) for one in noisy) <= 2
    rise = 1 + 0.2 * np.maximum(0, np.arange(300) / 150 - 1)
    assert sum(bool(train(falling, one * rise).fired) for one in noisy[:20]) >= 19


def test_it_is_over_when_the_evaluation_is_good_again() -> None:
    assert train(trained(30), [*evaluated(20, 0.05), *[0.75] * 10]).kinds == ["fire", "resolve"]
    assert train(trained(30) - 3, evaluated(30, 0.05) - 3).kinds == ["fire"], "below zero, by how far it came down"
