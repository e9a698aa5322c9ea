"""Parameters that do not train, in loops that really do: without an optimizer, without gradients, standing still."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from two_parts import TwoParts

from perfagent.boundary import guard
from perfagent.measure.untrained import LEAST_STEPS
from perfagent.probes.untrained import UntrainedReport

STEPS = 60
UNPOLLED = SimpleNamespace(after_step=lambda: None)


class Search:
    """The looks of a recorded run, polled after each step, ten seconds apart."""

    def __init__(self, recorded, model):
        self.now, self.recorded, p = 0.0, recorded, recorded.progress
        self.of = UntrainedReport(p, p.links.investigator.add, lambda: model, lambda: self.now)

    def after_step(self):
        self.now += 10.0
        self.of.poll()

    def shares(self, name="params/unoptimized_share"):
        return [share for _, share in self.recorded.of(name)]

    def events(self, *what):
        return [one for one in self.recorded.events("parameters") if one["what"] in what]


@pytest.fixture
def searching(record):
    return lambda model: Search(record(model), model)


def train(
    model,
    *optimizers,
    search,
    steps=STEPS,
    x=None,
    before=lambda step: None,
    after=lambda step: None,
    clear="at the end",
):
    x = torch.randn(8, 16) if x is None else x
    for step in range(steps):
        before(step)
        model(x).square().mean().backward()
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
    assert search.events("unoptimized")[0] == {
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


def partly_by_hand(model):
    @torch.no_grad()
    def after(step):
        model.encoder.weight.mul_(0.99)
        model.encoder.bias.mul_(0.99)

    return {"optimizers": [sgd(model.head)], "after": after}


@pytest.mark.parametrize("setup", [whole, frozen, two_optimizers, one_that_waits, partly_by_hand])
def test_a_model_that_is_trained_as_it_was_meant_is_silent(searching, setup):
    model = TwoParts()
    search, options = searching(model), setup(model)
    waits = options.pop("waits", None)
    train(model, *options.pop("optimizers"), search=search, **options)
    assert set(search.shares()) == {0.0}
    assert not search.events("unoptimized")
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
    assert [event["share"] > 0 for event in search.events("unoptimized")] == [True, False]


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
    (told,) = search.events("without_gradient")
    assert (told["share"], told["numbers"]) == (1.0, 289)
    assert told["steps"] >= LEAST_STEPS


def test_a_run_shorter_than_a_look_hears_of_it(searching):
    model = TwoParts()
    search, optimizer = searching(model), sgd(model)
    train(TwoParts(), optimizer, search=UNPOLLED, steps=LEAST_STEPS)
    search.after_step()
    assert search.shares("update/unmoved_share") == []
    assert [told["share"] for told in search.events("without_gradient")] == [1.0]


def test_it_is_polled_soon_while_it_may_be_so(everything):
    model = TwoParts()
    search, optimizer = Search(everything(model), model), sgd(model)
    train(model, optimizer, search=search, steps=4 * LEAST_STEPS)
    assert search.of.poll() != search.now
    train(TwoParts(), optimizer, search=UNPOLLED, steps=LEAST_STEPS // 2)
    assert search.of.poll() == search.now


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
    found = search.events("uncleared")
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
    assert search.events("uncleared") == []


def test_only_the_first_rank_tells_of_optimizers(searching):
    model = TwoParts()
    search = searching(model)
    search.recorded.progress.links.rank = 1
    train(model, sgd(model.head), search=search, clear="never")
    assert set(search.shares("update/unmoved_share")) == {0.0}
    assert not search.shares()
    assert not search.events("unoptimized", "uncleared", "without_gradient")


LARGE = torch.nn.Parameter(torch.zeros(2**20 + 1))
LARGE.grad = torch.ones_like(LARGE)


@pytest.mark.parametrize("group", [{"params": [LARGE]}, {"params": [torch.ones(2)]}, {}])
def test_where_no_gradient_can_be_looked_at_it_ends(record, group):
    """Too large, none, or an optimizer that fails."""
    progress = record(TwoParts()).progress
    progress.selection = SimpleNamespace(primary=SimpleNamespace(param_groups=[group]))
    looks = []
    UntrainedReport(progress, looks.append, lambda: None).poll()
    assert looks[0].at_boundary() == bool(group)
    assert progress.losses.proof is None
    assert [*guard.failures.values()] == [1] * (not group)
    guard.reset()


# ---- parameters that stand still


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
def test_what_does_not_move_is_named_with_the_reason(searching, setup, numbers, why):
    model, optimizer, x = setup()
    search = searching(model)
    train(model, optimizer, search=search, x=x, steps=80)
    told = search.events("unmoved")[0]
    trainable = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert search.shares("update/unmoved_share") == [pytest.approx(told["numbers"] / trainable)] * 3
    assert told["numbers"] >= numbers and told["names"][0] == "encoder.weight"
    assert (told["without_gradient"], told["without_rate"], told["steps"]) == (*why, LEAST_STEPS)


class Adapter(nn.Module):
    """The zeros of LoRA's second matrix move soon enough."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.zeros(4, 16))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def half_frozen():
    model = TwoParts()
    model.encoder.requires_grad_(False)
    return model


HEALTHY = {
    "all of it trains": (TwoParts, {}),
    "frozen": (half_frozen, {}),
    "frozen and unfrozen meanwhile": (TwoParts, {"freeze": lambda step: step % 30 >= 15}),
    "rows of a table of which few occur": (lambda: TwoParts(vocabulary=100_000), {"x": torch.arange(99_000, 99_008)}),
    "LoRA": (Adapter, {}),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_model_that_trains_stands_still_nowhere(searching, kind):
    make, options = HEALTHY[kind]
    model, freeze = make(), options.get("freeze")
    search = searching(model)
    train(
        model, sgd(model, lr=0.01), search=search, x=options.get("x"),
        before=lambda step: freeze and model.encoder.requires_grad_(not freeze(step)),
    )  # fmt: skip
    assert set(search.shares("update/unmoved_share")) == {0.0}
    assert not search.events("unmoved")


def test_that_it_is_over_is_told_as_well(searching):
    model = TwoParts(detach=True)
    search = searching(model)
    train(
        model, sgd(model, lr=0.01), search=search, steps=80,
        before=lambda step: setattr(model, "detach", step < 45),
    )  # fmt: skip
    assert [round(event["share"], 2) for event in search.events("unmoved")] == [0.94, 0.94, 0.0]
