"""A loss that stands still is remarked, with what is known about why; one that falls, however slowly, is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from judging import fired, frame, judge_series, make_evaluator, restored

from perfagent_server.rules.loss.loss_plateau import LossPlateau

RULES = (LossPlateau(),)


def _judge(losses: np.ndarray, **series: Any) -> list[Any]:
    return judge_series({"loss": losses.tolist(), **series}, rules=RULES)[0]


def _noise(steps: int, seed: int = 1) -> np.ndarray:
    return 0.05 * np.random.default_rng(seed).normal(size=steps)


@pytest.mark.parametrize("restart", [False, True])
def test_a_loss_that_stopped_falling_is_a_remark(restart: bool) -> None:
    at = np.arange(5000)
    losses = 3 + 2 * np.exp(-at / 300) + _noise(5000)
    evaluator, changes = make_evaluator(rules=RULES), []
    for begin in range(0, 5000, 250):
        stored = frame(
            {"loss": losses[begin : begin + 250].tolist()}, range(begin + 1, begin + 251), ident=evaluator.upto + 1
        )
        changes += evaluator.take(stored)
        evaluator = restored(evaluator) if restart else evaluator
    [alert] = fired(changes)
    assert alert.finding.severity == "info"
    assert 2000 < alert.step < 4000
    assert "improved by" in alert.finding.message
    assert "normal" in alert.finding.message
    assert alert.finding.evidence["values"] >= 1000


def test_a_rate_that_is_used_up_is_why() -> None:
    losses = 3 + _noise(4000)
    losses[:500] += np.linspace(2, 0, 500)
    lr = [*np.linspace(1e-3, 1e-5, 1500), *[1e-5] * 2500]
    alert = fired(_judge(losses, lr=lr))[0]
    assert alert.finding.cause == "late"
    assert "1 % of its peak" in alert.finding.message


def test_a_loss_that_never_fell_is_told_so() -> None:
    alert = fired(_judge(2.303 + _noise(2500)))[0]
    assert alert.finding.cause == "never fell"
    assert "has not fallen since the run began" in alert.finding.message


@pytest.mark.parametrize("level", [0.0, -4.0])
def test_a_level_of_zero_or_below_is_measured_by_the_spread(level: float) -> None:
    assert fired(_judge(level + 20 * _noise(4000)))
    falling = level - 0.002 * np.arange(4000) + 20 * _noise(4000)
    assert _judge(falling) == []


@pytest.mark.parametrize("steps", [900, 12_000])
def test_a_power_law_is_no_plateau(steps: int) -> None:
    losses = 8 * (1 + np.arange(steps)) ** -0.1 + _noise(steps)
    assert _judge(losses) == []


def test_a_loss_that_rises_is_no_plateau() -> None:
    assert _judge(3 + np.arange(4000) / 1000 + _noise(4000)) == []
