"""Steps that are given a closure: what is told of a step is of the weights it begins at, as its loss is."""

from __future__ import annotations

import math

import pytest
import torch
from agent.hooks.loops import about, numbered, sgd
from torch import nn
from truth import norm_of

NAP_S = 0.02


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def lbfgs(model) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


def trained(model, optimizer, *, clip=None, windows=1, by_name=False, steps=4) -> list[list[tuple[float, float]]]:
    """For each step loss and norm of each evaluation."""
    torch.manual_seed(1)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    told = []
    for _ in range(steps):
        seen: list[tuple[float, float]] = []

        def closure(seen=seen):
            optimizer.zero_grad()
            losses = []
            for part, target in zip(x.chunk(windows), y.chunk(windows), strict=True):
                loss = 20 * (model(part) - target).square().mean() / windows
                loss.backward()
                losses.append(loss.item())
            seen.append((math.fsum(losses), norm_of(model.parameters())))
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            return loss

        answer = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert windows > 1 or answer is None or answer.item() == seen[0][0]
        told.append(seen)
    return told


def assert_told(recorded, seen, *, losses=True) -> None:
    """Loss and norm of each step are those of its first evaluation."""
    assert recorded.series("grad/norm") == numbered(step[0][1] for step in seen)
    if losses:
        assert [loss for _, loss in recorded.of("loss")] == [step[0][0] for step in seen]


@pytest.mark.parametrize("watched", ["every_step", "seldom"])
@pytest.mark.parametrize(("clip", "by_name"), [(None, False), ("norm", True), ("value", False)])
def test_norm_and_loss_are_of_the_same_weights(request, watched, clip, by_name):
    model = small()
    recorded = request.getfixturevalue(watched)(model)
    seen = trained(model, lbfgs(model), clip=clip, by_name=by_name)
    assert all(len(step) > 1 for step in seen)
    if watched == "seldom" and clip != "norm":
        assert recorded.of("grad/norm") == []
    else:
        assert_told(recorded, seen)


def test_micro_batches_inside_of_a_closure_are_one_gradient(every_step):
    model = small()
    recorded = every_step(model)
    assert_told(recorded, trained(model, sgd(model, lr=1e-3), windows=4), losses=False)
    assert recorded.of("update/ratio"), "the closure returns before a weight is moved"


def test_what_is_done_in_a_closure_is_no_optimizer_time(clock, record):
    class Slow(nn.Linear):
        def forward(self, x):
            clock.sleep(NAP_S)
            out = super().forward(x)
            out.register_hook(lambda _gradient: clock.sleep(2 * NAP_S))
            return out

    model = Slow(4, 1)
    optimizer = sgd(model)
    recorded = record(model, optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        with recorded.run.phase("rewards"):
            clock.sleep(3 * NAP_S)

    for _ in range(5):
        optimizer.step(closure)
    for name, naps in (("forward", 1), ("backward", 2), ("rewards", 3), ("optimizer", 0)):
        seconds = recorded.series(f"phase/{name}_s")
        assert all(about(seconds[number], naps * NAP_S) for number in range(2, 6)), name
