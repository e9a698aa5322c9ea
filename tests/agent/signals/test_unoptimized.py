"""Parameters that receive gradients and that no optimizer has, in loops that really train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from perfagent.signals.unoptimized import LEAST_STEPS, Unoptimized

STEPS = 60


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


class Search:
    """The search of a recorded run, polled after each step."""

    def __init__(self, recorded, model):
        self.now = 0.0
        run = recorded.run
        self.of = Unoptimized(run._progress, run._investigator.add, lambda: model, lambda: self.now, lambda: 0.0)
        self.recorded = recorded

    def after_step(self):
        self.now += 1.0
        self.of.poll()

    def told(self):
        shares = [share for _, share in self.recorded.of("params/unoptimized_share")]
        return shares, [data for kind, data, _ in self.recorded.sender.events if kind == "parameters"]


def train(model, *optimizers, search=None, steps=STEPS, after=lambda step: None, clear=True):
    x = torch.randn(8, 16)
    for step in range(steps):
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        if clear:
            model.zero_grad()
        after(step)
        search.after_step()


@pytest.fixture
def searching(record):
    def start(model):
        return Search(record(model), model)

    return start


@pytest.mark.parametrize("clear", [True, False])
def test_what_the_optimizer_was_not_given_is_named(searching, clear):
    model = TwoParts()
    search = searching(model)
    train(model, torch.optim.SGD(model.head.parameters(), lr=1e-4), search=search, clear=clear)
    shares, events = search.told()
    share = 272 / (272 + 17)
    assert shares[0] == pytest.approx(share)
    assert events[0] == {
        "what": "unoptimized", "share": pytest.approx(share), "names": ["encoder.weight", "encoder.bias"], "count": 2,
        "numbers": 272, "steps": LEAST_STEPS,
    }  # fmt: skip


def test_a_model_whose_optimizer_has_all_of_it_is_silent(searching):
    model = TwoParts()
    search = searching(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), search=search)
    shares, events = search.told()
    assert set(shares) == {0.0}
    assert not events


def test_parameters_whose_memory_is_freed_are_left_alone(searching):
    """FSDP2 does so with those that it has gathered, and the model may hold them at the moment of a look."""
    model = TwoParts()
    model.gathered = nn.Parameter(torch.randn(256))
    search = searching(model)
    model.gathered.untyped_storage().resize_(0)
    train(model, torch.optim.SGD([*model.encoder.parameters(), *model.head.parameters()], lr=0.1), search=search)
    assert search.told() == ([0.0, 0.0], [])


def test_what_is_frozen_is_silent(searching):
    model = TwoParts()
    model.encoder.requires_grad_(False)
    search = searching(model)
    train(model, torch.optim.SGD(model.head.parameters(), lr=0.01), search=search)
    assert set(search.told()[0]) == {0.0}


def test_two_optimizers_of_one_model_are_silent(searching):
    model = TwoParts()
    search = searching(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.encoder, model.head)]
    train(model, *optimizers, search=search)
    assert set(search.told()[0]) == {0.0}


def test_an_optimizer_whose_turn_has_not_come_is_found(searching):
    model = TwoParts()
    search = searching(model)
    later = torch.optim.SGD(model.head.parameters(), lr=0.01)
    train(model, torch.optim.SGD(model.encoder.parameters(), lr=0.01), search=search)
    assert set(search.told()[0]) == {0.0}
    assert search.of._searches == 1, "what an optimizer has is remembered"
    del later


def test_a_group_that_is_added_later_heals_it(searching):
    model = TwoParts()
    search = searching(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-4)

    def after(step):
        if step == 40:
            optimizer.add_param_group({"params": model.encoder.parameters()})

    train(model, optimizer, search=search, after=after, steps=120)
    shares, events = search.told()
    assert shares[0] > 0.9
    assert shares[-1] == 0.0
    assert [event["share"] > 0 for event in events] == [True, False]


def test_what_the_loop_moves_by_hand_is_silent(searching):
    model = TwoParts()
    search = searching(model)

    def after(_step):
        for parameter in model.encoder.parameters():
            parameter.data -= 1e-3

    train(model, torch.optim.SGD(model.head.parameters(), lr=0.01), search=search, after=after)
    assert set(search.told()[0]) == {0.0}


def test_gradients_that_are_left_over_are_no_gradients(searching):
    """A layer that a first stage trained, and that is detached now."""
    model = TwoParts()
    search = searching(model)
    model(torch.randn(8, 16)).square().mean().backward()

    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    x = torch.randn(8, 16)
    for _ in range(STEPS):
        model.head(model.encoder(x).detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        search.after_step()
    assert set(search.told()[0]) == {0.0}


def test_an_optimizer_of_other_tensors_says_nothing(searching):
    """fp32 copies of a model in half precision."""
    model = TwoParts()
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    search = searching(model)
    optimizer = torch.optim.SGD(copies, lr=0.01)

    def after(_step):
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.grad = torch.ones_like(parameter)

    train(model, optimizer, search=search, after=after)
    assert search.told() == ([], [])


def test_a_run_asks_by_itself(record):
    model = TwoParts()
    recorded = record(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-4)
    x = torch.randn(8, 16)
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        recorded.run._look()
    assert recorded.of("params/unoptimized_share")[0][1] > 0.9
    assert recorded.run._progress.boundary is None


@pytest.mark.parametrize("how", ["replaced", "cleared"])
def test_an_optimizer_whose_parameters_get_no_gradient_is_told_of_once(searching, how):
    model = TwoParts()
    search = searching(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trained = TwoParts() if how == "replaced" else model
    for _ in range(STEPS):
        trained(torch.randn(8, 16)).square().mean().backward()
        if how == "cleared":
            optimizer.zero_grad()
        optimizer.step()
        search.after_step()
    _, events = search.told()
    assert events == [{"what": "without_gradient", "share": 1.0, "numbers": 289, "steps": LEAST_STEPS}]


def test_gradients_that_come_again_are_told_of(searching):
    model = TwoParts()
    search = searching(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model(torch.randn(8, 16)).square().mean().backward()
        if step < STEPS // 2:
            optimizer.zero_grad()
        optimizer.step()
        search.after_step()
    assert [told["share"] for told in search.told()[1] if told["what"] == "without_gradient"] == [1.0, 0.0]
