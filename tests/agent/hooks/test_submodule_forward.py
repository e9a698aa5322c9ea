"""A model that is trained by one of its methods, and never called."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from torch import nn

import perfagent.signals.compiled  # noqa: F401 - as the sender's thread does

pytestmark = pytest.mark.usefixtures("nothing_compiled")

CALL = "_compiled_call_impl"
APART_S = 0.02


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 4)
        self.decoders = nn.ModuleList([nn.Linear(4, 16), nn.Linear(4, 16)])

    def loss(self, x):
        code = self.encoder(x).relu()
        time.sleep(APART_S)  # the work between the parts
        return sum((decoder(code) - x).square().mean() for decoder in self.decoders)

    def forward(self, x):
        return self.encoder(x)


def step(model, optimizer, *, samples=8):
    optimizer.zero_grad()
    model.loss(torch.ones(samples, 16)).backward()
    optimizer.step()


def train(record, steps=8, model=None):
    model = model or Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for _ in range(steps):
        step(model, optimizer)
    return recorded, model, optimizer


def told(recorded, name):
    return {number: values[name] for number, values in recorded.rows if name in values}


def watched(model):
    return [name for name, module in model.named_modules() if CALL in module.__dict__]


def test_the_forward_pass_begins_with_the_first_call_of_a_part(record):
    recorded, _, _ = train(record)
    recorded.finish()
    forward, whole = told(recorded, "phase/forward_s"), told(recorded, "step_time_s")
    assert list(forward) == [4, 5, 6, 7, 8], "from the step after those in which the model was not called"
    assert all(APART_S <= forward[number] <= whole[number] for number in forward)


def test_samples_are_those_of_the_first_part(record):
    recorded, _, _ = train(record)
    recorded.finish()
    rate, whole = told(recorded, "samples_per_s"), told(recorded, "step_time_s")
    assert [round(rate[number] * whole[number]) for number in (5, 6, 7, 8)] == [8, 8, 8, 8]


def test_only_the_root_is_watched_where_it_is_called(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    record(model, optimizer=optimizer)
    for _ in range(8):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    assert watched(model) == [""]


def test_parts_are_left_alone_in_a_process_that_compiles(record, monkeypatch):
    monkeypatch.setattr("perfagent.signals.compiled.compiled", lambda: True)
    _, model, _ = train(record)
    assert watched(model) == [""]


def test_an_evaluation_by_the_same_method_is_one(record):
    recorded, model, optimizer = train(record)
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model.loss(torch.ones(8, 16))
    model.train()
    step(model, optimizer)
    recorded.finish()
    assert list(told(recorded, "phase/eval_s")) == [9]
    assert told(recorded, "phase/eval_s")[9] >= 2 * APART_S


def test_a_root_that_is_called_after_all_is_what_counts(record):
    recorded, model, optimizer = train(record)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).mean().backward()
        optimizer.step()
    recorded.finish()
    rate, whole = told(recorded, "samples_per_s"), told(recorded, "step_time_s")
    assert round(rate[11] * whole[11]) == 2


def test_copies_and_pickles_have_nothing_of_ours_and_the_end_takes_all_out(record):
    recorded, model, _ = train(record)
    assert watched(model) == ["", "encoder", "decoders.0", "decoders.1"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not watched(other)
        other.loss(torch.ones(2, 16))
    recorded.finish()
    assert not watched(model)


class Pair(nn.Module):
    """Two networks in one module, neither of which is called by way of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def loss(self, part):
        time.sleep(APART_S)
        return part(torch.ones(2, 4)).square().mean()


def test_each_optimizers_own_pass_has_its_forward_time(record):
    model = Pair()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.first, model.second)]
    recorded = record(model, optimizer=optimizers[0])
    for _ in range(8):
        for optimizer, part in zip(optimizers, (model.first, model.second), strict=True):
            optimizer.zero_grad()
            loss = part(torch.ones(2, 4)).square().mean()
            time.sleep(APART_S)
            loss.backward()
            optimizer.step()
    recorded.finish()
    forward = told(recorded, "phase/forward_s")
    assert all(forward[number] >= 2 * APART_S for number in (6, 7)), "in a step of the first there is a pass of each"


def test_a_part_that_has_two_names_is_watched_once(record):
    model = Autoencoder()
    model.again = model.encoder
    recorded, model, _ = train(record, model=model)
    assert len(watched(model)) == 4
    recorded.finish()
    assert not watched(model)


def clone_of(module, value):
    """As meta-learning makes one: all of the original's `__dict__`, and weights of its own."""
    clone = module.__new__(type(module))
    clone.__dict__ = dict(module.__dict__)
    clone._parameters = {name: torch.full_like(p, value) for name, p in module._parameters.items()}
    return clone


def test_a_clone_computes_with_its_own_weights(record):
    recorded, model, _ = train(record)
    for original in (model.encoder, model.decoders[0]):
        assert CALL in original.__dict__
        assert clone_of(original, 0.0)(torch.ones(2, original.in_features)).abs().sum() == 0.0
    recorded.finish()


def test_a_clone_of_the_root_computes_with_its_own_weights(record):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for _ in range(3):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    assert CALL in model.__dict__
    assert clone_of(model, 0.0)(torch.ones(2, 4)).abs().sum() == 0.0
    recorded.finish()


def test_replicas_compute_with_their_own_weights(record):
    recorded, model, _ = train(record)
    replica = model.encoder._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4, 16), torch.zeros(4)
    assert replica(torch.ones(2, 16)).abs().sum() == 0.0
    recorded.finish()
