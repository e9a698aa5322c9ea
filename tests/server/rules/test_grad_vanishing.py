"""grad_vanishing: a family of series, layer beside layer."""

from __future__ import annotations

import pytest
from step_job import StepJob

from perfagent_server.rules.model.grad_vanishing import GradVanishing

ALIVE = {f"blocks.{place}.weight": 0.1 * (1 + place) for place in range(10)}
SICK = {**ALIVE, "first.weight": 3e-9}


def train(norms: dict[str, float], *, steps: int = 80, ranks: int = 1, every: int = 1) -> StepJob:
    named = {f"grad_norm/{layer}": norm for layer, norm in norms.items()}
    job = StepJob(GradVanishing(), ranks=ranks, restarts=9)
    return job.go_on(
        {"step_time_s": [0.1] * steps}, rows=1, measured=dict.fromkeys(range(every, steps + 1, every), named)
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_layers_that_get_next_to_nothing_are_named(ranks: int) -> None:
    job = train({**SICK, "second.weight": 4e-8}, ranks=ranks)
    assert (job.found.rule, job.found.severity) == ("grad_vanishing", "warning")
    assert list(job.found.evidence["layers"]) == ["first.weight", "second.weight"]
    assert (job.found.evidence["vanished"], job.found.evidence["measured"]) == (2, 12)
    assert 21 <= (job.found.since_step or 0) <= 22
    assert job.alert.step <= 43


@pytest.mark.parametrize(
    ("every", "silent", "fires", "since"), [(1, 40, 41, 21), (4, 103, 104, 24), (100, 499, 500, 100)]
)
def test_only_steps_in_which_layers_are_measured_count(every: int, silent: int, fires: int, since: int) -> None:
    """Where they are measured now and then, fewer are enough over more steps."""
    assert train(SICK, every=every, steps=silent).changes == []
    assert train(SICK, every=every, steps=fires).found.since_step == since


def test_depth_that_kills_the_gradient_of_most_layers_is_told() -> None:
    """Thirty sigmoid layers: a tenth is left from one to the next."""
    job = train({f"layers.{depth}.weight": 0.3 * 0.1 ** (30 - depth) for depth in range(30)})
    assert (job.found.severity, job.found.evidence["vanished"]) == ("warning", 22)


@pytest.mark.parametrize(
    ("norms", "named"),
    [
        (ALIVE, []),
        ({**ALIVE, "frozen.weight": 0.0}, []),
        ({layer: 1e-8 * norm for layer, norm in ALIVE.items()}, []),
        ({**ALIVE, "bias": 1e-4}, []),
        ({**ALIVE, "conv.weight": 0.2, "conv.bias": 2e-9}, []),  # a bias before a normalization
        ({**ALIVE, "conv.weight": 3e-9, "conv.bias": 2e-9}, ["conv.bias", "conv.weight"]),
    ],
)
def test_layers_that_are_alike_frozen_or_a_bias_are_healthy(norms: dict[str, float], named: list[str]) -> None:
    assert [list(change.finding.evidence["layers"]) for change in train(norms).fired] == ([named] if named else [])


def test_a_layer_that_comes_to_life_resolves_the_alert() -> None:
    job = StepJob(GradVanishing())
    for step in range(1, 80):
        layers = {**ALIVE, "first.weight": 3e-9 if step < 60 else 0.2}
        job.go_on({f"grad_norm/{layer}": [norm] for layer, norm in layers.items()} | {"step_time_s": [0.1]})
    assert job.kinds == ["fire", "resolve"]
