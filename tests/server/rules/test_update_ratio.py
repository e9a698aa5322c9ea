"""update_ratio: measured now and then, of the model and of its layers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from judging import START, fired, frame, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.model.update_ratio import UpdateRatio

RULES = (UpdateRatio(),)
Measured = Mapping[int, Mapping[str, float]]
"""step -> layer -> ratio; "" for the model"""
FLAT = [2.3 + 0.01 * (step % 3) for step in range(800)]
LEARNING = [2.3 * math.exp(-step / 150) + 0.1 for step in range(800)]


def train(
    measured: Measured, *, losses: Sequence[float] = FLAT, rates: Sequence[float] | None = None, steps: int = 800
) -> list[Change]:
    evaluator = make_evaluator(rules=RULES)
    evaluator.start_clock(START)
    changes: list[Change] = []
    for step in range(1, steps + 1):
        columns = {"loss": [losses[step - 1]], "lr": [1e-3 if rates is None else rates[step - 1]]}
        columns |= {
            f"update_ratio/{layer}" if layer else "update/ratio": [ratio]
            for layer, ratio in measured.get(step, {}).items()
        }
        changes += evaluator.take(frame(columns, [step], ident=step, received=START + step))
        changes += evaluator.tick(START + step)
        evaluator = restored(evaluator) if step % 150 == 0 else evaluator
    return changes


def test_steps_as_large_as_the_weights_are_a_warning() -> None:
    changes = train({300: {"": 12.0}, 500: {"": 15.0}}, losses=LEARNING)
    assert [one.step for one in fired(changes)] == [300]
    assert {one.finding.severity for one in changes if one.step >= 500} == {"warning"}


def test_a_ratio_that_is_too_high_is_a_warning_where_the_loss_stands_still() -> None:
    [change] = fired(train({9: {"": 0.42}}))
    assert (change.finding.severity, change.finding.cause) == ("warning", "")
    assert 200 <= change.step <= 211
    assert change.finding.title == "A step changes the weights by 42 % of themselves"
    [remark] = fired(train({9: {"": 0.12}, 300: {"": 0.11}}, losses=LEARNING))
    assert (remark.step, remark.finding.severity) == (300, "info")


def test_the_losses_of_a_gan_stand_still_while_it_learns() -> None:
    """At ln 2 the discriminator cannot tell."""
    rng = random.Random(3)
    losses = [math.log(2) + rng.gauss(0, 0.02) for _ in range(800)]
    changes = train({step: {"": 0.06} for step in (9, 300, 500)}, losses=losses)
    assert {one.finding.severity for one in changes} == {"info"}


def test_such_steps_are_a_warning_where_the_loss_stands_above_the_first() -> None:
    changes = train({step: {"": 0.06} for step in (9, 300, 500)}, losses=[2.3, *[2.9 + one for one in FLAT[1:]]])
    assert "warning" in {one.finding.severity for one in changes}


def test_a_layer_that_moves_by_multiples_of_itself_is_named() -> None:
    ratios = {"body": 1e-3, "head": 30.0}
    [change] = fired(train(dict.fromkeys((20, 300, 500), ratios)))
    assert (change.step, change.finding.cause) == (500, "one layer")
    assert change.finding.title == "head changes by more than 10 times itself in a step"


def test_changes_of_next_to_nothing_are_a_warning() -> None:
    found = fired(train({step: {"": 3e-9, "a": 2e-9, "b": 4e-9} for step in (300, 500)}))
    assert [(one.step, one.finding.cause) for one in found] == [(500, "small")]


def rl_losses() -> list[float]:
    rng = random.Random(2)
    return [math.exp(rng.gauss(0, 0.8)) for _ in range(800)]


@pytest.mark.parametrize(
    ("measured", "more"),
    [
        ({step: {"": 2e-3, "a": 1e-3} for step in (20, 200, 400)}, {}),
        ({20: {"a": 50.0}, 60: {"a": 20.0}, 300: {"a": 0.5}, 500: {"a": 0.1}}, {}),
        ({step: {"": 1e-9} for step in (400, 600)}, {"rates": [1e-3] * 350 + [1e-7] * 450}),
        ({step: {"": 0.0, "a": 0.0} for step in (300, 500)}, {}),
        ({9: {"": 0.15}}, {"losses": rl_losses()}),
        ({9: {"": 0.15}}, {"losses": LEARNING}),
    ],
    ids=["usual", "begins at zero", "the end of a schedule", "frozen", "reinforcement learning", "learns"],
)
def test_healthy_ratios_are_silent(measured: Measured, more: dict[str, Sequence[float]]) -> None:
    assert train(measured, **more) == []
