"""Parameters that stand still, in loops that really train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

STEPS = 80


@pytest.fixture
def every_step(record):
    """A run that measures the gradients of every step."""
    return lambda model: record(model, overhead_budget_pct=1e9)


class TwoParts(nn.Module):
    def __init__(self, *, detach=False, vocabulary=0):
        super().__init__()
        self.detach = detach
        self.encoder = nn.Embedding(vocabulary, 16) if vocabulary else nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.encoder(x)
        return self.head(hidden.detach() if self.detach else hidden)


def train(model, optimizer, steps=STEPS, *, x=None, before=lambda step: None):
    x = torch.randn(8, 16) if x is None else x
    for step in range(steps):
        before(step)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(recorded):
    shares = [share for _, share in recorded.of("update/unmoved_share")]
    return shares, [data for kind, data, _ in recorded.sender.events if kind == "parameters"]


def test_a_model_that_trains_stands_still_nowhere(every_step):
    model = TwoParts()
    recorded = every_step(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    shares, events = told(recorded)
    assert len(shares) == 3
    assert set(shares) == {0.0}
    assert not events


def test_what_no_gradient_reaches_is_named(every_step):
    model = TwoParts(detach=True)
    recorded = every_step(model)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    shares, events = told(recorded)
    share = (16 * 16 + 16) / (16 * 16 + 16 + 17)
    assert shares == pytest.approx([share] * 3)
    assert events[0] == {
        "what": "unmoved", "share": pytest.approx(share), "names": ["encoder.weight", "encoder.bias"], "count": 2, "of": 4,
        "numbers": 272, "without_gradient": 272, "without_rate": 0, "steps": 20,
    }  # fmt: skip


def test_what_has_no_learning_rate_is_named(every_step):
    model = TwoParts()
    recorded = every_step(model)
    groups = [{"params": model.encoder.parameters(), "lr": 0.0}, {"params": model.head.parameters()}]
    train(model, torch.optim.SGD(groups, lr=0.01))
    _, events = told(recorded)
    assert events[0]["without_rate"] == 272
    assert events[0]["without_gradient"] == 0


def test_updates_that_are_rounded_away_are_seen(every_step):
    model = TwoParts().bfloat16()
    nn.init.ones_(model.encoder.weight)
    recorded = every_step(model)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-6), x=torch.randn(8, 16).bfloat16())
    shares, events = told(recorded)
    assert shares[0] > 0.8
    assert "encoder.weight" in events[0]["names"]
    assert events[0]["without_gradient"] == events[0]["without_rate"] == 0


def test_frozen_parameters_do_not_count(every_step):
    model = TwoParts()
    model.encoder.requires_grad_(False)
    recorded = every_step(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert set(told(recorded)[0]) == {0.0}


def test_parameters_that_are_frozen_or_unfrozen_meanwhile_do_not_count(every_step):
    model = TwoParts()
    recorded = every_step(model)
    train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        before=lambda step: model.encoder.requires_grad_(step % 30 < 15),
    )
    assert set(told(recorded)[0]) == {0.0}


def test_what_is_unfrozen_later_counts_from_then_on(every_step):
    model = TwoParts(detach=True)
    recorded = every_step(model)
    model.encoder.requires_grad_(False)

    def unfreeze(step):
        if step == 30:
            model.encoder.requires_grad_(True)

    train(model, torch.optim.SGD(model.parameters(), lr=0.01), steps=100, before=unfreeze)
    shares, _ = told(recorded)
    assert shares[0] == 0.0
    assert shares[-1] > 0.9


def test_rows_of_a_table_of_which_few_occur_do_not_count(every_step):
    model = TwoParts(vocabulary=100_000)
    recorded = every_step(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), x=torch.arange(99_000, 99_008))
    assert set(told(recorded)[0]) == {0.0}


def test_a_small_table_counts_as_any_weight(every_step):
    model = TwoParts(vocabulary=50, detach=True)
    recorded = every_step(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), x=torch.arange(8))
    assert told(recorded)[0][0] == pytest.approx(800 / 817)


def test_the_zeros_of_lora_move_soon_enough(every_step):
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.zeros(4, 16))

        def forward(self, x):
            return self.base(x) + x @ self.a @ self.b

    model = Adapter()
    recorded = every_step(model)
    train(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01))
    assert set(told(recorded)[0]) == {0.0}


def test_that_it_is_over_is_told_as_well(every_step):
    model = TwoParts(detach=True)
    recorded = every_step(model)

    def thaw(step):
        model.detach = step < 45

    train(model, torch.optim.SGD(model.parameters(), lr=0.01), before=thaw)
    shares, events = told(recorded)
    assert shares[0] > 0.9
    assert shares[-1] == 0.0
    assert [round(event["share"], 2) for event in events] == [0.94, 0.94, 0.0]


def test_losses_are_the_same_bit_by_bit(every_step):
    def losses(watch):
        torch.manual_seed(0)
        model = TwoParts()
        recorded = every_step(model) if watch else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = []
        for _ in range(STEPS):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if recorded is not None:
            assert told(recorded)[0]
        return found

    assert losses(True) == losses(False)
