"""Parameters that stand still, in loops that really train."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from two_parts import TwoParts

STEPS = 80


@pytest.fixture
def every_step(record):
    """A run that measures the gradients of every step."""
    return lambda model: record(model, overhead_budget_pct=1e9)


def train(model, optimizer=None, steps=STEPS, *, x=None, before=lambda step: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    x, losses = torch.randn(8, 16) if x is None else x, []
    for step in range(steps):
        before(step)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shares(recorded):
    return [share for _, share in recorded.of("update/unmoved_share")]


def without_gradient():
    model = TwoParts(detach=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(8, 16)


def without_rate():
    model = TwoParts()
    groups = [{"params": model.encoder.parameters(), "lr": 0.0}, {"params": model.head.parameters()}]
    return model, torch.optim.SGD(groups, lr=0.01), torch.randn(8, 16)


def rounded_away():
    model = TwoParts().bfloat16()
    nn.init.ones_(model.encoder.weight)
    model.encoder.bias.requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6), torch.randn(8, 16).bfloat16()


@pytest.mark.parametrize(
    ("setup", "numbers", "why"),
    [(without_gradient, 272, (272, 0)), (without_rate, 272, (0, 272)), (rounded_away, 256, (0, 0))],
)
def test_what_does_not_move_is_named_with_the_reason(every_step, setup, numbers, why):
    model, optimizer, x = setup()
    recorded = every_step(model)
    train(model, optimizer, x=x)
    recorded.finish()
    told = recorded.events("parameters")[0]
    trainable = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert shares(recorded) == [pytest.approx(told["numbers"] / trainable)] * 3
    assert told["numbers"] >= numbers and told["names"][0] == "encoder.weight"
    assert (told["what"], told["without_gradient"], told["without_rate"], told["steps"]) == ("unmoved", *why, 20)


class Adapter(nn.Module):
    """The zeros of LoRA's second matrix move soon enough."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.zeros(4, 16))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def frozen():
    model = TwoParts()
    model.encoder.requires_grad_(False)
    return model


HEALTHY = {
    "all of it trains": (TwoParts, {}),
    "frozen": (frozen, {}),
    "frozen and unfrozen meanwhile": (TwoParts, {"freeze": lambda step: step % 30 >= 15}),
    "rows of a table of which few occur": (lambda: TwoParts(vocabulary=100_000), {"x": torch.arange(99_000, 99_008)}),
    "LoRA": (Adapter, {}),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_model_that_trains_stands_still_nowhere(every_step, kind):
    make, options = HEALTHY[kind]
    model, freeze = make(), options.get("freeze")
    recorded = every_step(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)
    train(
        model, optimizer, x=options.get("x"),
        before=lambda step: freeze and model.encoder.requires_grad_(not freeze(step)),
    )  # fmt: skip
    assert set(shares(recorded)) == {0.0}
    assert not recorded.events("parameters")


def test_that_it_is_over_is_told_as_well(every_step):
    model = TwoParts(detach=True)
    recorded = every_step(model)
    train(model, before=lambda step: setattr(model, "detach", step < 45))
    told = shares(recorded)
    assert told[0] > 0.9
    assert told[-1] == 0.0
    assert [round(event["share"], 2) for event in recorded.events("parameters")] == [0.94, 0.94, 0.0]
