"""What a model returned is let go of when backward begins, so that a timer round the model's call and ours see the
same."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agent.hooks.loops import sgd
from torch import nn

X = torch.ones(2, 4)


@dataclass
class Output:
    loss: Any
    logits: Any


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.inner, self.form, self.logits = nn.Linear(4, 4), form, []

    def forward(self, x):
        logits = self.inner(x)
        self.logits.append(weakref.ref(logits))
        return self.form(logits.mean(), logits)  # whose graph does not keep them

    def alive(self):
        """The calls whose logits live."""
        return [number for number, logits in enumerate(self.logits) if logits() is not None]


FORMS = {
    "tuple": lambda loss, logits: (logits, loss),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "object": lambda loss, logits: Output(loss, logits),
}


def loss_in(output):
    return output[1] if isinstance(output, tuple) else output["loss"] if isinstance(output, dict) else output.loss


@pytest.fixture
def trained(clock, record):
    """A model that has been trained for some steps, its optimizer, and the run."""

    def start(form=FORMS["tuple"], steps=4):
        model = Net(form)
        optimizer = sgd(model, lr=0.01)
        recorded = record(model, optimizer=optimizer)
        for _ in range(steps):
            loss_in(model(X)).backward()
            optimizer.step()
        return model, optimizer, recorded

    return start


@pytest.mark.parametrize("form", FORMS)
def test_what_the_loop_drops_after_the_call_lives_on(trained, form):
    model, optimizer, _ = trained(FORMS[form], steps=0)
    seen = []
    for step in range(6):
        output = model(X)
        between = model.alive()
        loss = loss_in(output)
        loss.register_hook(lambda _: seen.append(model.alive()))
        loss.backward()
        optimizer.step()
        if step >= 4:
            assert between == [step - 1, step], "the old logits go where backward begins"
            assert seen[-1] == [step], "and are gone when gradients are computed"
        assert model.alive() == [step]


def test_without_a_backward_pass_nothing_is_kept(trained):
    model, _, _ = trained()
    for call in range(4):  # as meta-learning does
        torch.autograd.grad(model(X)[1], list(model.parameters()))
        assert len(model.alive()) <= (call == 0), "after one call it is known that no backward pass follows"


def test_what_is_held_goes_after_five_seconds_or_with_the_run(clock, trained):
    model, _, recorded = trained()
    model(X)
    for pause_s, alive in ((4.9, [4]), (0.2, [])):
        clock.sleep(pause_s)
        recorded.poll()
        assert model.alive() == alive
    model, _, recorded = trained()
    model(X)
    assert model.alive() == [4]
    recorded.finish()
    assert model.alive() == []
