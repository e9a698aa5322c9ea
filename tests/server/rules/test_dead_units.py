"""dead_units: measured now and then, and healthy where the network is sparse by design."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from judging import START, fired, frame, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.model.dead_units import DeadUnits

RULES = (DeadUnits(),)
Measured = Mapping[int, Mapping[str, float]]
"""step -> layer -> share of dead units"""


def train(measured: Measured, *, steps: int = 600, losses: Sequence[float] | None = None) -> list[Change]:
    """losses: by default those of a run that does not learn."""
    evaluator = make_evaluator(rules=RULES)
    evaluator.start_clock(START)
    changes: list[Change] = []
    for step in range(1, steps + 1):
        columns = {"loss": [2.3 if losses is None else losses[step - 1]]}
        columns |= {f"dead_share/{layer}": [share] for layer, share in measured.get(step, {}).items()}
        received = START + step
        changes += evaluator.take(frame(columns, [step], ident=step, received=received))
        changes += evaluator.tick(received)
        evaluator = restored(evaluator) if step % 150 == 0 else evaluator
    return changes


LEARNING = [2.3 * math.exp(-step / 150) + 0.1 for step in range(600)]


def test_half_of_a_layer_in_two_measurements_is_a_warning_where_nothing_is_learned() -> None:
    [change] = fired(train({20: {"a": 0.1, "b": 0.4}, 200: {"a": 0.0, "b": 0.6}, 400: {"a": 0.1, "b": 0.7}}))
    found = change.finding
    assert (change.step, found.severity, found.cause) == (400, "warning", "")
    assert found.title == "70 % of the units of b are dead"
    assert "100 % of the first loss is left" in found.message


def test_one_measurement_of_nearly_all_is_enough_once_the_loss_should_have_moved() -> None:
    [change] = fired(train({11: {"relu": 0.95}}))
    assert 100 <= change.step <= 111
    assert change.finding.severity == "warning"
    assert change.finding.cause == "from the start"


def test_a_layer_without_a_living_unit_is_told_at_once() -> None:
    changes = train({11: {"relu": 1.0}}, losses=LEARNING)
    assert fired(changes)[0].step == 11
    assert fired(changes)[0].finding.severity == "warning"


def test_a_sparse_network_that_learns_is_only_remarked() -> None:
    measured = {step: {"encoder.relu": 0.95} for step in (11, 250, 500)}
    severities = {one.finding.severity for one in train({**measured, 11: {"encoder.relu": 0.1}}, losses=LEARNING)}
    assert severities == {"info"}


def falling(first: float, last: float, noise: float = 0.03) -> list[float]:
    draw = random.Random(0)
    return [last + (first - last) * math.exp(-step / 250) + draw.gauss(0, noise) for step in range(600)]


@pytest.mark.parametrize("share", [0.6, 0.93])
def test_a_pretrained_network_that_was_sparse_before_is_only_remarked(share: float) -> None:
    measured = {step: {"relu": share + 0.01 * (step % 3)} for step in (11, 200, 400)}
    assert {one.finding.severity for one in train(measured, losses=falling(2.2, 1.8))} == {"info"}


def test_units_that_die_in_a_fine_tuning_are_a_warning() -> None:
    measured = {11: {"relu": 0.3}, 200: {"relu": 0.6}, 400: {"relu": 0.7}}
    [change] = fired(train(measured, losses=falling(2.2, 1.8)))
    assert (change.step, change.finding.severity, change.finding.cause) == (400, "warning", "")


def test_units_that_were_dead_before_are_a_warning_where_the_loss_stands_still() -> None:
    changes = train({step: {"relu": 0.6} for step in (11, 200, 400)}, losses=falling(2.3, 2.3))
    assert (fired(changes)[0].finding.severity, changes[-1].finding.severity) == ("info", "warning")
    assert changes[-1].finding.cause == "from the start"


@pytest.mark.parametrize(
    "measured",
    [
        {20: {"a": 0.3}, 200: {"a": 0.45}, 400: {"a": 0.4}},
        {3: {"a": 0.98}, 200: {"a": 0.1}},
        {200: {"a": 0.7}},
        {200: {"a": 0.7}, 300: {"b": 0.7}, 400: {"a": 0.2}},
        {step: {"layers.3.experts.17.act": 1.0, "moe.1.relu": 0.97} for step in (20, 200, 400)},
    ],
    ids=["few", "only in the first steps", "once", "not in a row", "experts that got no token"],
)
def test_healthy_layers_are_silent(measured: Measured) -> None:
    assert train(measured) == []


def test_units_that_live_again_resolve_the_alert() -> None:
    changes = train({150: {"a": 0.95}, 300: {"a": 0.3}})
    assert [one.kind for one in changes] == ["fire", "resolve"]
    assert changes[-1].step == 300


def test_what_the_loss_is_worth_is_not_guessed() -> None:
    """A loss below zero has no share that is left."""
    changes = train({20: {"a": 0.6}, 200: {"a": 0.7}}, losses=[-0.1] * 600)
    assert {one.finding.severity for one in changes} == {"info"}
