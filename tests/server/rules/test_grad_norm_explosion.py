"""grad_norm_explosion: norms in pairs far above what is usual, on real and on made-up curves."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import pytest
from judging import DATA, frame, read_curve
from step_job import StepJob

from perfagent_server.rules.model.grad_norm_explosion import GradNormExplosion

LLMC = read_curve(next((DATA / "loss_curves").glob("*llmc*")))


def train(norms: Sequence[float], *, every: int = 1, **more: Sequence[float]) -> StepJob:
    """more: other series of the same steps."""
    columns = {"grad/norm": norms, **{name.replace("_", "/", 1): values for name, values in more.items()}}
    return StepJob(GradNormExplosion()).go_on(columns, every=every)


def noise(count: int, spread: float = 0.1, *, level: float = 1.0, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0, spread)) for _ in range(count)]


@pytest.mark.parametrize("spread", [0.0, 0.25])
def test_the_bloom_incident_is_told_before_the_loss_leaves(spread: float) -> None:
    """12 April 2022, after 300 made-up steps at its first level: three iterations before the loss leaves its band."""
    rows = json.loads((DATA / "incidents" / "bigscience.json").read_text())
    logged = [row for row in rows if 31214 <= row["iteration"] <= 31251]
    job = StepJob(GradNormExplosion(), first=logged[0]["iteration"] - 300)
    job.go_on({"grad/norm": noise(300, spread, level=logged[0]["grad_norm"])}, rows=1)
    for row in logged:
        at = row["iteration"]
        job.changes += job.evaluator.take(frame({"grad/norm": [row["grad_norm"]]}, [at], ident=at))
    assert (job.alert.step <= 31216, job.found.since_step) == (True, 31215)
    [worse, *_] = [one for one in job.changes if one.kind == "update"]
    assert (worse.step <= 31218, worse.finding.severity) == (True, "critical")


@pytest.mark.parametrize("every", [1, 20])
def test_a_healthy_run_of_19560_steps_raises_nothing(every: int) -> None:
    job = StepJob(GradNormExplosion(), restarts=100)
    job.go_on({name: LLMC[name][::every] for name in ("grad/norm", "lr")}, rows=100)
    assert job.changes == []


HEALTHY = {
    "single spikes that the clip catches": [value * (30 if at % 97 == 0 else 1) for at, value in enumerate(noise(6000), 1)],
    "as noisy as a policy gradient": noise(5000, 0.8, seed=2),
    "zero for the whole run": [0.0] * 2000,
    "falling from large": [15 * math.exp(-at / 30) + value for at, value in enumerate(noise(1000, level=0.3))],
    "growing slowly": [math.exp(at / 500) * value for at, value in enumerate(noise(5000, 0.2))],
    "a reward that comes late": [(1e-5 if 40 <= at < 900 else 1.0) * value for at, value in enumerate(noise(1500, 0.5))],
    "too few": [*noise(30), 100.0, 100.0, 100.0],
    "above all before in the first steps": [
        *(20 * math.exp(-at / 8) + value for at, value in enumerate(noise(80))), *noise(20, level=18.0),
    ],
    "infinite in steps that a scaler skips": [math.inf if at % 50 == 0 else value for at, value in enumerate(noise(1000))],
}  # fmt: skip


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_norms_raise_nothing(kind: str) -> None:
    assert train(HEALTHY[kind]).fired == []


def test_norms_that_follow_the_loss_scale_are_judged_without_it() -> None:
    scale = [2048.0 * 2 ** (at // 60) for at in range(600)]
    norms = [value * factor for value, factor in zip(noise(600), scale, strict=True)]
    assert train(norms, amp_scale=scale).fired == []
    job = train([*noise(400), *noise(20, level=20.0)], amp_scale=[2.0**16] * 410 + [2.0**11] * 10)
    assert job.alert.step <= 402


@pytest.mark.parametrize("every", [1, 7])
def test_it_is_over_when_norms_are_back_or_that_is_their_level(every: int) -> None:
    job = train([*noise(300), *noise(50, level=40.0), *noise(100)], every=every)
    assert (job.alert.step, job.found.severity) == (302 * every, "critical")
    assert (job.kinds, job.changes[-1].step) == (["fire", "resolve"], (350 + 1 + 16) * every)
    job = train([*noise(300), *noise(1300, level=40.0)])
    assert (job.kinds, job.changes[-1].step) == (["fire", "resolve"], 302 + 1000 + 16)
    assert train([*noise(300), 40.0, 300.0, *([math.nan] * 100)]).kinds == ["fire"]


def test_twice_as_much_is_needed_while_the_rate_rises() -> None:
    norms = [*noise(400), *noise(40, level=7.0)]
    rising = [1e-6 * place for place in range(len(norms))]
    assert train(norms, lr=rising).fired == []
    assert train(norms, lr=[1e-3] * len(norms)).fired
    assert train([*noise(400), *noise(40, level=15.0)], lr=rising).found.cause == "learning rate"


@pytest.mark.parametrize(("times", "told"), [(4.9, []), (5.1, ["warning"]), (9.9, ["warning"]), (10.1, ["critical"])])
def test_five_times_the_usual_norm_is_told_ten_is_critical(times: float, told: list[str]) -> None:
    assert train([1.0 + 1e-6 * (step % 2) for step in range(300)] + [times] * 10).severities == told


@pytest.mark.parametrize(("second", "fires"), [(2.4, False), (2.6, True)])
def test_a_single_norm_however_high_is_no_explosion(second: float, fires: bool) -> None:
    """Clipping catches it; with a second one of 2.5 times it is one: together they are five times as high."""
    norms = [1.0 + 1e-6 * (step % 2) for step in range(300)]
    assert len(train([*norms, 20.0, second, *[1.0] * 20]).fired) == fires


def test_the_layer_in_which_it_begins_is_named() -> None:
    norms = [*noise(300), 20.0, 60.0]
    layers = {
        step: {f"grad_norm/blocks.{place}": norms[step - 1] if place == 5 else 0.2 for place in range(8)}
        for step in (*range(10, 301, 10), 301, 302)
    }
    found = StepJob(GradNormExplosion()).go_on({"grad/norm": norms}, rows=1, measured=layers).found
    assert (found.cause, next(iter(found.evidence["layers"]))) == ("one layer", "blocks.5")
