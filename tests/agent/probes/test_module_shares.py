"""Shares of a model's parts in the time of one step, taken in a call of the root that is left as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooked

from perfagent.measure.flops.step_recording import FlopCount
from perfagent.measure.modules import ModuleTimes
from perfagent.probes.module_shares import module_shares, parts_of, ready
from perfagent.step.state import state

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_encoder = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        x = self.vision_encoder(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hooks():
    return len(hooked._global_forward_hooks) + len(hooked._global_forward_pre_hooks)


def training(model):
    """A step of it, which was done three times."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        model(torch.randn(16, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    state.current.probe = None
    return step


def shares_of_a_step(model):
    step = training(model)
    look = ModuleTimes(state.current, parts_of(model))
    assert look.at_boundary()
    step()
    assert not look.at_boundary()
    assert not hooks()
    assert ready(look)
    step()
    return {
        name.removeprefix("module_share/"): share for name, share in module_shares(look, state.current.clock).items()
    }


def test_shares_of_the_parts_make_up_most_of_a_step(record):
    parts = []
    for _ in range(5):  # a busy machine stalls a step of 1 ms outside of its parts
        model = Tower()
        recorded = record(model)
        shares = shares_of_a_step(model)
        parts.append([shares[name] for name in ("vision_encoder", "layers", "head")])
        recorded.run.finish()
    assert 0.3 < max(map(sum, parts)) <= 1.0
    assert min(map(min, parts)) > 0.0


def test_a_child_that_is_nearly_all_of_its_model_is_looked_into():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = Tower(), nn.Linear(1, 1)

    inside = ["vision_encoder", "vision_encoder.0", "vision_encoder.1", "vision_encoder.2", "layers", "head"]
    assert list(parts_of(Tower())) == inside, "the encoder holds most of it"
    assert list(parts_of(nn.Sequential(Tower()))) == [f"0.{name}" for name in inside]
    assert {"inner", "inner.layers", "inner.head", "scale"} <= set(parts_of(Wrapper()))
    assert len(parts_of(Tower())["layers"]) == 3
    assert parts_of(nn.Linear(2, 2)) == {}


def test_hooks_are_there_in_the_roots_call_only(record):
    class Copies(Tower):
        """Also calls itself."""

        def forward(self, x, again=True):
            seen.append(hooks())
            pickle.loads(pickle.dumps(copy.deepcopy(self.head)))
            return self(x, again=False) if again else super().forward(x)

    model, seen = nn.Sequential(Copies(), nn.Linear(1, 1)), []
    record(model)
    shares = shares_of_a_step(model)
    assert 0.0 < shares["0"] + shares["1"] <= 1.0
    assert seen[6:] == [2, 2, 0, 0]


@pytest.mark.parametrize("kind", [ModuleTimes, FlopCount])
def test_an_exception_in_the_measured_call_leaves_nothing_behind(record, kind):
    model = Tower()
    record(model)
    training(model)
    look = ModuleTimes(state.current, parts_of(model)) if kind is ModuleTimes else FlopCount(state.current)
    assert look.at_boundary()
    with pytest.raises(RuntimeError, match=r"shapes|size"):
        model(torch.randn(2, 3))
    assert not hooks() and not torch.autograd._profiler_enabled()
    look.close()
    assert state.current.probe is None
