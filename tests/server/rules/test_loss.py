"""The loss rules on real curves, on incidents that happened, and on healthy losses of every kind."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_selection import everyday
from judging import DATA, fired, frame, judge_series, make_evaluator, read_curve, restored, state

from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.loss.loss_spike import LossSpike

CURVES = sorted((DATA / "loss_curves").glob("*.csv"))
STEPS = 3000
RULES = tuple(rule for rule in all_rules() if rule.id in ("nonfinite_loss", "nonfinite_gradient", "loss_spike"))
"""Losses that are made up here stand still, or fall in a way that other rules have a word on."""


def judge(series: dict[str, list[float]], **options: Any) -> tuple[list[Change], Evaluator]:
    return judge_series(series, **{"rules": RULES, **options})


@pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem[-36:])
def test_a_healthy_pre_training_run_raises_no_alert(path: Path) -> None:
    columns = read_curve(path)
    first = int(columns.pop("step")[0])
    changes, _ = judge_series(columns, first_step=first + 1)
    assert [change.finding.rule for change in fired(changes) if change.finding.severity != "info"] == []


@pytest.mark.parametrize(
    ("shape", "nats", "recall"),
    [
        ("recover", 0.5, 0.95),
        pytest.param("recover", 1.0, 1.0, marks=pytest.mark.long),
        pytest.param("stick", 0.5, 0.97, marks=pytest.mark.long),
        pytest.param("stick", 3.0, 1.0, marks=pytest.mark.long),
    ],
)
def test_spikes_of_half_a_nat_are_found_within_ten_steps(shape: str, nats: float, recall: float) -> None:
    """A spike at random places of real curves: +nats that decay with a time constant of 15 steps, or stay."""
    draw = random.Random(5)
    curves = [read_curve(path)["loss"] for path in CURVES]
    found = 0
    for _ in range(100):
        curve = draw.choice(curves)
        place = draw.randrange(200, len(curve) - 60)
        begin = max(0, place - 1200)
        losses = curve[begin : place + 11]
        for later in range(place - begin, len(losses)):
            age = later - (place - begin)
            losses[later] += nats * (math.exp(-age / 15) if shape == "recover" else 1.0)
        changes, _ = judge({"loss": losses}, first_step=begin + 1, rules=(LossSpike(),))
        found += any(place < change.step <= place + 11 for change in fired(changes, "loss_spike"))
    assert found >= 100 * recall


def test_first_step_is_the_step_at_which_it_fired_never_one_before() -> None:
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(400)]
    for step in range(299, 400):
        losses[step] += 1.0
    changes, _ = judge({"loss": losses}, first_step=1, rules=(LossSpike(),))
    [alert] = fired(changes)
    assert 300 <= alert.step <= 305
    assert alert.finding.since_step == alert.step


def test_one_bad_step_is_no_spike() -> None:
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(600)]
    for step in (300, 301, 450):
        losses[step] = 30.0
    changes, _ = judge({"loss": losses})
    assert fired(changes) == []


def test_a_spike_that_is_over_is_resolved_and_flapping_opens_no_second_alert() -> None:
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(700)]
    for step in [*range(300, 312), *range(360, 372)]:
        losses[step] += 1.0
    changes, _ = judge({"loss": losses}, rules=(LossSpike(),))
    assert [change.kind for change in changes if change.kind in ("fire", "resolve")][:2] == ["fire", "resolve"]
    assert len(fired(changes)) == 1
    assert len({change.alert for change in changes}) == 1


def _jumping(level: float, steps: int, *, before: int = 500) -> list[float]:
    draw = random.Random(3)
    return [value + draw.gauss(0, 0.02) for value in [3.0] * before + [level] * steps]


def test_a_loss_that_never_comes_back_stays_a_spike_until_the_new_level_is_what_this_run_has() -> None:
    changes, evaluator = judge({"loss": _jumping(9.0, 900)})
    assert [change.kind for change in changes] == ["fire"]
    assert evaluator.verdict().rule == "loss_spike"
    changes, evaluator = judge({"loss": _jumping(9.0, 1500)})
    assert [change.kind for change in changes] == ["fire", "resolve"]
    assert changes[1].step > 1500
    told = evaluator.verdict().message
    assert told.endswith("The loss did not come back from its jump to 8.971 in step 505: 2.994 was expected there.")


def test_a_spike_is_over_when_the_loss_is_half_the_way_back() -> None:
    falling = [3.0 + 6.0 * math.exp(-step / 100) for step in range(400)]
    changes, evaluator = judge({"loss": _jumping(0.0, 0) + falling})
    assert [change.kind for change in changes] == ["fire", "resolve"]
    assert 560 <= changes[1].step <= 500 + 69 + 4 + 30 + 5
    assert "did not come back" not in evaluator.verdict().message


def test_a_spike_that_ends_in_nan_is_not_over() -> None:
    changes, evaluator = judge({"loss": _jumping(6.0, 12) + [math.nan] * 200})
    assert {change.finding.rule for change in fired(changes)} == {"loss_spike", "nonfinite_loss"}
    assert [change for change in changes if change.kind == "resolve"] == []
    assert evaluator.verdict().rule == "nonfinite_loss"


def test_an_open_spike_is_judged_alike_by_a_restarted_server() -> None:
    losses = _jumping(6.0, 300) + [4.0] * 30 + [3.0] * 100
    whole, _ = judge({"loss": losses}, rows=10)
    pieces, evaluator = [], make_evaluator(rules=RULES)
    for begin in range(0, len(losses), 10):
        evaluator = restored(evaluator)
        stored = frame({"loss": losses[begin : begin + 10]}, range(begin + 1, begin + 11), ident=evaluator.upto + 1)
        pieces += evaluator.take(stored)
    assert [(one.kind, one.alert, one.step) for one in pieces] == [(one.kind, one.alert, one.step) for one in whole]
    assert [one.kind for one in whole] == ["fire", "resolve"]


@pytest.mark.parametrize("rows", [(480,), (479, 480), (300, 420, 480)])
def test_a_step_that_the_scaler_skipped_does_not_hide_a_spike_that_follows(rows: tuple[int, ...]) -> None:
    losses = _jumping(6.0, 40)
    skipped, count = [], 0.0
    for place in range(len(losses)):
        if place in rows:
            losses[place] = math.nan
        count += place in rows
        skipped.append(count)
    changes, _ = judge({"loss": losses, "amp/skipped": skipped, "amp/scale": [1024.0] * len(losses)})
    [alert] = fired(changes)
    assert (alert.finding.rule, alert.step) == ("loss_spike", 505)


@pytest.mark.parametrize("first", [math.nan, math.inf, -math.inf])
def test_a_negative_loss_that_began_with_no_number_is_judged(first: float) -> None:
    """Whether to judge it by factors is a question about its finite values: min() of a NaN and others is the NaN."""
    draw = random.Random(2)
    losses = [first] + [draw.gauss(0, 1) * 0.3 - 0.5 for _ in range(800)] + [30.0] * 20
    changes, _ = judge({"loss": losses}, rules=(LossSpike(),))
    assert [change.step for change in fired(changes)] == [806]


def _noise(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _correlated(draw: np.random.Generator, rho: float) -> np.ndarray:
    values = np.empty(STEPS)
    values[0] = draw.normal()
    for step in range(1, STEPS):
        values[step] = rho * values[step - 1] + math.sqrt(1 - rho * rho) * draw.normal()
    return values


def _cosine_restarts(draw: np.random.Generator) -> dict[str, np.ndarray]:
    at = np.arange(STEPS)
    lr = 1e-6 + 5e-4 * (1 + np.cos(np.pi * (at % 1000) / 1000))
    return {"lr": lr, "loss": 4 * (at + 1) ** -0.1 + 0.3 * lr / 1e-3 + 0.03 * draw.normal(size=STEPS)}


AT = np.arange(STEPS)
HEALTHY: dict[str, Callable[[np.random.Generator], np.ndarray | dict[str, np.ndarray]]] = {
    "white noise round zero": lambda draw: draw.normal(size=STEPS),
    "tiny noise round one": lambda draw: 1 + 1e-3 * draw.normal(size=STEPS),
    "negative": lambda draw: -5 + 0.5 * draw.normal(size=STEPS),
    "from positive to negative": lambda draw: 5 - 0.01 * AT + 0.2 * draw.normal(size=STEPS),
    "heavy tails": lambda draw: draw.standard_t(2, size=STEPS),
    "log-normal": lambda draw: np.exp(draw.normal(size=STEPS)),
    "near zero": lambda draw: 2 * np.exp(-AT / 200) * np.exp(0.3 * draw.normal(size=STEPS)),
    "near zero with a floor": lambda draw: 2 * np.exp(-AT / 200) + 1e-4 * np.abs(draw.normal(size=STEPS)),
    "policy loss, correlated": lambda draw: _correlated(draw, 0.9),
    "temporal difference": lambda draw: np.exp(0.8 * _correlated(draw, 0.98)),
    "two kinds of episodes": lambda draw: draw.normal(size=STEPS) * np.where((AT // 300) % 2, 0.2, 1.0),
    "GAN, fast": lambda draw: 1 + 0.5 * np.sin(2 * np.pi * AT / 20) + 0.1 * draw.normal(size=STEPS),
    "GAN, slow": lambda draw: 0.7 + 0.3 * np.sin(2 * np.pi * AT / 400) + 0.01 * draw.normal(size=STEPS),
    "GAN round zero": lambda draw: 0.5 * np.sin(2 * np.pi * AT / 800) + 0.05 * draw.normal(size=STEPS),
    "power law": lambda draw: 10 * (AT + 1.0) ** -0.3 + 0.05 * draw.normal(size=STEPS),
    "epochs that step down": lambda draw: 3 - 0.3 * (AT // 500) * 0.3 + 0.1 * draw.normal(size=STEPS),
    "slow rise": lambda draw: 2 + 2e-4 * AT + 0.05 * draw.normal(size=STEPS),
    "curriculum in small steps": lambda draw: 2.5 + 0.05 * (AT // 600) + 0.05 * draw.normal(size=STEPS),
    "warm restarts": _cosine_restarts,
    "slowly wandering": lambda draw: 3 + 0.01 * np.cumsum(draw.normal(size=STEPS)) + 0.02 * draw.normal(size=STEPS),
    "constant": lambda draw: np.full(STEPS, 0.25),
    "all zero": lambda draw: np.zeros(STEPS),
}


# A cycle's first turn looks like a spike until the second one has come.
CYCLES: dict[str, Callable[[np.random.Generator], np.ndarray | dict[str, np.ndarray]]] = {
    "warm restarts, rate not logged": lambda draw: _cosine_restarts(draw)["loss"],
    "sawtooth over epochs": lambda draw: 3 - 0.3 * (AT % 500) / 500 + 0.03 * draw.normal(size=STEPS),
    "falling sawtooth": lambda draw: 3 * (AT + 100) ** -0.05 - 0.3 * (AT % 500) / 500 + 0.03 * draw.normal(size=STEPS),
}
# What nothing in the loss tells from a spike, however long one waits.
LIKE_SPIKES: dict[str, Callable[[np.random.Generator], np.ndarray | dict[str, np.ndarray]]] = {
    "curriculum in large steps": lambda draw: 2.5 + 0.3 * (AT // 600) + 0.05 * draw.normal(size=STEPS),
    "sparse bursts": lambda draw: 2 + np.where(AT % 700 > 680, 0.5, 0.0) + 0.05 * draw.normal(size=STEPS),
}


def _known_limit(kind: str, reason: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.xfail(strict=True, reason=reason))


@pytest.mark.parametrize(
    "kind",
    [
        *HEALTHY,
        *(_known_limit(kind, "the first turn of a cycle looks like a spike") for kind in CYCLES),
        *(
            _known_limit(kind, "a loss that jumps up and stays or comes back is what a spike is")
            for kind in LIKE_SPIKES
        ),
    ],
)
@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.long)])
def test_a_healthy_loss_of_any_kind_is_silent(kind: str, seed: int) -> None:
    made = (HEALTHY | CYCLES | LIKE_SPIKES)[kind](_noise(seed))
    series = made if isinstance(made, dict) else {"loss": made}
    changes, _ = judge({name: values.tolist() for name, values in series.items()}, rules=(LossSpike(),))
    assert [change.finding.message for change in fired(changes)] == []


@pytest.mark.parametrize("kind", CYCLES)
@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.long) for seed in (12, 13))])
def test_a_cycle_is_told_once(kind: str, seed: int) -> None:
    """With steps of 2 s, so that no cool-down hides a second alert."""
    losses = CYCLES[kind](_noise(seed))
    assert isinstance(losses, np.ndarray)
    changes, _ = judge({"loss": losses.tolist()}, rules=(LossSpike(),), step_s=2.0)
    assert len(fired(changes)) == 1
    assert {change.kind for change in changes} <= {"fire", "resolve"}


@pytest.mark.parametrize("decay", everyday(1, [15, 100]))
def test_spikes_at_equal_distances_are_still_spikes(decay: int) -> None:
    """Trouble that keeps time (a bad shard that comes round) is told each time: it decays, where a cycle falls
    slowly."""
    found = spikes = 0
    for path in CURVES[:3]:
        losses = read_curve(path)["loss"][:3000]
        places = range(400, len(losses) - 60, 400)
        for place in places:
            for later in range(place, len(losses)):
                losses[later] += 0.5 * math.exp(-(later - place) / decay)
        changes, _ = judge({"loss": losses}, rules=(LossSpike(),), step_s=2.0)
        steps = [change.step for change in fired(changes)]
        found += sum(any(place < step <= place + 11 for step in steps) for place in places)
        spikes += len(places)
    assert spikes > 10
    assert found >= 0.95 * spikes


@pytest.mark.parametrize("place", [260, 400, 500, 700])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_a_jump_far_out_of_a_noisy_loss_is_told_early_in_the_run_too(seed: int, place: int) -> None:
    """Small batches: a spread of 10 % of the level, as unsteady as reinforcement learning. 30 batches have wrong
    labels."""
    at = np.arange(1000)
    losses = (0.4 + 1.7 * np.exp(-at / 150)) * (1 + 0.1 * _noise(seed).normal(size=1000))
    losses[place : place + 30] += 4.0
    changes, _ = judge({"loss": losses.tolist()}, rules=(LossSpike(),))
    assert [place < change.step <= place + 10 for change in fired(changes)] == [True]
    assert [change.kind for change in changes] == ["fire", "resolve"]


@pytest.mark.parametrize("seed", range(5))
def test_a_value_loss_before_its_first_reward_may_rise_to_anything(seed: int) -> None:
    """Sparse rewards: next to nothing is left to learn until the first one is found."""
    noise = _noise(seed)
    losses = np.concatenate((1e-4 * noise.lognormal(sigma=0.3, size=300), 0.05 * noise.lognormal(sigma=0.3, size=300)))
    changes, _ = judge({"loss": losses.tolist()}, rules=(LossSpike(),))
    assert fired(changes) == []


def test_a_short_run_is_never_called_a_spike() -> None:
    changes, _ = judge({"loss": [1.0] * 150 + [50.0] * 40})
    assert fired(changes) == []


def test_a_long_learning_rate_warm_up_is_waited_for() -> None:
    losses = [3.0] * 400 + [5.0] * 100
    lr = [1e-6 * step for step in range(500)]
    changes, _ = judge({"loss": losses, "lr": lr}, rules=(LossSpike(),))
    assert fired(changes) == []


def test_the_logged_spikes_of_tr1_13b_and_bloom_are_found() -> None:
    """Real values of the incident, on the noise of a real curve, because the chronicle has only points."""
    rows = json.loads((DATA / "incidents" / "bigscience.json").read_text())
    bloom = [row["loss"] for row in rows if 31214 <= row["iteration"] <= 31222]
    tr1 = [row["loss"] for row in rows if 29020 <= row["iteration"] <= 29090]
    assert len(bloom) == 9
    noise = [value - 3.3 for value in read_curve(CURVES[0])["loss"][-500:]]
    level = sum(noise) / len(noise)
    for incident, usual in ((bloom, 2.22), (tr1, 2.77)):
        losses = [usual + (value - level) * 0.3 for value in noise] + incident + [incident[-1]] * 5
        changes, _ = judge({"loss": losses}, rules=(LossSpike(),))
        assert [change.step for change in fired(changes) if change.step > 500]


def test_a_nan_loss_is_critical_at_once_with_its_surroundings() -> None:
    series = {
        "loss": [3.0, 2.9, math.nan, math.nan],
        "lr": [0.1, 0.2, 0.3, 0.3],
        "grad/norm": [1.0, 1.5, math.nan, math.nan],
        "grad/nonfinite": [0.0, 0.0, 12.0, 12.0],
    }
    changes, evaluator = judge(series)
    [alert] = fired(changes)
    assert (alert.finding.rule, alert.finding.severity, alert.finding.since_step) == ("nonfinite_loss", "critical", 3)
    assert "NaN in step 3" in alert.finding.message
    assert alert.finding.evidence["last_losses"] == [3.0, 2.9]
    assert alert.finding.evidence["lr"] == 0.3
    assert {found.rule for found in evaluator.findings()} == {"nonfinite_loss", "nonfinite_gradient"}


def test_the_surroundings_of_a_nan_are_those_of_its_step_whatever_came_with_it() -> None:
    """One frame brings the NaN and what came after it; the other rank is still behind."""
    evaluator = make_evaluator(rules=RULES)
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    columns = {"loss": [3.0, 2.0, math.nan, 9.0], "lr": [0.1, 0.2, 0.3, 0.4], "grad/norm": [1.0, 2.0, 3.0, 4.0]}
    [alert] = fired(evaluator.take(frame(columns, [1, 2, 3, 4], ident=2)))
    assert "the last finite value was 2" in alert.finding.message
    evidence = alert.finding.evidence
    assert (evidence["last_losses"], evidence["lr"], evidence["grad_norms"]) == ([3.0, 2.0], 0.3, [1.0, 2.0, 3.0])
    assert "on rank 0" in alert.finding.message
    [more] = evaluator.take(frame({"loss": [3.0, 2.0, math.nan]}, [1, 2, 3], rank=1, ident=3))
    assert (more.kind, more.finding.ranks) == ("update", [0, 1])
    assert "on all 2 ranks" in more.finding.message


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ([0.16, 827.3, 3.98e13], "; over the 3 values before it had grown from 0.16 to 3.98e+13"),
        ([2.3, 2.3, 2.4, 9.0, 4e4], "; over the 4 values before it had grown from 2.3 to 4e+04"),
        ([0.11, 0.3, 0.16, 827.3, 3.98e13], "; over the 3 values before it had grown from 0.16 to 3.98e+13"),
        ([2.3, 5e6, 2.4], "; the last finite value was 2.4"),
        ([0.0, 0.0, 2.4], "; the last finite value was 2.4"),
        ([2.3, 2.2, 9.0], "; the last finite value was 9"),
        ([-2.3, -4e4], "; the last finite value was -4e+04"),
        ([], "; no finite value came before"),
    ],
)
def test_a_loss_that_ran_away_is_told_apart_from_one_that_broke_at_once(before: list[float], said: str) -> None:
    changes, _ = judge({"loss": [*before, math.inf, math.nan]})
    (change,) = fired(changes)
    assert said in change.finding.message
    assert change.finding.fix.startswith("The loss ran away") == ("grown" in said)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_every_value_that_is_no_number_counts(bad: float) -> None:
    changes, _ = judge({"loss": [1.0] * 5 + [bad]})
    assert [change.step for change in fired(changes, "nonfinite_loss")] == [6]


def test_one_nan_is_resolved_after_fifty_finite_steps() -> None:
    changes, _ = judge({"loss": [1.0] * 5 + [math.nan] + [1.0] * 100})
    assert [(change.kind, change.step) for change in changes] == [("fire", 6), ("resolve", 56)]


def test_overflow_that_the_scaler_skipped_is_no_fault() -> None:
    steps = 300
    norms, skipped, scale, now, count = [], [], [], 65536.0, 0.0
    for step in range(steps):
        overflow = step in (0, 1, 2, 150)
        norms.append(math.inf if overflow else 1.0)
        count += overflow
        now = now / 2 if overflow else now
        skipped.append(count)
        scale.append(now)
    series = {"loss": [2.0] * steps, "grad/norm": norms, "grad/nonfinite": [float(n == math.inf) for n in norms]}
    for words in ({"amp/scale": scale, "amp/skipped": skipped}, {"amp/scale": [65536.0, *scale[:-1]]}):
        for rows in (1, 7, 50):
            changes, _ = judge({**series, **words}, rows=rows)
            assert changes == [], (rows, list(words))


def test_non_finite_gradients_that_were_stepped_on_are_a_fault_also_with_a_scaler() -> None:
    norms = [1.0] * 20 + [math.nan] * 5
    changes, _ = judge({"loss": [2.0] * 25, "grad/norm": norms, "amp/scale": [1024.0] * 25, "amp/skipped": [0.0] * 25})
    assert [(change.finding.rule, change.step) for change in fired(changes)] == [("nonfinite_gradient", 21)]


def test_a_scaler_that_skips_every_step_is_a_fault() -> None:
    steps = 60
    changes, _ = judge(
        {
            "loss": [2.0] * steps,
            "grad/norm": [math.inf] * steps,
            "amp/scale": [2.0**16 / 2**step for step in range(steps)],
        },
        rows=5,
    )
    assert [change.finding.rule for change in fired(changes)] == ["nonfinite_gradient"]


def test_a_loss_that_stays_nan_is_a_fault_although_the_scaler_skips() -> None:
    steps = 30
    changes, _ = judge(
        {
            "loss": [2.0] * 10 + [math.nan] * 20,
            "amp/scale": [1024.0] * 10 + [1024.0 / 2**step for step in range(1, 21)],
            "amp/skipped": [0.0] * 10 + [float(step) for step in range(1, 21)],
        },
        rows=steps,
    )
    assert [(change.finding.rule, change.step) for change in fired(changes)] == [("nonfinite_loss", 13)]


@pytest.mark.parametrize("order", ["loss first", "gradient first"])
def test_nan_in_loss_and_gradients_on_many_ranks_in_one_step_is_one_alert(order: str) -> None:
    ranks = 64
    evaluator = make_evaluator(rules=RULES)
    changes = evaluator.take(frame({}, [], events=[state("starting", world_size=ranks)]))
    sick = {"loss": [2.0, math.nan], "grad/norm": [1.0, math.nan], "grad/nonfinite": [0.0, 3.0]}
    only_gradient = {"loss": [2.0], "grad/norm": [1.0], "grad/nonfinite": [0.0]}
    for rank in range(ranks):
        if order == "gradient first" and rank == 0:
            changes += evaluator.take(frame(only_gradient, [1], ident=2))
            changes += evaluator.take(frame({"grad/norm": [math.nan], "grad/nonfinite": [3.0]}, [2], ident=2))
            changes += evaluator.take(frame({"loss": [math.nan]}, [2], ident=2))
        else:
            changes += evaluator.take(frame(sick, [1, 2], rank=rank, ident=2 + rank))
    assert len(fired(changes)) == 1
    assert len({change.alert for change in changes}) == 1
    last = changes[-1].finding
    assert last.rule == "nonfinite_loss"
    assert last.ranks == list(range(ranks))


def test_a_new_attempt_closes_the_old_alerts_and_arms_the_rules_again() -> None:
    evaluator = make_evaluator(rules=RULES)
    changes = evaluator.take(frame({"loss": [1.0, math.nan]}, [1, 2], ident=1))
    changes += evaluator.take(frame({"loss": [1.0, math.nan]}, [1, 2], ident=2, attempt=2))
    assert [change.kind for change in changes] == ["fire", "resolve", "fire"]
    assert changes[0].alert == changes[1].alert != changes[2].alert
    assert evaluator.take(frame({"loss": [math.nan]}, [3], ident=3, attempt=1)) == []


@pytest.mark.parametrize("is_told", [True, False])
def test_a_training_that_follows_another_one_in_its_run_begins_with_no_jump(is_told: bool) -> None:
    draws = random.Random(4)

    def losses() -> list[float]:
        return [0.04 + 2.3 * math.exp(-step / 30) + draws.uniform(0.0, 0.005) for step in range(400)]

    changes, evaluator = judge({"loss": losses()})
    if is_told:
        border = state("running", training_after=400)
        changes += evaluator.take(frame({}, [], ident=evaluator.upto + 1, events=[border]))
    later, _ = judge({"loss": losses()}, first_step=401, evaluator=evaluator)
    assert [change.finding.rule for change in fired([*changes, *later])] == ([] if is_told else ["loss_spike"])
