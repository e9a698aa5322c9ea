"""An invalid, stuck or jumping learning rate is reported; what schedules do with reason is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from judging import fired, frame, restored, state
from step_job import StepJob

from perfagent_server.rules.loss.lr_anomaly import LrAnomaly
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss

AT = np.arange(2000)


def train(lr: Any, losses: Any = None, *, rows: int = 50) -> StepJob:
    losses = 3 + 0.05 * np.random.default_rng(1).normal(size=len(lr)) if losses is None else losses
    return StepJob(LrAnomaly()).go_on({"lr": np.array(lr).tolist(), "loss": losses}, rows=rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-4])
def test_a_rate_that_cannot_be_is_critical_at_once(bad: float) -> None:
    job = train([1e-3] * 60 + [bad] * 40)
    assert (job.found.severity, job.alert.step, job.found.since_step) == ("critical", 61, 61)


SCHEDULES = {
    "warm-up and cosine": np.where(AT < 100, (AT + 1) / 100, 0.5 * (1 + np.cos(np.pi * AT / 2000))) * 1e-3,
    "warm restarts": 1e-6 + 1e-3 * (1 + np.cos(np.pi * (AT % 500) / 500)),
    "warm-up by epochs": 0.02 * np.minimum(AT // 200 + 1, 5),
    "one cycle": np.interp(AT, [0, 600, 1800, 1999], [4e-4, 1e-2, 4e-4, 4e-8]),
    "range test": 1e-6 * 1.005**AT,
    "decay by epochs": 1e-3 * 0.95 ** (AT // 20),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_silent(schedule: str) -> None:
    assert train(SCHEDULES[schedule]).changes == []


@pytest.mark.parametrize(
    ("to", "rise", "told"),
    [(1e-2, 0.6, ["warning"]), (2.01e-3, 0.6, ["warning"]), (2e-3, 0.6, []), (1e-2, 0.17, ["warning"]), (1e-2, 0.12, [])],
)  # fmt: skip
def test_a_rate_that_more_than_doubles_and_harms_is_told(to: float, rise: float, told: list[str]) -> None:
    """Harm is 5 % of the loss of 3."""
    lr, losses = [1e-3] * 400 + [to] * 300, 3 + 0.01 * np.random.default_rng(1).normal(size=700)
    losses[403:] += rise
    for rows in (1, 50):
        job = train(lr, losses, rows=rows)
        assert job.severities == told
        for change in job.fired:
            assert (change.finding.cause, change.finding.since_step, change.finding.evidence["lr"]) == ("jump", 401, to)
            assert 405 <= change.step <= 450


def test_a_jump_without_harm_is_a_remark_after_a_decay() -> None:
    assert train([*np.linspace(1e-3, 1e-4, 500), *[5e-3] * 500]).severities == ["info"]
    assert train([*[1e-3] * 500, *[5e-3] * 500]).changes == []


@pytest.mark.parametrize(
    ("start", "rate", "harm", "told"),
    [
        (500, 1e-3, 2.0, ["warning"]), (500, 1e-3, 0.0, ["info"]), (470, 1e-3, 2.0, ["warning"]), (500, 4e-5, 2.0, []),
        (0, 1e-3, 2.0, []),
    ],
    ids=["harm", "no harm", "steps made again", "the rate of before", "another training"],
)  # fmt: skip
def test_a_rate_that_jumps_where_a_run_goes_on_is_told(start: int, rate: float, harm: float, told: list[str]) -> None:
    job = train(np.geomspace(1e-3, 2e-5, 500), 3 + 0.01 * np.random.default_rng(1).normal(size=500))
    again = frame({}, [], attempt=2, ident=1000, events=[state("starting", start_step=start)])
    judge = restored(job.evaluator)
    judge.take(again)
    columns = {"lr": [rate] * 100, "loss": [3.0 + harm] * 100}
    changes = judge.take(frame(columns, range(start, start + 100), attempt=2, ident=1001))
    assert [(one.finding.severity, one.finding.cause) for one in fired(changes)] == [(one, "resume") for one in told]


@pytest.mark.parametrize(
    ("lr", "since", "step"),
    [(1e-3 * np.maximum(0.0, 1 - AT / 800), 801, 851), (0.1 * 0.1 ** (AT // 30), None, 300)],
    ids=["ran out", "a scheduler that steps too often"],
)
def test_a_rate_that_stays_at_zero_is_told(lr: Any, since: int | None, step: int) -> None:
    job = train(lr)
    assert job.found.cause == "zero"
    assert since in (None, job.found.since_step)
    assert step - 50 <= job.alert.step <= step


@pytest.mark.parametrize(("rate", "also"), [(0.05, ["lr_anomaly"]), (1e-3, ["lr_anomaly"]), (9.9e-4, [])])
def test_a_high_rate_beside_a_loss_that_grew_to_nan_is_a_remark(rate: float, also: list[str]) -> None:
    losses = [2.0] * 30 + [2.0 * 1.6**step for step in range(20)] + [math.nan] * 20
    job = StepJob(NonfiniteLoss(), LrAnomaly()).go_on({"lr": [rate] * 70, "loss": losses}, rows=5)
    assert job.found.rule == "nonfinite_loss"
    assert [one.rule for one in job.evaluator.findings()] == ["nonfinite_loss", *also]


def test_no_loss_grew_to_nan_where_one_batch_is_nan() -> None:
    losses = [0.1 + 0.07 * (step % 3) for step in range(48)] + [0.26] + [math.nan] * 20
    job = StepJob(NonfiniteLoss(), LrAnomaly()).go_on({"lr": [1e-3] * 69, "loss": losses}, rows=5)
    assert [one.rule for one in job.evaluator.findings()] == ["nonfinite_loss"]
