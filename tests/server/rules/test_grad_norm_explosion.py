"""grad_norm_explosion: norms in pairs far above what is usual, on real and on made-up curves."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import pytest
from judging import DATA, fired, frame, judge_series, make_evaluator, read_curve, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.model.grad_norm_explosion import GradNormExplosion

RULES = (GradNormExplosion(),)
LLMC = read_curve(next((DATA / "loss_curves").glob("*llmc*")))


def judge(norms: Sequence[float], *, every: int = 1, **more: Sequence[float]) -> list[Change]:
    """Norms of steps that lie `every` steps apart. more: other series of the same steps."""
    evaluator = make_evaluator(rules=RULES)
    changes: list[Change] = []
    for begin in range(0, len(norms), 20):
        steps = [1 + every * place for place in range(begin, min(begin + 20, len(norms)))]
        columns = {"grad/norm": norms, **{name.replace("_", "/", 1): values for name, values in more.items()}}
        piece = {name: list(values[begin : begin + 20]) for name, values in columns.items()}
        changes += evaluator.take(frame(piece, steps, ident=evaluator.upto + 1))
        evaluator = restored(evaluator) if begin % 100 == 0 else evaluator
    return changes


def noise(count: int, spread: float = 0.1, *, level: float = 1.0, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, spread)) for _ in range(count)]


def bloom(spread: float) -> tuple[list[int], list[float]]:
    """The incident of 12 April 2022, after 300 made-up steps at its first level."""
    rows = json.loads((DATA / "incidents" / "bigscience.json").read_text())
    logged = [row for row in rows if 31214 <= row["iteration"] <= 31251]
    norms = noise(300, spread, level=logged[0]["grad_norm"])
    first = logged[0]["iteration"]
    steps = [*range(first - 300, first), *(row["iteration"] for row in logged)]
    return steps, [*norms, *(row["grad_norm"] for row in logged)]


# ---- real curves


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.25])
def test_on_the_bloom_incident_it_fires_three_iterations_before_the_loss_leaves_its_band(spread: float) -> None:
    evaluator = make_evaluator(rules=RULES)
    changes: list[Change] = []
    for step, norm in zip(*bloom(spread), strict=True):
        changes += evaluator.take(frame({"grad/norm": [norm], "lr": [5.279e-5]}, [step], ident=step))
    [change] = fired(changes)
    assert change.step <= 31216
    assert change.finding.since_step == 31215
    assert change.finding.title.startswith("The gradient norm rose to ")
    worse = [one for one in changes if one.kind == "update"]
    assert worse[0].step <= 31218
    assert worse[0].finding.severity == "critical"
    assert "clip_grad_norm_" in change.finding.fix


@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_healthy_run_of_19560_steps_raises_nothing(every: int) -> None:
    norms, rates = LLMC["grad/norm"][::every], LLMC["lr"][::every]
    changes, _ = judge_series({"grad/norm": norms, "lr": rates}, rules=RULES)
    assert changes == []


@pytest.mark.parametrize("growth", [1.1, 1.5, 3.0])
def test_growth_by_a_factor_a_step_is_found_before_the_norm_is_ten_times_as_high(growth: float) -> None:
    rng = random.Random(7)
    for _ in range(10):
        begin = rng.randrange(300, 19_000)
        norms = LLMC["grad/norm"][begin - 300 : begin]
        level = sorted(norms)[150]
        changes = judge([*norms, *(level * growth ** (1 + step) for step in range(40))])
        assert changes, begin
        assert growth ** (changes[0].step - 300) <= 10 * growth**2


# ---- healthy norms


def with_spikes() -> list[float]:
    rng = random.Random(3)
    return [value * (30 if rng.random() < 0.01 else 1) for value in noise(6000)]


def bursts_at_epochs() -> list[float]:
    return [value * (6 if place % 390 < 5 else 1) for place, value in enumerate(noise(3000, 0.2), 1)]


def wandering() -> list[float]:
    rng, place, found = random.Random(4), 0.0, []
    for _ in range(5000):
        place = 0.95 * place + rng.gauss(0, 0.15)
        found.append(math.exp(place + rng.gauss(0, 0.1)))
    return found


HEALTHY = {
    "single spikes that the clip catches": with_spikes(),
    "as noisy as a policy gradient": noise(5000, 0.8, seed=2),
    "wandering": wandering(),
    "two kinds of steps in turn": [value * (8 if place % 2 else 1) for place, value in enumerate(noise(2000))],
    "zero for the whole run": [0.0] * 2000,
    "falling from large": [15 * math.exp(-place / 30) + value for place, value in enumerate(noise(1000, level=0.3))],
    "growing slowly": [math.exp(place / 500) * value for place, value in enumerate(noise(5000, 0.2))],
    "growing from a start at zero": [
        math.exp(3 * (1 - math.exp(-place / 40))) * value for place, value in enumerate(noise(600))
    ],
    "a reward that comes late": [
        (1e-5 if 40 <= place < 900 else 1.0) * value for place, value in enumerate(noise(1500, 0.5))
    ],
    "too few": [*noise(30), 100.0, 100.0, 100.0],
}


@pytest.mark.parametrize("norms", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_norms_raise_nothing(norms: list[float]) -> None:
    assert fired(judge(norms)) == []


def test_rises_that_come_again_are_told_once() -> None:
    assert len(fired(judge(bursts_at_epochs()))) == 1


def test_norms_that_follow_the_loss_scale_are_judged_without_it() -> None:
    scales = [2048.0 * 2 ** (place // 60) for place in range(600)]
    jumps = [2048.0 if place < 400 else 2048.0 * 64 for place in range(600)]
    for scale in (scales, jumps):
        norms = [value * factor for value, factor in zip(noise(600), scale, strict=True)]
        assert fired(judge(norms, amp_scale=scale)) == []
    [change] = fired(judge([*noise(400), *noise(20, level=20.0)], amp_scale=[2.0**16] * 410 + [2.0**11] * 10))
    assert change.step <= 402


def test_steps_that_a_scaler_skipped_say_nothing() -> None:
    norms = [math.inf if place % 50 == 0 else value for place, value in enumerate(noise(1000))]
    assert fired(judge(norms)) == []
    [change] = fired(judge([*norms, 30.0, math.inf, 40.0, 50.0]))
    assert change.step == 1003


def test_while_the_learning_rate_rises_twice_as_much_is_needed() -> None:
    norms = [*noise(400), *noise(40, level=7.0)]
    rising = [1e-6 * place for place in range(len(norms))]
    assert fired(judge(norms, lr=rising)) == []
    assert fired(judge(norms, lr=[1e-3] * len(norms)))
    [change] = fired(judge([*noise(400), *noise(40, level=15.0)], lr=rising))
    assert change.finding.cause == "learning rate"


def test_where_the_loss_is_as_restless_as_in_reinforcement_learning_it_must_exceed_all_that_was_before() -> None:
    rng = random.Random(5)
    norms = [*noise(20, level=30.0), *noise(400), *noise(40, level=25.0)]
    restless = [rng.gauss(0, 1) for _ in norms]
    assert fired(judge(norms, loss=restless)) == []
    assert fired(judge(norms, loss=noise(len(norms), 0.05)))
    assert fired(judge([*norms[:-40], *noise(40, level=60.0)], loss=restless))


# ---- explosions


@pytest.mark.parametrize("every", [1, 7])
def test_steps_are_counted_as_they_are_measured(every: int) -> None:
    changes = judge([*noise(300), *noise(60, level=30.0)], every=every)
    [change] = fired(changes)
    assert change.step == 1 + 301 * every
    assert change.finding.severity == "critical"


def test_in_the_first_steps_it_must_exceed_all_that_was_before() -> None:
    falling = [20 * math.exp(-place / 8) + value for place, value in enumerate(noise(80))]
    assert fired(judge([*falling, *noise(20, level=18.0)])) == []
    [change] = fired(judge([*falling, *(50.0 * 2**place for place in range(6))]))
    assert change.step <= 83


def test_the_alert_is_resolved_when_the_norms_are_back() -> None:
    changes = judge([*noise(300), *noise(50, level=40.0), *noise(100)])
    assert [one.kind for one in changes if one.kind != "update"] == ["fire", "resolve"]
    assert changes[-1].step == 350 + 1 + RULES[0].life.clear_steps


def test_an_alert_stays_open_while_the_norms_are_no_numbers() -> None:
    changes = judge([*noise(300), 40.0, 300.0, *([math.nan] * 100)])
    assert [one.kind for one in changes] == ["fire"]


def test_a_level_that_lasts_is_the_level_of_the_run() -> None:
    changes = judge([*noise(300), *noise(1300, level=40.0)])
    assert [one.kind for one in changes if one.kind != "update"] == ["fire", "resolve"]
    assert 1300 <= changes[-1].step <= 1340


def test_the_layer_in_which_it_begins_is_named() -> None:
    evaluator = make_evaluator(rules=RULES)
    changes: list[Change] = []
    layers = [f"blocks.{place}" for place in range(8)]
    for step, norm in enumerate([*noise(300), 20.0, 60.0], 1):
        columns = {"grad/norm": [norm]}
        if step % 10 == 0 or step > 300:
            columns |= {f"grad_norm/{layer}": [norm if layer == "blocks.5" else 0.2] for layer in layers}
        changes += evaluator.take(frame(columns, [step], ident=step))
    [change] = fired(changes)
    assert change.finding.cause == "one layer"
    assert next(iter(change.finding.evidence["layers"])) == "blocks.5"
    assert "Most in blocks.5" in change.finding.message
