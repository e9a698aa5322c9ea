"""What a model returned is let go of when backward begins, so that a timer round the model's call and ours see the
same."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from perfagent.boundary.guard import failures
from perfagent.hooks import output_lifetime as subject
from perfagent.step.state import state


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


def start(record, form="tuple"):
    model = Net(FORMS[form])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    record(model, optimizer=optimizer)
    return model, optimizer


def one_step(model, optimizer):
    loss_in(model(torch.ones(2, 4))).backward()
    optimizer.step()


@pytest.mark.parametrize("form", FORMS)
def test_what_the_loop_drops_behind_the_call_lives_until_backward_begins(record, form):
    model, optimizer = start(record, form)
    seen = []
    for step in range(6):
        output = model(torch.ones(2, 4))
        between = model.alive()
        loss = loss_in(output)
        loss.register_hook(lambda _: seen.append(model.alive()))
        loss.backward()
        optimizer.step()
        if step >= 4:
            assert between == [step - 1, step], "the old logits go where backward begins"
            assert seen[-1] == [step], "and are gone when gradients are computed"
        assert model.alive() == [step]


def test_the_new_ones_too(record):
    model, optimizer = start(record)
    for step in range(6):
        loss = model(torch.ones(2, 4))[1]
        assert step < 4 or model.alive() == [step]
        loss.backward()
        assert model.alive() == []
        optimizer.step()


def test_what_the_loop_dropped_before_is_not_kept(record):
    model, optimizer = start(record)
    for _ in range(6):
        logits, loss = model(torch.ones(2, 4))
        loss.backward()
        assert len(model.alive()) == 1
        del logits
        assert model.alive() == []
        optimizer.step()


def test_without_a_backward_pass_nothing_is_kept(record):
    model, optimizer = start(record)
    for _ in range(4):
        one_step(model, optimizer)
    parameters = list(model.parameters())
    for call in range(4):  # as meta-learning does
        torch.autograd.grad(model(torch.ones(2, 4))[1], parameters)
        assert len(model.alive()) <= (call == 0), "after one call it is known that no backward pass follows"
    one_step(model, optimizer)
    assert model.alive() == []


def test_the_end_of_the_run_lets_go(record):
    model = Net(FORMS["tuple"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for _ in range(5):
        one_step(model, optimizer)
    model(torch.ones(2, 4))
    assert model.alive() == [5]
    recorded.finish()
    assert model.alive() == []


def test_a_call_that_fails_lets_go_of_the_old_ones(record):
    """So that who has run out of memory, and drops what he has, gets it back."""
    model, optimizer = start(record)
    logits, loss = model(torch.ones(2, 4))
    for _ in range(4):
        loss.backward()
        optimizer.step()
        logits, loss = model(torch.ones(2, 4))
    loss.backward()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    assert logits is not None
    del logits, loss
    assert model.alive() == []


def test_what_no_backward_pass_follows_is_let_go_of_in_seconds(record, monkeypatch):
    model, optimizer = start(record)
    for _ in range(4):
        one_step(model, optimizer)
    model(torch.ones(2, 4))
    assert model.alive()
    outputs = state.current.outputs
    outputs.expire()
    assert model.alive(), "not at once"
    monkeypatch.setattr(subject, "_MOST_HELD_S", 0.0)
    outputs.expire()
    assert model.alive() == []


def test_a_mapping_of_the_users_own_is_not_looked_into(record):
    class Result(Mapping):
        def __init__(self, loss, logits):
            self.loss = loss

        def __getitem__(self, name):
            raise AssertionError(name)

        __iter__ = __len__ = __getitem__

    model = Net(Result)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    record(model, optimizer=optimizer)
    for _ in range(5):
        model(torch.ones(2, 4)).loss.backward()
        optimizer.step()
    assert not failures
    assert state.current.outputs is not None


def test_an_interrupt_while_a_backward_pass_begins_leaves_nothing_behind(record, monkeypatch):
    model, optimizer = start(record)
    for _ in range(4):
        one_step(model, optimizer)

    def interrupted(_):
        raise KeyboardInterrupt

    loss = model(torch.ones(2, 4))[1]
    monkeypatch.setattr("perfagent.hooks.backward._begin", lambda *_: interrupted(_))
    state.current.plain = False
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert state.current.backward_depth == 0


def test_what_costs_nothing_to_drop_is_looked_at_now_and_then(record, monkeypatch):
    monkeypatch.setattr(subject, "_NEGLIGIBLE_NS", 10**12)
    monkeypatch.setattr(subject, "_REST_CALLS", 20)
    model, optimizer = start(record)
    held = []
    for step in range(60):
        loss = model(torch.ones(2, 4))[1]
        held.append(model.alive() == [step])
        loss.backward()
        assert model.alive() == []
        optimizer.step()
    assert 16 <= sum(held) < 30, "eight at a time, and twenty calls in between"
    assert any(held[30:]), "it begins anew"


def test_what_costs_something_is_held_every_time(record, monkeypatch):
    monkeypatch.setattr(subject, "_NEGLIGIBLE_NS", 0)
    model, optimizer = start(record)
    for step in range(40):
        loss = model(torch.ones(2, 4))[1]
        assert step < 4 or model.alive() == [step]
        loss.backward()
        optimizer.step()
