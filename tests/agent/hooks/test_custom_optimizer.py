"""Optimizers whose class is none of torch's."""

from __future__ import annotations

import pytest
import torch
from agent.hooks.loops import numbered, small
from truth import norm_of

RATE = 0.1


class Homemade:
    """A class of the script's own, as in lectures."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": RATE}]

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= RATE * parameter.grad

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class WithoutSuper(torch.optim.Optimizer):
    """Derived from torch's, whose `__init__` it does not call: torch's hooks are in there."""

    def __init__(self, parameters):
        self.param_groups, self.state, self.defaults = [{"params": list(parameters), "lr": RATE}], {}, {}

    step, zero_grad = Homemade.step, Homemade.zero_grad


def train(model, optimizer, steps):
    """Loss and norm of each step."""
    told = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        told.append((loss.item(), norm_of(model.parameters())))
        optimizer.step()
        if hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad()
    return told


def agrees(recorded, told):
    assert recorded.series("loss") == {n: loss for n, (loss, _) in enumerate(told, 1)}
    assert recorded.series("grad/norm") == numbered(norm for _, norm in told)
    assert {rate for _, rate in recorded.of("lr")} == {RATE}
    assert recorded.numbers("phase/optimizer_s") == [*range(1, len(told) + 1)]
    assert recorded.numbers("phase/forward_s") == [*range(2, len(told) + 1)]


@pytest.mark.parametrize("kind", [Homemade, WithoutSuper])
def test_one_that_the_user_names_counts(every_step, kind):
    original = kind.step
    for _ in range(2):  # what the first run puts in it takes out again
        model = small()
        optimizer = kind(model.parameters())
        agrees(every_step(model, optimizer), train(model, optimizer, 6))
        assert kind.step is original
