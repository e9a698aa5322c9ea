"""An invalid, stuck or jumping learning rate is reported; what schedules do with reason is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from judging import fired, frame, judge_series, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.loss.lr_anomaly import LrAnomaly
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss

RULES = (LrAnomaly(),)
AT = np.arange(2000)


def _judge(lr: np.ndarray, losses: np.ndarray | None = None) -> list[Change]:
    draw = np.random.default_rng(1)
    loss = 3 + 0.05 * draw.normal(size=len(lr)) if losses is None else losses
    return judge_series({"lr": lr.tolist(), "loss": loss.tolist()}, rules=RULES)[0]


@pytest.mark.parametrize(
    ("bad", "said"), [(math.nan, "NaN"), (math.inf, "infinite"), (-1e-4, "-0.0001")], ids=["nan", "inf", "negative"]
)
def test_a_rate_that_cannot_be_is_critical_at_once(bad: float, said: str) -> None:
    lr = np.full(100, 1e-3)
    lr[60:] = bad
    [alert] = fired(_judge(lr))
    assert (alert.finding.severity, alert.step, alert.finding.since_step) == ("critical", 61, 61)
    assert said in alert.finding.title
    assert "after 0.001" in alert.finding.message


SCHEDULES: dict[str, Callable[[], np.ndarray]] = {
    "warm-up and cosine": lambda: np.where(AT < 100, (AT + 1) / 100, 0.5 * (1 + np.cos(np.pi * AT / 2000))) * 1e-3,
    "warm-up from zero": lambda: np.minimum(AT / 100, 1) * 1e-3,
    "warm restarts": lambda: 1e-6 + 1e-3 * (1 + np.cos(np.pi * (AT % 500) / 500)),
    "restarts that get lower": lambda: 1e-3 * 0.7 ** (AT // 400) * (1 + np.cos(np.pi * (AT % 400) / 400)),
    "milestones": lambda: 0.1 * 0.1 ** (AT // 600),
    "warm-up by epochs": lambda: 0.02 * np.minimum(AT // 200 + 1, 5),
    "warm-up by epochs from next to nothing": lambda: np.maximum(1e-6, 1e-3 * np.minimum(AT // 200, 5)),
    "one cycle": lambda: np.interp(AT, [0, 600, 1800, 1999], [4e-4, 1e-2, 4e-4, 4e-8]),
    "triangles": lambda: 1e-4 + 1e-3 * np.abs(AT % 500 - 250) / 250,
    "range test": lambda: 1e-6 * 1.005**AT,
    "decay by epochs": lambda: 1e-3 * 0.95 ** (AT // 20),
    "linear to zero": lambda: 1e-3 * (1 - AT / 1999),
    "constant": lambda: np.full(2000, 0.1),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_silent(schedule: str) -> None:
    assert _judge(SCHEDULES[schedule]()) == []


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("rows", [1, 50])
def test_a_jump_that_makes_the_loss_worse_is_told_with_its_figures(rows: int, restart: bool) -> None:
    draw = np.random.default_rng(1)
    lr, losses = np.full(700, 1e-3), 3 + 0.05 * draw.normal(size=700)
    lr[400:] = 1e-2
    losses[403:] += 0.6
    evaluator, changes = make_evaluator(rules=RULES), []
    for begin in range(0, 700, rows):
        columns = {"lr": lr[begin : begin + rows].tolist(), "loss": losses[begin : begin + rows].tolist()}
        changes += evaluator.take(frame(columns, range(begin + 1, begin + rows + 1), ident=evaluator.upto + 1))
        if restart and begin % 50 == 0:
            evaluator = restored(evaluator)
    [alert] = fired(changes)
    assert (alert.finding.severity, alert.finding.cause, alert.finding.since_step) == ("warning", "jump", 401)
    assert "from 0.001 to 0.01" in alert.finding.message
    assert 405 <= alert.step <= 450
    assert alert.finding.evidence["lr"] == 1e-2


def test_a_jump_that_the_loss_does_not_mind_is_a_remark_after_a_decay() -> None:
    lr = np.concatenate((np.linspace(1e-3, 1e-4, 500), np.full(500, 5e-3)))
    [alert] = fired(_judge(lr))
    assert alert.finding.severity == "info"
    assert "got worse" not in alert.finding.message


def test_a_schedule_that_ran_out_is_told() -> None:
    lr = 1e-3 * np.maximum(0.0, 1 - AT / 800)
    [alert] = fired(_judge(lr))
    assert (alert.finding.cause, alert.finding.since_step) == ("zero", 801)
    assert 845 <= alert.step <= 855


def test_a_scheduler_that_steps_too_often_leaves_next_to_nothing() -> None:
    lr = 0.1 * 0.1 ** (AT // 30)
    [alert] = fired(_judge(lr))
    assert alert.finding.cause == "zero"
    assert alert.step <= 300


def test_a_high_rate_at_which_the_loss_grew_until_nan_is_a_remark_within_the_alert() -> None:
    losses = [2.0] * 30 + [2.0 * 1.6**step for step in range(20)] + [math.nan] * 20
    changes, evaluator = judge_series({"lr": [0.05] * 70, "loss": losses}, rules=(NonfiniteLoss(), *RULES), rows=5)
    [alert] = fired(changes)
    assert alert.finding.rule == "nonfinite_loss"
    assert {(found.rule, found.severity) for found in evaluator.findings()} == {
        ("nonfinite_loss", "critical"),
        ("lr_anomaly", "info"),
    }


def test_without_a_rate_it_says_nothing() -> None:
    assert judge_series({"loss": [math.nan] * 50}, rules=RULES)[0] == []
