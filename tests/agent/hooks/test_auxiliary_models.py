"""Modules that the loop calls besides the model: a teacher, a discriminator, the other tower of two, and the parts of a
model that it never calls."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from agent.hooks.loops import READINGS_S, about, nap, sgd, step
from torch import nn

pytestmark = pytest.mark.usefixtures("clock", "nothing_compiled")

CALL = "_compiled_call_impl"
NAP_S = 0.02
KNOWN = range(4, 9)
"""Other models are seen in the third step, and counted from the fourth on."""
HOOKS = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)
X = torch.ones(2, 4)


class Slow(nn.Linear):
    def forward(self, x):
        nap(NAP_S)
        return super().forward(x)


def student():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def train(record, loss, model, steps=8, *, before=lambda number: None):
    """before: called with the number of each step, before it."""
    optimizer = sgd(model, lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for number in range(1, steps + 1):
        before(number)
        step(optimizer, loss())
    return recorded


def is_watched(module):
    return module.__dict__.get(CALL) is not None


def hooked():
    return [dict(hooks) for hooks in HOOKS]


def distill(model, teacher):
    def loss():
        with torch.no_grad():
            wanted = teacher(X)
        return (model(X) - wanted).square()

    return loss


def two_towers(model, tower):
    return lambda: tower(X) @ model(X).T


def duel(model, judge, judges=None):
    """A discriminator's turn, in which the generator is not called, and then the generator's."""
    judges = judges or sgd(judge, lr=0.01)

    def loss():
        step(judges, judge(X))
        return model(X).square()

    return loss


@pytest.mark.parametrize("loop", [distill, two_towers, duel])
def test_another_models_call_is_part_of_the_forward_pass(record, loop):
    model, other = student(), Slow(4, 4)
    recorded = train(record, loop(model, other), model)
    forward, rest, rates = (recorded.series(name) for name in ("phase/forward_s", "phase/other_s", "samples_per_s"))
    assert all(about(forward[number], NAP_S) for number in KNOWN)
    assert all(rest[number] < NAP_S for number in KNOWN)
    assert loop is duel or set(KNOWN) <= set(rates), "the batch is still that of the root"
    # what each step does is no evaluation, once it is known that each does
    assert not recorded.of("phase/eval_s")


def test_the_look_leaves_nothing_behind(record):
    model, teacher, before = student(), nn.Linear(4, 4), hooked()
    loss, optimizer = distill(model, teacher), sgd(model, lr=0.01)
    recorded = record(model, optimizer=optimizer)
    looked = []
    for _ in range(4):
        made = loss()
        looked.append(hooked() != before)
        step(optimizer, made)
    assert looked == [False, False, True, False]
    assert hooked() == before
    assert is_watched(teacher)
    assert not is_watched(copy.deepcopy(teacher))
    recorded.finish()
    assert not is_watched(teacher)
    train(record, loss, model, steps=2).finish()
    assert hooked() == before, "a run that ends while it looks"


def test_a_process_that_compiles_is_left_alone(record):
    torch.compile(lambda x: x + 1, backend="eager")(X)
    model, teacher = student(), nn.Linear(4, 4)
    train(record, distill(model, teacher), model, steps=5)
    assert not is_watched(teacher)


# ---- evaluations, logs and phases beside such models


@torch.no_grad()
def evaluate(*models, calls=20):
    for _ in range(calls):
        for model in models:
            nap(0.002)
            model(X)


@pytest.mark.parametrize("both", [True, False], ids=["student and teacher", "teacher alone"])
def test_an_evaluation_with_the_teacher_is_no_forward_pass(record, both):
    model, teacher = student(), nn.Linear(4, 4)

    def before(number):
        assert is_watched(teacher) == (number > 3)
        if number in (6, 11):
            model.eval()
            evaluate(*([teacher, model] if both else [teacher]))
            model.train()

    recorded = train(record, distill(model, teacher), model, 12, before=before)
    evaluations, forward = recorded.series("phase/eval_s"), recorded.series("phase/forward_s")
    assert list(evaluations) == [6, 11]
    assert all(0.035 <= seconds < 0.085 for seconds in evaluations.values())
    assert all(forward[number] < READINGS_S for number in evaluations)


# ---- a model that is trained by one of its methods, and never called


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 2)
        self.decoders = nn.ModuleList([nn.Linear(2, 4), nn.Linear(2, 4)])

    def loss(self, x):
        code = self.encoder(x).relu()
        nap(NAP_S)  # the work between the parts
        return sum((decoder(code) - x).square().mean() for decoder in self.decoders)

    def forward(self, x):
        return self.encoder(x)


def test_the_forward_pass_begins_with_the_first_call_of_a_part(record):
    model = Autoencoder()
    parts = [model, model.encoder, *model.decoders]
    evaluated = []

    def before(number):
        if number == 7:
            model.eval()
            with torch.no_grad():
                evaluated.extend(model.loss(X) for _ in range(3))
            model.train()
        assert number < 4 or all(map(is_watched, parts))

    recorded = train(record, lambda: model.loss(X), model, before=before)
    forward = recorded.series("phase/forward_s")
    assert list(forward) == [4, 5, 6, 7, 8], "from the step after the one in which it was looked for"
    assert all(about(seconds, NAP_S) for seconds in forward.values())
    assert dict.fromkeys((5, 6, 8), 2).items() <= recorded.consumed().items()
    assert recorded.numbers("phase/eval_s") == [7]
    assert not any(map(is_watched, parts))


def test_the_forward_pass_of_many_layers_is_seen(record):
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80)))
    recorded = train(record, lambda: functools.reduce(lambda x, layer: layer(x), layers, X), layers)
    assert set(KNOWN) <= set(recorded.numbers("phase/forward_s")) & set(recorded.consumed())


def test_parts_count_again_after_a_step_that_calls_the_root(record):
    model = Autoencoder()
    recorded = train(record, lambda: model.loss(X), model, before=lambda number: number == 6 and model(X))
    assert {5, 7, 8} <= set(recorded.numbers("phase/forward_s")) & set(recorded.consumed())


def test_the_mode_of_the_parts_counts_not_that_of_the_root(record):
    """After an evaluation a script puts the parts back one by one: the list that it trains is never called."""
    encoder, head = nn.Linear(4, 4), Slow(4, 1)
    both = nn.ModuleList([encoder, head])

    def before(number):
        if number == 6:
            both.eval()
            evaluate(encoder, head)
            encoder.train()
            head.train()
        with torch.no_grad():
            encoder(X)

    recorded = train(record, lambda: head(encoder(X)), both, 12, before=before)
    forward = recorded.series("phase/forward_s")
    assert all(about(forward[number], NAP_S) for number in range(4, 13))
    assert recorded.numbers("phase/eval_s") == [6]
