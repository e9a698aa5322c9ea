"""grad_vanishing: a family of series, layer beside layer."""

from __future__ import annotations

import pytest
from judging import fired, frame, make_evaluator, restored, state

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.model.grad_vanishing import GradVanishing


def train(
    norms: dict[str, float], *, steps: int = 80, ranks: int = 1, every: int = 1, zero_until: int = 0
) -> list[Change]:
    evaluator = make_evaluator(rules=(GradVanishing(),))
    changes: list[Change] = []
    for rank in range(ranks):
        changes += evaluator.take(
            frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)])
        )
    for step in range(1, steps + 1):
        for rank in range(ranks):
            columns = {f"grad_norm/{layer}": [norm] for layer, norm in norms.items()} if step % every == 0 else {}
            if step <= zero_until:
                columns = {key: [0.0] for key in columns}
            columns["step_time_s"] = [0.1]
            changes += evaluator.take(frame(columns, [step], rank=rank, ident=evaluator.upto + 1))
        if step % 9 == 0:
            evaluator = restored(evaluator)
    return changes


ALIVE = {f"blocks.{place}.weight": 0.1 * (1 + place) for place in range(10)}


@pytest.mark.parametrize("ranks", [1, 4])
def test_layers_that_get_next_to_nothing_are_named(ranks: int) -> None:
    [change] = fired(train({**ALIVE, "first.weight": 3e-9, "second.weight": 4e-8}, ranks=ranks))
    found = change.finding
    assert found.rule == "grad_vanishing"
    assert found.title == "2 of 12 layers get next to no gradient"
    assert "first.weight, second.weight" in found.message
    assert 21 <= (found.since_step or 0) <= 22
    assert change.step <= 43


def test_of_steps_in_which_nothing_is_measured_none_is_counted() -> None:
    assert train({**ALIVE, "first.weight": 3e-9}, every=4, steps=90) == []
    assert len(fired(train({**ALIVE, "first.weight": 3e-9}, every=4, steps=110))) == 1


def test_where_layers_are_measured_now_and_then_fewer_steps_are_enough() -> None:
    assert train({**ALIVE, "first.weight": 3e-9}, every=10, steps=120) == []
    [change] = fired(train({**ALIVE, "first.weight": 3e-9}, every=10, steps=140))
    assert change.finding.since_step == 30


@pytest.mark.parametrize(
    "norms",
    [
        ALIVE,
        {**ALIVE, "frozen.weight": 0.0},
        {layer: 1e-8 * norm for layer, norm in ALIVE.items()},
        {**ALIVE, "bias": 1e-4},
    ],
    ids=["alive", "exactly zero", "all as small", "small"],
)
def test_healthy_layers_are_silent(norms: dict[str, float]) -> None:
    assert train(norms) == []


def test_a_layer_that_comes_to_life_resolves_the_alert() -> None:
    evaluator = make_evaluator(rules=(GradVanishing(),))
    changes: list[Change] = []
    for step in range(1, 80):
        norms = {**ALIVE, "first.weight": 3e-9 if step < 60 else 0.2}
        columns = {f"grad_norm/{layer}": [norm] for layer, norm in norms.items()} | {"step_time_s": [0.1]}
        changes += evaluator.take(frame(columns, [step], ident=evaluator.upto + 1))
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]


def test_a_bias_that_a_normalization_makes_needless_is_no_layer_without_gradient() -> None:
    norms = {**ALIVE, "conv.weight": 0.2, "conv.bias": 2e-9}
    assert train(norms) == []
    [change] = fired(train({**norms, "conv.weight": 3e-9}))
    assert "2 of 12 layers" in change.finding.title
