"""A loss that turns round is told, and one that runs away from the start; a restart of the schedule is neither."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from judging import DATA, fired, frame, judge_series, make_evaluator, read_curve, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.loss.loss_divergence import LossDivergence
from perfagent_server.rules.loss.loss_spike import LossSpike

CURVES = sorted((DATA / "loss_curves").glob("*.csv"))
RULES = (LossDivergence(),)


def _falling(steps: int, *, seed: int = 1, spread: float = 0.05, first: float = 10.0, last: float = 3.0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return last + (first - last) * (1 + np.arange(steps) / 20) ** -1.0 + spread * draw.normal(size=steps)


def _judge(losses: Sequence[float], **series: Sequence[float]) -> list[Change]:
    changes, _ = judge_series(
        {"loss": list(losses), **{name: list(column) for name, column in series.items()}}, rules=RULES
    )
    return changes


def test_a_ramp_on_a_real_curve_is_found_while_it_grows() -> None:
    """+0.5 nat over 300 steps, from step 400 on: before, these curves fall by half of that themselves."""
    draw = random.Random(7)
    late = []
    for path in CURVES:
        curve = read_curve(path)["loss"]
        for _ in range(4):
            place = draw.randrange(400, len(curve) - 301)
            losses = [*curve[: place + 301]]
            for at in range(place, place + 301):
                losses[at] += 0.5 * (at - place) / 300
            steps = [change.step for change in fired(_judge(losses))]
            assert not steps or steps[0] > place
            late += [steps[0] - place if steps else 999]
    assert sum(steps < 999 for steps in late) >= 0.95 * len(late)
    assert sorted(late)[len(late) // 2] < 230


def test_a_warning_becomes_critical_as_the_loss_goes_on_growing_and_ends_when_it_is_back() -> None:
    losses = _falling(3000)
    losses[1000:1600] += np.concatenate((np.linspace(0, 1.0, 500), np.linspace(1.0, 0, 100)))
    changes = _judge(losses)
    assert [change.kind for change in changes] == ["fire", "update", "resolve"]
    assert [change.finding.severity for change in changes] == ["warning", "critical", "critical"]
    found = changes[0].finding
    assert 1080 < changes[0].step < 1250
    assert changes[1].step < 1300
    assert 900 <= (found.since_step or 0) <= 1050
    assert found.evidence["lowest_step"] == found.since_step
    assert len(found.evidence["last_losses"]) == 50
    assert "turned round" in found.title
    assert "above the" in found.message
    assert len(found.title) <= 90


def test_a_loss_that_stays_up_stays_diverged() -> None:
    losses = _falling(4000)
    losses[1000:] += np.minimum(1.0, np.arange(3000) / 300)
    changes = _judge(losses)
    assert len(fired(changes)) == 1
    assert "resolve" not in {change.kind for change in changes}
    assert changes[-1].finding.severity == "critical"


def test_a_spike_that_decays_is_no_divergence() -> None:
    losses = _falling(1500)
    losses[1000:] += np.exp(-np.arange(500) / 15)
    assert fired(_judge(losses)) == []


def test_a_spike_that_stays_is_one_alert_with_the_divergence_that_it_was() -> None:
    losses = _falling(1500)
    losses[1000:] += 2.0
    changes, evaluator = judge_series({"loss": losses.tolist()}, rules=(LossSpike(), *RULES))
    [alert] = fired(changes)
    assert (alert.finding.rule, alert.step) == ("loss_spike", 1005)
    assert {change.alert for change in changes} == {alert.alert}
    assert changes[-1].finding.rule == "loss_divergence"
    assert evaluator.verdict().rule == "loss_divergence"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_loss_of_any_sign_may_diverge(sign: float) -> None:
    """A negative log-likelihood below zero: a percentage of its level says nothing."""
    losses = _falling(3000, first=sign * 5 + 4, last=sign * 5 - 2, spread=0.3)
    losses[2000:] += np.linspace(0, 6, 1000)
    [alert] = fired(_judge(losses))
    assert 2000 < alert.step < 2500


def test_a_warm_restart_is_silent_and_a_loss_that_grows_after_it_is_not() -> None:
    at = np.arange(3000)
    lr = 1e-6 + 5e-4 * (1 + np.cos(np.pi * (at % 1000) / 1000))
    losses = _falling(3000) + 0.4 * lr / lr.max()
    assert fired(_judge(losses, lr=lr)) == []
    losses[2500:] += np.linspace(0, 1.5, 500)
    [alert] = fired(_judge(losses, lr=lr))
    assert 2500 < alert.step < 2800


def test_a_rate_raised_beyond_all_before_is_named_as_the_cause() -> None:
    lr = np.full(1500, 1e-3)
    lr[1000:] = 3e-2
    losses = _falling(1500)
    losses[1000:] += 1.5
    [alert] = fired(_judge(losses, lr=lr))
    assert alert.step < 1060
    assert alert.finding.cause == "the learning rate was raised"
    assert "0.03" in alert.finding.message


def test_in_the_warm_up_of_the_rate_a_small_rise_is_silent_and_a_large_one_is_not() -> None:
    lr = np.minimum(np.arange(1, 1501) / 1000, 1.0) * 1e-3
    losses = _falling(1500)
    losses[600:] += np.minimum(0.5, np.arange(900) / 600)
    losses[800:] -= np.minimum(0.5, np.arange(700) / 400)
    assert fired(_judge(losses, lr=lr)) == []
    losses[700:] += np.minimum(4.0, np.arange(800) / 20)
    assert [600 < change.step < 900 for change in fired(_judge(losses, lr=lr))] == [True]


@pytest.mark.parametrize(("end", "raised"), [(2.0, True), (1.0, True), (2.0, False), (6.0, False)])
def test_a_short_noisy_run_that_loses_what_it_learned_is_told(end: float, raised: bool) -> None:
    """From 2.3 down to 0.35 and up again, in 500 steps: what is usual for it, nobody knows yet."""
    draw = np.random.default_rng(4)
    level = np.concatenate(
        [np.geomspace(2.3, 0.35, 30), np.full(330, 0.35), np.geomspace(0.35, end, 40), np.full(100, end)]
    )
    losses = level * np.exp(0.25 * draw.normal(size=500))
    lr = 0.3 * np.minimum(np.arange(500) / 150, 1.0) if raised else np.full(500, 1e-3)
    lost = end >= (1.9 if raised else 5.0)
    assert [alert.finding.rule for alert in fired(_judge(losses, lr=lr))] == (["loss_divergence"] if lost else [])


# ---- from the start


@pytest.mark.parametrize("lr", [None, 1e-2])
def test_a_loss_that_grows_from_its_first_steps_on_is_critical_at_once(lr: float | None) -> None:
    """A rate a hundred times too high, in the warm-up of any rule."""
    draw = np.random.default_rng(3)
    at = np.arange(150)
    losses = np.where(at < 20, 2.3, 2.3 * np.exp((at - 20) / 25)) * np.exp(0.05 * draw.normal(size=150))
    series = {} if lr is None else {"lr": [lr] * 150}
    [alert] = fired(_judge(losses, **series))
    assert (alert.finding.severity, alert.finding.cause) == ("critical", "from the start")
    assert 45 <= alert.step <= 75
    assert alert.finding.evidence["first"] == pytest.approx(2.3, rel=0.2)


def test_a_loss_that_exploded_in_its_second_step_is_critical() -> None:
    draw = np.random.default_rng(3)
    losses = [2.3, *(200 * np.exp(0.5 * draw.normal(size=200)))]
    changes = _judge(losses)
    assert changes[0].step == 16
    assert changes[0].finding.severity == "critical"
    assert "never below" in changes[0].finding.message


def test_a_loss_that_shot_up_and_learned_nothing_since_is_told_after_the_warm_up() -> None:
    draw = np.random.default_rng(3)
    losses = [2.30, 30.0, 2.52, *(2.32 + 0.02 * draw.normal(size=400))]
    [alert] = fired(_judge(losses))
    assert alert.step == 200
    assert "shot up to 30" in alert.finding.message
    healthy = [2.30, 30.0, 2.52, *(2.32 * np.exp(-np.arange(400) / 300) + 0.02 * draw.normal(size=400))]
    assert fired(_judge(healthy)) == []


@pytest.mark.parametrize("seed", range(3))
def test_what_begins_near_zero_or_is_noisy_may_grow(seed: int) -> None:
    """A critic's loss before and after its first rewards; a generator whose discriminator gets better."""
    draw = np.random.default_rng(seed)
    at = np.arange(600)
    critic = (0.001 + 0.5 * at / 600) * draw.lognormal(sigma=0.4, size=600)
    generator = (4 + 16 * (1 - np.exp(-at / 40))) * (1 + 0.25 * draw.normal(size=600))
    assert fired(_judge(critic)) == []
    assert fired(_judge(generator)) == []


@pytest.mark.parametrize("rows", [1, 50])
def test_judging_goes_on_from_a_snapshot_at_any_frame(rows: int) -> None:
    losses = _falling(1700)
    losses[600:] += np.linspace(0, 1.5, 1100)
    whole, _ = judge_series({"loss": losses.tolist()}, rules=RULES, rows=rows)
    pieces, evaluator = [], make_evaluator(rules=RULES)
    for begin in range(0, 1700, rows):
        if begin % 100 == 0:
            evaluator = restored(evaluator)
        columns = {"loss": losses[begin : begin + rows].tolist()}
        pieces += evaluator.take(frame(columns, range(begin + 1, begin + rows + 1), ident=evaluator.upto + 1))
    said = [(change.kind, change.step, change.finding.severity, change.finding.message) for change in whole]
    assert [(one.kind, one.step, one.finding.severity, one.finding.message) for one in pieces] == said
    assert len(said) >= 2


def test_nan_in_between_changes_nothing() -> None:
    losses = _falling(1500)
    losses[1000:] += np.minimum(1.0, np.arange(500) / 300)
    some = losses.copy()
    some[[500, 900, 1050]] = math.nan
    assert abs(fired(_judge(some))[0].step - fired(_judge(losses))[0].step) <= 5
