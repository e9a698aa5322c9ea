"""Steps that move nothing are told with what was seen; a constant that somebody logs is only a remark."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from judging import fired, frame, judge_series, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.loss.frozen_training import FrozenTraining

RULES = (FrozenTraining(),)


def _noisy(steps: int, seed: int = 1) -> list[float]:
    values: list[float] = (2.0 + 0.05 * np.random.default_rng(seed).normal(size=steps)).tolist()
    return values


def _run(
    losses: list[float], ratios: dict[int, float], *, rows: int = 16, restart: bool = False, **series: list[float]
) -> tuple[list[Change], Evaluator]:
    """ratios: update/ratio by step, measured now and then."""
    evaluator, changes = make_evaluator(rules=RULES), []
    for begin in range(0, len(losses), rows):
        steps = range(begin + 1, min(begin + rows, len(losses)) + 1)
        columns = {name: values[begin : begin + rows] for name, values in {"loss": losses, **series}.items()}
        stored = frame(columns, steps, ident=evaluator.upto + 1)
        for step in steps:
            if step in ratios:
                stored.groups.extend(frame({"update/ratio": [ratios[step]]}, [step]).groups)
        changes += evaluator.take(stored)
        evaluator = restored(evaluator) if restart else evaluator
    return changes, evaluator


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("beside", "cause", "said"),
    [
        ({"grad/norm": 0.8, "lr": 1e-3}, "", "The gradient norm is 0.8, the learning rate 0.001."),
        ({"grad/norm": 0.0, "lr": 1e-3}, "no gradients", "The gradient norm is zero."),
        ({"grad/norm": 0.8, "lr": 0.0}, "learning rate", "The learning rate is zero."),
    ],
)
def test_weights_that_do_not_move_are_told_after_four_measurements(
    restart: bool, beside: dict[str, float], cause: str, said: str
) -> None:
    series = {name: [value] * 200 for name, value in beside.items()}
    ratios = dict.fromkeys(range(1, 200, 16), 0.0)
    changes, _ = _run(_noisy(200), ratios, restart=restart, **series)
    alert = fired(changes)[0]
    assert (alert.finding.severity, alert.finding.cause) == ("warning", cause)
    assert alert.step == 65
    assert alert.finding.since_step == 1
    assert said in alert.finding.message
    assert len(alert.finding.evidence["last_losses"]) >= 40
    assert len(fired(changes)) == 1


def test_it_is_over_when_weights_move_again() -> None:
    ratios = {step: 0.0 if step < 150 else 1e-3 for step in range(1, 400, 16)}
    changes, _ = _run(_noisy(400), ratios)
    assert [change.kind for change in changes] == ["fire", "resolve"]


def test_steps_that_a_scaler_skips_are_the_cause() -> None:
    changes, _ = _run(
        _noisy(200), dict.fromkeys(range(1, 200, 16), 0.0), **{"amp/skipped": [float(step) for step in range(200)]}
    )
    assert fired(changes)[0].finding.cause == "skipped steps"


@pytest.mark.parametrize("ratios", [{}, dict.fromkeys(range(1, 500, 16), 1e-3)])
def test_healthy_weights_are_silent(ratios: dict[int, float]) -> None:
    changes, _ = _run(_noisy(500), ratios, lr=[1e-3] * 500)
    assert changes == []


@pytest.mark.parametrize("zeros", [1, 5, 60])
def test_a_warm_up_from_zero_is_silent(zeros: int) -> None:
    lr = [0.0] * zeros + [1e-5 * step for step in range(1, 400 - zeros + 1)]
    ratios = {step: 0.0 if step <= min(zeros, 20) else 1e-4 for step in range(1, 400, 16)}
    changes, _ = _run(_noisy(400), ratios, lr=lr)
    assert changes == []


def test_a_rate_that_is_zero_from_the_first_step_on_is_told() -> None:
    """Whole-number division in the lambda of a warm-up."""
    changes, _ = judge_series({"loss": _noisy(300), "lr": [0.0] * 300}, rules=RULES)
    [alert] = fired(changes)
    assert (alert.step, alert.finding.cause) == (101, "learning rate")
    assert "from the first step on" in alert.finding.message


def test_a_schedule_that_ran_out_half_way_is_told() -> None:
    lr = [1e-3 * max(0.0, 1 - step / 600) for step in range(1200)]
    changes, _ = judge_series({"loss": _noisy(1200), "lr": lr}, rules=RULES)
    [alert] = fired(changes)
    assert 700 <= alert.step <= 710
    assert alert.finding.since_step == 601


def test_the_last_steps_of_a_schedule_are_silent() -> None:
    """A log rounds the end of a decay to zero."""
    lr = [round(6e-4 * (1 - step / 20_000), 6) for step in range(20_000)]
    assert lr[-1] == 0
    lr += [0.0] * 300
    changes, _ = judge_series({"loss": _noisy(len(lr)), "lr": lr}, rules=RULES, rows=500)
    assert changes == []


def test_a_first_group_at_zero_beside_others_that_train_is_silent() -> None:
    changes, _ = _run(_noisy(400), dict.fromkeys(range(1, 400, 16), 1e-4), lr=[0.0] * 400)
    assert changes == []


def test_a_loss_that_froze_is_told_with_what_else_is_known() -> None:
    changes, _ = judge_series({"loss": [*_noisy(200), *[1.234567] * 150]}, rules=RULES)
    [alert] = fired(changes)
    assert (alert.finding.severity, alert.step, alert.finding.since_step) == ("warning", 300, 201)
    assert "1.23457" in alert.finding.message


@pytest.mark.parametrize(
    ("losses", "ratio", "said"),
    [
        ([*_noisy(100), *[0.693147] * 300], 1e-3, "although the weights move"),
        ([*_noisy(100), *[0.0] * 300], None, "nothing is left to learn"),
        ([*(0.5 + math.exp(-step / 10) for step in range(200)), *[0.5] * 300], None, "little by little"),
        ([0.693147] * 800, None, "from the first one on"),
    ],
)
def test_a_constant_that_may_be_well_is_a_remark(losses: list[float], ratio: float | None, said: str) -> None:
    ratios = {} if ratio is None else dict.fromkeys(range(1, len(losses), 16), ratio)
    changes, _ = _run(losses, ratios)
    [alert] = fired(changes)
    assert alert.finding.severity == "info"
    assert said in alert.finding.message


def test_a_loss_that_varies_in_its_sixth_digit_is_silent() -> None:
    losses = [1.0 + 2e-6 * (step % 2) for step in range(600)]
    assert judge_series({"loss": losses}, rules=RULES)[0] == []


@pytest.mark.parametrize("series", [{}, {"step_time_s": [0.1] * 300}])
def test_without_its_inputs_it_says_nothing(series: dict[str, Any]) -> None:
    assert judge_series({"grad/norm": [1.0] * 300, **series}, rules=RULES)[0] == []
