"""Steps that move nothing are told with what was seen; a constant that somebody logs is only a remark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from step_job import StepJob

from perfagent_server.rules.loss.frozen_training import FrozenTraining


def noisy(steps: int) -> list[float]:
    values: list[float] = (2.0 + 0.05 * np.random.default_rng(1).normal(size=steps)).tolist()
    return values


def train(losses: Sequence[float], ratio: float | dict[int, float] | None = None, **series: Sequence[float]) -> StepJob:
    """ratio: update/ratio, measured in every 16th step."""
    places = range(1, len(losses), 16) if ratio is not None else ()
    measured = {step: {"update/ratio": ratio[step] if isinstance(ratio, dict) else ratio or 0.0} for step in places}
    columns = {"loss": losses, **{name.replace("_", "/"): values for name, values in series.items()}}
    return StepJob(FrozenTraining()).go_on(columns, rows=16, measured=measured)


@pytest.mark.parametrize(
    ("beside", "cause"),
    [
        ({"grad/norm": [0.8] * 200, "lr": [1e-3] * 200}, ""),
        ({"grad/norm": [0.0] * 200, "lr": [1e-3] * 200}, "no gradients"),
        ({"grad/norm": [0.8] * 200, "lr": [0.0] * 200}, "learning rate"),
        ({"amp/skipped": [float(step) for step in range(200)]}, "skipped steps"),
    ],
)
def test_weights_that_do_not_move_are_told(beside: dict[str, list[float]], cause: str) -> None:
    job = train(noisy(200), 0.0, **{name.replace("/", "_"): values for name, values in beside.items()})
    found = job.found
    assert (found.severity, found.cause, job.alert.step, found.since_step) == ("warning", cause, 65, 1)
    assert len(found.evidence["last_losses"]) >= 40


def test_it_is_over_when_weights_move_again() -> None:
    ratios = {step: 0.0 if step < 150 else 1e-3 for step in range(1, 400, 16)}
    assert train(noisy(400), ratios).kinds == ["fire", "resolve"]


RUNS_OUT = [1e-3 * max(0.0, 1 - step / 600) for step in range(1200)]


NO_NORM = {"grad/norm": [1.0] * 100 + [0.0] * 300}


FALLEN = [*(0.5 + math.exp(-step / 10) for step in range(200)), *[0.5] * 300]


@pytest.mark.parametrize(
    ("losses", "more", "told", "step", "since"),
    [
        (noisy(300), {"lr": [0.0] * 300}, ("warning", "learning rate"), 101, 1),  # whole-number division in a warm-up
        (noisy(1200), {"lr": RUNS_OUT}, ("warning", "learning rate"), 701, 601),
        ([*noisy(200), *[1.234567] * 150], {}, ("warning", None), 300, 201),
        ([*noisy(100), *[0.693147] * 300], {"ratio": 1e-3}, ("info", None), 200, 101),  # the weights move
        ([*noisy(100), *[0.0] * 300], {"ratio": 1e-5, **NO_NORM}, ("warning", "zero at once"), 200, 101),  # decay moves on
        ([*noisy(100), *[0.0] * 300], {"ratio": 1e-5}, ("info", None), 200, 101),  # a value that the script rounds
        ([*noisy(100), *[0.0] * 300], {"grad/norm": [1.0] * 400}, ("info", None), 200, 101),  # it is trained on another
        ([*(0.9**step for step in range(200)), *[0.0] * 300], {}, ("info", None), 300, 201),
        (FALLEN, {}, ("info", None), None, None),
        ([0.693147] * 800, {}, ("info", None), None, 1),
    ],
    ids=[
        "zero from the start", "ran out", "froze", "the weights move", "no label counts", "rounded", "logged", "nothing is left",
        "little by little", "a constant",
    ],
)  # fmt: skip
def test_zero_rate_and_constant_loss_are_told_after_100_steps(
    losses: list[float], more: dict[str, Any], told: tuple[str, str | None], step: int | None, since: int | None
) -> None:
    job = train(losses, **more)
    assert job.found.severity == told[0]
    assert told[1] in (None, job.found.cause)
    assert (step in (None, job.alert.step), since in (None, job.found.since_step)) == (True, True)


WARM = [0.0] * 60 + [1e-5 * step for step in range(1, 341)]


LOGGED = [round(6e-4 * (1 - step / 20_000), 6) for step in range(20_000)] + [0.0] * 300


SILENT = {
    "no measurement": lambda: train(noisy(500), lr=[1e-3] * 500),
    "weights that move": lambda: train(noisy(500), 1e-3, lr=[1e-3] * 500),
    "a warm-up": lambda: train(noisy(400), {step: 0.0 if step <= 20 else 1e-4 for step in range(1, 400, 16)}, lr=WARM),
    "the end of a decay, which a log rounds to zero": lambda: train(noisy(len(LOGGED)), lr=LOGGED),
    "a first group at zero beside others that train": lambda: train(noisy(400), 1e-4, lr=[0.0] * 400),
    "a loss that varies in its sixth digit": lambda: train([1.0 + 2e-6 * (step % 2) for step in range(600)]),
    "no loss": lambda: StepJob(FrozenTraining()).go_on({"grad/norm": [1.0] * 300, "step_time_s": [0.1] * 300}),
}


@pytest.mark.parametrize("kind", SILENT)
def test_healthy_training_is_silent(kind: str) -> None:
    assert SILENT[kind]().changes == []
