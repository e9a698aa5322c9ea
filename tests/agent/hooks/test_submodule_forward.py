"""A model that is trained by one of its methods, and never called."""

from __future__ import annotations

import pytest
import torch
from agent.hooks.loops import about, nap, sgd, step
from torch import nn

import perfagent.signals.compiled  # noqa: F401 - as the sender's thread does

pytestmark = pytest.mark.usefixtures("clock", "nothing_compiled")

CALL = "_compiled_call_impl"
APART_S = 0.02
ALL = ["", "encoder", "decoders.0", "decoders.1"]
X = torch.ones(8, 16)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 4)
        self.decoders = nn.ModuleList([nn.Linear(4, 16), nn.Linear(4, 16)])

    def loss(self, x):
        code = self.encoder(x).relu()
        nap(APART_S)  # the work between the parts
        return sum((decoder(code) - x).square().mean() for decoder in self.decoders)

    def forward(self, x):
        return self.encoder(x)


def train(record, steps=8, model=None):
    model = model or Autoencoder()
    optimizer = sgd(model, lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for _ in range(steps):
        step(optimizer, model.loss(X))
    return recorded, model, optimizer


def watched(model):
    return [name for name, module in model.named_modules() if CALL in module.__dict__]


def test_the_forward_pass_begins_with_the_first_call_of_a_part(record):
    recorded, model, _ = train(record)
    assert watched(model) == ALL
    forward = recorded.series("phase/forward_s")
    assert list(forward) == [4, 5, 6, 7, 8], "from the step after those in which the model was not called"
    assert all(about(seconds, APART_S) for seconds in forward.values())
    assert dict.fromkeys(range(5, 9), 8).items() <= recorded.consumed().items()
    assert not watched(model)


def test_an_evaluation_by_the_same_method_is_one(record):
    recorded, model, optimizer = train(record)
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model.loss(X)
    model.train()
    step(optimizer, model.loss(X))
    ((number, seconds),) = recorded.of("phase/eval_s")
    assert number == 9
    assert 2 * APART_S <= seconds <= 3 * APART_S + 0.001
