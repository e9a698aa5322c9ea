"""Parameters that receive gradients and that no optimizer has, in loops that really train."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from two_parts import TwoParts

from perfagent.boundary import guard
from perfagent.measure.uncleared import Uncleared
from perfagent.probes.unoptimized import LEAST_STEPS, Unoptimized

STEPS = 60


class Search:
    """The search of a recorded run, polled after each step, a second apart."""

    def __init__(self, recorded, model):
        self.now, self.recorded, p = 0.0, recorded, recorded.progress
        self.of = Unoptimized(p, p.links.investigator.add, lambda: model, lambda: self.now, lambda: 0.0)

    def after_step(self):
        self.now += 1.0
        self.of.poll()

    def shares(self):
        return [share for _, share in self.recorded.of("params/unoptimized_share")]

    def events(self, *, uncleared=False):
        return [one for one in self.recorded.events("parameters") if (one["what"] == "uncleared") == uncleared]


@pytest.fixture
def searching(record):
    return lambda model: Search(record(model), model)


def train(model, *optimizers, search, steps=STEPS, after=lambda step: None, clear="at the end", forward=None):
    x = torch.randn(8, 16)
    for step in range(steps):
        (forward or model)(x).square().mean().backward()
        if clear == "before the step":
            model.zero_grad()
        for optimizer in optimizers:
            optimizer.step()
        if clear == "at the end":
            model.zero_grad()
        after(step)
        search.after_step()


def sgd(module, lr=1e-4):
    return torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=lr)


@pytest.mark.parametrize("clear", ["at the end", "never"])
def test_what_the_optimizer_was_not_given_is_named(searching, clear):
    model = TwoParts()
    search = searching(model)
    train(model, sgd(model.head), search=search, clear=clear)
    share = pytest.approx(272 / (272 + 17))
    assert search.shares()[0] == share
    assert search.events()[0] == {
        "what": "unoptimized", "share": share, "names": ["encoder.weight", "encoder.bias"], "count": 2,
        "numbers": 272, "steps": LEAST_STEPS,
    }  # fmt: skip


def whole(model):
    return {"optimizers": [sgd(model)]}


def frozen(model):
    model.encoder.requires_grad_(False)
    return {"optimizers": [sgd(model.head)]}


def two_optimizers(model):
    return {"optimizers": [sgd(model.encoder), sgd(model.head)]}


def one_that_waits(model):
    return {"optimizers": [sgd(model.encoder)], "waits": sgd(model.head)}


@pytest.mark.parametrize("setup", [whole, frozen, two_optimizers, one_that_waits])
def test_a_model_that_is_trained_as_it_was_meant_is_silent(searching, setup):
    model = TwoParts()
    search, options = searching(model), setup(model)
    waits = options.pop("waits", None)
    train(model, *options.pop("optimizers"), search=search, **options)
    assert set(search.shares()) == {0.0}
    assert not search.events()
    del waits


def test_a_group_that_is_added_later_heals_it(searching):
    model = TwoParts()
    search, optimizer = searching(model), sgd(model.head)

    def after(step):
        if step == 40:
            optimizer.add_param_group({"params": model.encoder.parameters()})

    train(model, optimizer, search=search, after=after, steps=120)
    shares = search.shares()
    assert shares[0] > 0.9
    assert shares[-1] == 0.0
    assert [event["share"] > 0 for event in search.events()] == [True, False]


def test_a_run_asks_by_itself(record):
    model = TwoParts()
    recorded = record(model)
    optimizer = sgd(model.head)
    for _ in range(STEPS):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        recorded.tick()
    assert recorded.of("params/unoptimized_share")[0][1] > 0.9
    assert recorded.progress.boundary is None


@pytest.mark.parametrize("replaced", [True, False])
def test_optimizer_without_gradients_is_told_once(searching, replaced):
    """The model was replaced, or its gradients are cleared at the wrong moment."""
    model = TwoParts()
    search, trained = searching(model), TwoParts() if replaced else model
    train(trained, sgd(model), search=search, clear="never" if replaced else "before the step")
    assert search.events() == [{"what": "without_gradient", "share": 1.0, "numbers": 289, "steps": LEAST_STEPS}]


def zeroed_by_hand(model, step):
    for one in model.parameters():
        one.grad.data.zero_()


CLEARS = {
    "never": (lambda model, step: None, 1),
    "every 20 steps": (lambda model, step: model.zero_grad() if step % 20 == 19 else None, 1),
    "set to none": (lambda model, step: model.zero_grad(), 0),
    "set to zero": (lambda model, step: model.zero_grad(set_to_none=False), 0),
    "past autograd": (zeroed_by_hand, 0),
    "only the largest": (lambda model, step: setattr(model.encoder.weight, "grad", None), 1),
}


@pytest.mark.parametrize(("clears", "count"), CLEARS.values(), ids=CLEARS.keys())
def test_gradients_that_nobody_clears_are_told(searching, clears, count):
    model = TwoParts()
    search = searching(model)
    train(model, sgd(model), search=search, clear="never", after=lambda step: clears(model, step))
    found = search.events(uncleared=True)
    assert [(one["share"], one["steps"]) for one in found[:1]] == [(1.0, 3)] * count


@pytest.mark.parametrize("in_place", [True, False])
def test_two_that_train_in_turn_clear_their_gradients(searching, in_place):
    """Each one's gradients are still there when backward begins for the other."""
    ours, others = TwoParts(), TwoParts()
    search, optimizers = searching(ours), (sgd(ours), sgd(others))
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not in_place)
            (ours(torch.randn(8, 16)) - others(torch.randn(8, 16))).square().mean().backward()
            optimizer.step()
        search.after_step()
    assert search.events(uncleared=True) == []


LARGE = torch.nn.Parameter(torch.zeros(2**20 + 1))
LARGE.grad = torch.ones_like(LARGE)


@pytest.mark.parametrize("group", [{"params": [LARGE]}, {"params": [torch.ones(2)]}, {}])
def test_where_no_gradient_can_be_looked_at_it_ends(record, group):
    """Too large, none, or an optimizer that fails."""
    progress = record(TwoParts()).progress
    optimizer = SimpleNamespace(param_groups=[group])
    progress.selection = SimpleNamespace(primary=optimizer)
    look = Uncleared(progress)
    assert (look.at_boundary(), look.over, look.fruitless) == (False, True, bool(group))
    assert [*guard.failures.values()] == [1] * (not group)
    guard.reset()
