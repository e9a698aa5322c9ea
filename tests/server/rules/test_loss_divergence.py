"""A loss that turns round is told, and one that runs away from the start; a restart of the schedule is neither."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from case_selection import everyday
from judging import DATA, START, read_curve
from step_job import StepJob

from perfagent.wire import Event
from perfagent_server.rules.loss.loss_divergence import LossDivergence
from perfagent_server.rules.loss.loss_spike import LossSpike

CURVES = sorted((DATA / "loss_curves").glob("*.csv"))


def falling(steps: int, *, spread: float = 0.05, first: float = 10.0, last: float = 3.0) -> Any:
    noise = spread * np.random.default_rng(1).normal(size=steps)
    return last + (first - last) * (1 + np.arange(steps) / 20) ** -1.0 + noise


def train(losses: Any, *, rows: int = 50, restarts: int = 7, kind: str = "", **series: Any) -> StepJob:
    told = [Event(kind="loss", time=START, step=1, data={"kind": kind, "classes": 10, "mean": True})] if kind else []
    return StepJob(LossDivergence(), restarts=restarts).go_on({"loss": losses, **series}, rows=rows, events={1: told})


@pytest.mark.parametrize(("draws", "latest"), everyday(1, [(1, 1500), (4, 100_000)]))
def test_a_ramp_on_real_curves_is_found_while_it_grows(draws: int, latest: int) -> None:
    """+0.5 nat over 300 steps, from step 400 on: before, these curves fall by half of that themselves."""
    draw, late = random.Random(7), []
    for path in draws * CURVES:
        curve = read_curve(path)["loss"]
        place = draw.randrange(400, min(len(curve) - 301, latest))
        losses = [value + 0.5 * max(0, step - place) / 300 for step, value in enumerate(curve[: place + 301])]
        steps = [change.step for change in train(losses, rows=500, restarts=0).fired]
        assert not steps or steps[0] > place
        late.append(steps[0] - place if steps else 999)
    assert sum(steps < 999 for steps in late) >= 0.95 * len(late)
    assert sorted(late)[len(late) // 2] < 230


def test_a_rise_is_critical_as_it_grows_and_over_when_it_is_back() -> None:
    losses = falling(3000)
    losses[1000:1600] += np.concatenate((np.linspace(0, 1.0, 500), np.linspace(1.0, 0, 100)))
    changes = train(losses).changes
    assert [change.kind for change in changes] == ["fire", "update", "resolve"]
    assert [change.finding.severity for change in changes] == ["warning", "critical", "critical"]
    assert 1080 < changes[0].step < changes[1].step < 1250
    found = changes[0].finding
    assert 900 <= (found.since_step or 0) <= 1050
    assert (found.evidence["lowest_step"], len(found.evidence["last_losses"])) == (found.since_step, 50)


@pytest.mark.parametrize(("rise", "told"), [(0.17, []), (0.19, ["warning"]), (0.23, ["warning"]), (0.25, ["critical"])])
def test_six_percent_above_the_lowest_is_told_eight_are_critical(rise: float, told: list[str]) -> None:
    """3.0 is the lowest, and held for 25 steps."""
    losses = np.concatenate(
        (3 + 7 * np.exp(-np.arange(2000) / 100), np.linspace(3, 3 + rise, 300), np.full(200, 3 + rise))
    )
    job = train(losses + 0.001 * np.random.default_rng(1).normal(size=2500))
    assert [one.finding.severity for one in job.changes[-1:]] == told


def test_a_spike_that_stays_is_one_alert_with_its_divergence() -> None:
    losses = falling(1500)
    losses[1000:] += 2.0
    job = StepJob(LossSpike(), LossDivergence()).go_on({"loss": losses}, rows=50)
    assert (job.found.rule, job.alert.step) == ("loss_spike", 1005)
    assert {change.alert for change in job.changes} == {job.alert.alert}
    assert job.changes[-1].finding.rule == job.evaluator.verdict().rule == "loss_divergence"


def test_a_warm_restart_is_silent_and_growth_after_it_is_not() -> None:
    lr = 1e-6 + 5e-4 * (1 + np.cos(np.pi * (np.arange(3000) % 1000) / 1000))
    losses = falling(3000) + 0.4 * lr / lr.max()
    assert train(losses, lr=lr).fired == []
    losses[2500:] += np.linspace(0, 1.5, 500)
    assert 2500 < train(losses, lr=lr).alert.step < 2800


def test_a_rate_raised_beyond_all_before_is_the_cause() -> None:
    lr, losses = np.full(1500, 1e-3), falling(1500)
    lr[1000:], losses[1000:] = 3e-2, losses[1000:] + 1.5
    job = train(losses, lr=lr)
    assert (job.found.cause, job.found.evidence["lr"]) == ("the learning rate was raised", 3e-2)
    assert job.alert.step < 1060


@pytest.mark.parametrize(("end", "raised", "told"), [(2.0, True, 1), (1.0, True, 0), (2.0, False, 1), (1.0, False, 0)])
def test_a_short_noisy_run_that_loses_what_it_learned_is_told(end: float, raised: bool, told: int) -> None:
    """From 2.3 down to 0.35 and up again, in 500 steps: what is usual for it, nobody knows yet but by its noise."""
    parts = [np.geomspace(2.3, 0.35, 30), np.full(330, 0.35), np.geomspace(0.35, end, 40), np.full(100, end)]
    losses = np.concatenate(parts) * np.exp(0.25 * np.random.default_rng(4).normal(size=500))
    lr = 0.3 * np.minimum(np.arange(500) / 150, 1.0) if raised else np.full(500, 1e-3)
    assert len(train(losses, lr=lr).fired) == told


@pytest.mark.parametrize("lr", [None, 1e-2])
def test_a_loss_that_grows_from_its_first_steps_is_critical(lr: float | None) -> None:
    """A rate a hundred times too high, in the warm-up of any rule."""
    at = np.arange(150)
    noise = np.exp(0.05 * np.random.default_rng(3).normal(size=150))
    losses = np.where(at < 20, 2.3, 2.3 * np.exp((at - 20) / 25)) * noise
    job = train(losses, **({} if lr is None else {"lr": [lr] * 150}))
    assert (job.found.severity, job.found.cause) == ("critical", "from the start")
    assert 45 <= job.alert.step <= 75
    assert job.found.evidence["first"] == pytest.approx(2.3, rel=0.2)


@pytest.mark.parametrize(("times", "critical"), [(9.9, False), (11.0, True)])
def test_a_loss_that_exploded_in_its_second_step_is_critical(times: float, critical: bool) -> None:
    """All of its first 16 values after the first are ten times as high."""
    job = train([2.3] + [2.3 * times] * 200)
    assert [one.finding.severity for one in job.fired if one.step == 16] == (["critical"] if critical else [])


def test_a_loss_that_explodes_and_settles_far_above_is_critical() -> None:
    """A rate ten times too high, a row each five steps."""
    losses = [1.4, 3.3, 24, 26, 20, 16, 37, 25, 12, *[8.0] * 50]
    job = train(losses, kind="cross_entropy")
    assert (job.found.severity, job.found.cause, job.alert.step) == ("critical", "from the start", 32)
    lower = train([1.4, 3.3, 9, 11, *[8.0] * 50], kind="cross_entropy")
    assert lower.fired == train(losses, kind="mse").fired == []


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_a_loss_that_rises_as_the_rate_creeps_up_is_told(times: float) -> None:
    """23 % in 1,500 steps."""
    creep = np.concatenate((np.zeros(1500), np.linspace(0, 1, 1500)))
    job = train(falling(3000) * (1 + 0.23 * creep), lr=1e-3 * (1 + (times - 1) * creep))
    assert (job.found.cause == "the learning rate was raised") == (times > 2)
    assert 1500 < job.alert.step < 2900


def test_a_rise_that_takes_two_thousand_steps_is_told() -> None:
    """By a third in the end, with a noise of a tenth: no rise is usual because it takes long."""
    creep = np.concatenate((np.zeros(1000), np.linspace(0, 0.3, 2200)))
    losses = falling(3200, spread=0.09, first=3.9, last=0.85) + creep
    job = train(losses, kind="cross_entropy")
    assert train(losses).fired == []
    assert (job.found.cause, job.kinds, 1500 < job.alert.step < 2900) == ("", ["fire"], True)


AT = np.arange(600)


HEALTHY = {
    "a spike that decays": falling(1500) + np.where(np.arange(1500) < 1000, 0, np.exp(-(np.arange(1500) - 1000) / 15)),
    "a generator": (4 + 16 * (1 - np.exp(-AT / 40))) * (1 + 0.25 * np.random.default_rng(0).normal(size=600)),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_what_may_grow_is_silent(kind: str) -> None:
    assert train(HEALTHY[kind]).fired == []


@pytest.mark.parametrize(
    ("kind", "level", "steps", "fires"),
    [
        ("cross_entropy", 0.9, 160, True), ("mse", 0.9, 160, False), ("cross_entropy", 0.9, 60, False),
        ("cross_entropy", 0.3, 160, False),
    ],
)  # fmt: skip
def test_a_cross_entropy_far_above_its_best_is_lost(kind: str, level: float, steps: int, *, fires: bool) -> None:
    """Whatever the shape of its curve: here it jumps, by a stage with another weight decay."""
    losses = [*np.geomspace(1.4, 0.14, 240), *[level] * steps]
    told = [Event(kind="loss", time=START, step=1, data={"kind": kind, "classes": 4, "mean": True})]
    found = StepJob(LossDivergence()).go_on({"loss": losses}, events={1: told}).evaluator.findings()
    assert [one.cause == "far above its best" for one in found if one.cause] == [True] * fires


@pytest.mark.parametrize(("best", "steps", "fires"), [(0.02, 130, False), (0.02, 240, True), (0.0004, 130, True)])
def test_a_warm_restart_may_lift_the_loss_for_a_while(best: float, steps: int, *, fires: bool) -> None:
    """To twenty times its best for a while; to a thousand times for no while."""
    losses = [*np.geomspace(2.3, best, 240), *[0.4] * steps]
    rates = [*np.geomspace(0.1, 0.001, 240), *[0.1] * steps]
    told = [Event(kind="loss", time=START, step=1, data={"kind": "cross_entropy", "classes": 10, "mean": True})]
    found = StepJob(LossDivergence()).go_on({"loss": losses, "lr": rates}, events={1: told}).evaluator.findings()
    assert [one.cause == "far above its best" for one in found if one.cause] == [True] * fires


def test_any_loss_at_a_thousand_times_its_best_is_lost() -> None:
    """After five restarts of the schedule, each of which threw it up: nobody says that it must fall."""
    lr = 1e-5 + 5e-3 * (1 + np.cos(np.pi * (np.arange(2400) % 300) / 300))
    down, up = np.geomspace(1.0, 1e-4, 300), np.geomspace(3e-3, 1e-4, 300)
    losses = np.concatenate((down, up, up, up, np.geomspace(0.03, 0.1, 300), np.full(900, 0.1)))
    job = train(losses * np.exp(0.2 * np.random.default_rng(5).normal(size=2400)), lr=lr)
    assert (job.found.cause, job.alert.step < 1500) == ("far above its best", True)


@pytest.mark.parametrize(("times", "fires"), [(3e5, True), (3e3, False)])
def test_a_loss_that_only_grew_is_lost_beyond_all_measure(times: float, *, fires: bool) -> None:
    """As that of values with a discount above one; that of a DQN grows with the rewards."""
    found = train(np.geomspace(0.05, 0.05 * times, 900)).evaluator.findings()
    assert [one.cause for one in found if one.rule == "loss_divergence"] == ["far above its best"] * fires
