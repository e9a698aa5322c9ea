"""loss_spike on real curves, on incidents that happened, and on what only looks like a spike."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from case_selection import everyday
from healthy_losses import AT, made
from judging import DATA, read_curve, state
from step_job import StepJob

from perfagent_server.rules.loss.loss_spike import LossSpike
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss

CURVES = sorted((DATA / "loss_curves").glob("*.csv"))


def train(loss: Any, *, first: int = 1, rows: int = 50, restarts: int = 7, step_s: float = 0.1, **more: Any) -> StepJob:
    columns = {"loss": loss, **{name.replace("_", "/", 1): values for name, values in more.items()}}
    return StepJob(NonfiniteLoss(), LossSpike(), first=first, restarts=restarts).go_on(
        columns, rows=rows, step_s=step_s
    )


def wavy(steps: int) -> list[float]:
    return [3.0 + 0.02 * math.sin(7.0 * step) for step in range(steps)]


def jumping(level: float, steps: int) -> list[float]:
    """Around 3 for 500 steps, then around the level."""
    draw = random.Random(3)
    return [value + draw.gauss(0, 0.02) for value in [3.0] * 500 + [level] * steps]


@pytest.mark.parametrize(
    ("shape", "nats", "count", "recall"), everyday(1, [("recover", 0.5, 25, 0.95), ("stick", 0.5, 100, 0.97)])
)
def test_spikes_of_half_a_nat_are_found_within_ten_steps(shape: str, nats: float, count: int, recall: float) -> None:
    """At random places of real curves: +nats that decay with a time constant of 15 steps, or stay."""
    draw, found = random.Random(5), 0
    curves = [read_curve(path)["loss"] for path in CURVES]
    for _ in range(count):
        curve = draw.choice(curves)
        place = draw.randrange(200, len(curve) - 60)
        begin = max(0, place - 1200)
        losses = curve[begin : place + 11]
        for age in range(11):
            losses[place - begin + age] += nats * (math.exp(-age / 15) if shape == "recover" else 1.0)
        job = train(losses, first=begin + 1, rows=500, restarts=0)
        found += any(place < change.step <= place + 11 for change in job.fired)
    assert found >= count * recall


def test_a_spike_is_over_half_way_back_or_when_it_is_the_level() -> None:
    job = train(jumping(0.0, 0) + [3.0 + 6.0 * math.exp(-step / 100) for step in range(400)])
    assert job.kinds == ["fire", "resolve"]
    assert 560 <= job.changes[1].step <= 500 + 69 + 4 + 30 + 5
    job = train(jumping(9.0, 900))
    assert (job.kinds, job.evaluator.verdict().rule) == (["fire"], "loss_spike")
    job = train(jumping(9.0, 1500))
    assert (job.kinds, job.changes[1].step > 1500) == (["fire", "resolve"], True)


def test_the_spikes_of_tr1_13b_and_bloom_are_found() -> None:
    """Real values of the incident, on the noise of a real curve, because the chronicle has only points."""
    rows = json.loads((DATA / "incidents" / "bigscience.json").read_text())
    noise = [value - 3.3 for value in read_curve(CURVES[0])["loss"][-500:]]
    level = sum(noise) / len(noise)
    for first, last, usual in ((31214, 31222, 2.22), (29020, 29090, 2.77)):
        incident = [row["loss"] for row in rows if first <= row["iteration"] <= last]
        losses = [usual + (value - level) * 0.3 for value in noise] + incident + [incident[-1]] * 5
        assert [change.step for change in train(losses).fired if change.step > 500]


@pytest.mark.parametrize(("rise", "fires"), [(0.119, False), (0.13, True)])
def test_a_jump_by_four_percent_is_told_in_its_fifth_step(rise: float, fires: bool) -> None:
    losses = [3.0 + 0.002 * math.sin(7.0 * step) for step in range(500)] + [3.0 + rise] * 30
    job = train(losses)
    assert [(change.step, change.finding.since_step) for change in job.fired] == ([(505, 505)] if fires else [])
    for change in job.fired:
        assert change.finding.evidence["expected"] == pytest.approx(3.0, abs=0.003)


@pytest.mark.parametrize(
    ("places", "fires"), [((300, 301, 450), 0), (range(300, 304), 0), ((*range(300, 312), *range(360, 372)), 1)],
    ids=["single steps", "four", "twelve, twice"],
)  # fmt: skip
def test_single_bad_steps_are_no_spike_and_flapping_is_one(places: Any, fires: int) -> None:
    losses = wavy(700)
    for step in places:
        losses[step] += 1.0
    job = train(losses)
    assert len(job.fired) == fires
    assert job.kinds[:2] == ["fire", "resolve"][: 2 * fires]
    assert len({change.alert for change in job.changes}) == fires


def test_a_spike_that_ends_in_nan_is_not_over() -> None:
    job = train(jumping(6.0, 12) + [math.nan] * 200)
    assert {change.finding.rule for change in job.fired} == {"loss_spike", "nonfinite_loss"}
    assert "resolve" not in job.kinds
    assert job.evaluator.verdict().rule == "nonfinite_loss"


@pytest.mark.parametrize(
    ("rows", "step"), [((480,), 505), ((479, 480), 505), ((300, 420, 480), 505), ((479, 480, 481), 505)]
)
def test_steps_that_the_scaler_skipped_hide_no_spike(rows: tuple[int, ...], step: int | None) -> None:
    losses = [math.nan if place in rows else value for place, value in enumerate(jumping(6.0, 40))]
    skipped = [float(sum(row <= place for row in rows)) for place in range(len(losses))]
    job = train(losses, amp_skipped=skipped, amp_scale=[1024.0] * len(losses))
    assert [change.step for change in job.fired if change.finding.rule == "loss_spike"] == ([step] if step else [])


NOISE = np.random.default_rng(11).normal(size=len(AT))
RESTARTS = 4 * (AT + 1) ** -0.1 + 0.15 * (1 + np.cos(np.pi * (AT % 1000) / 1000))
SILENT: dict[str, dict[str, Any]] = {
    "a cycle whose rate is logged": {
        "loss": RESTARTS + 0.03 * NOISE, "lr": 1e-6 + 5e-4 * (1 + np.cos(np.pi * (AT % 1000) / 1000)),
    },
    "a slow rise": {"loss": 2 + 2e-4 * AT + 0.05 * NOISE},
    "all zero": {"loss": [0.0] * 3000},
    "temporal difference": made("temporal difference", 11),
    "a value loss before its first reward": {"loss": np.where(AT < 300, 1e-4, 0.05) * np.exp(0.3 * NOISE)},
    "a short run": {"loss": [1.0] * 150 + [50.0] * 40},
    "a long warm-up of the rate": {"loss": [3.0] * 400 + [5.0] * 100, "lr": [1e-6 * step for step in range(500)]},
}  # fmt: skip


@pytest.mark.parametrize("kind", SILENT)
def test_what_is_no_spike_is_silent(kind: str) -> None:
    assert train(**SILENT[kind]).fired == []


@pytest.mark.parametrize("is_told", [True, False])
def test_a_training_that_follows_another_begins_with_no_jump(is_told: bool) -> None:
    draw = random.Random(4)
    losses = [0.04 + 2.3 * math.exp(-(step % 400) / 30) + draw.uniform(0.0, 0.005) for step in range(800)]
    border = {401: [state("running", training_after=400)]} if is_told else {}
    assert len(StepJob(LossSpike()).go_on({"loss": losses}, rows=50, events=border).fired) == (not is_told)
