"""The norm of a step is that of all gradients before clipping, however a loop clips them."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from agent.hooks.loops import sgd, small
from torch import nn
from truth import norm_of

clip_grad_value_ = nn.utils.clip_grad_value_
"""Imported by name before there is a run, as scripts do."""


def told(recorded):
    return [norm for _, norm in recorded.of("grad/norm")]


def backward(model, scale=30.0) -> float:
    """Answers the norm."""
    (scale * model(torch.randn(4, 8)).square().mean()).backward()
    return norm_of(model.parameters())


def finish(*optimizers) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def clip(*modules, limit=1.0) -> float:
    return float(nn.utils.clip_grad_norm_([p for module in modules for p in module.parameters()], limit))


# ---- one model, one optimizer


def twice(model):
    """A script asks for the norm with an infinite limit, logs it, and clips then."""
    clip(model, limit=math.inf)
    clip(model, limit=0.5)


def in_parts(model):
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 0.1)


def a_part_and_the_whole(model):
    clip(model[0], limit=0.1)
    clip(model)


def by_value(model):
    clip_grad_value_(model.parameters(), 0.01)


def by_value_and_norm(model):
    by_value(model)
    clip(model)


def one_by_one(model):
    """As torchtitan does; what scripts imported by name is not the function that is watched."""
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)


@pytest.mark.parametrize(
    ("how", "watched", "expects"),
    [
        *((how, "every_step", 3) for how in (twice, in_parts, a_part_and_the_whole, by_value, one_by_one)),
        *((how, "seldom", 3) for how in (twice, in_parts)),
        *((how, "seldom", 0) for how in (a_part_and_the_whole, by_value, by_value_and_norm)),
    ],
)
def test_the_norm_is_that_before_clipping_or_none(request, how, watched, expects):
    model = small()
    optimizer = sgd(model, lr=1e-4)
    recorded, true = request.getfixturevalue(watched)(model, optimizer), []
    for _ in range(3):
        true.append(backward(model))
        how(model)
        assert norm_of(model.parameters()) < true[-1]
        finish(optimizer)
    assert told(recorded) == pytest.approx(true[:expects], rel=1e-6)


def test_a_step_left_out_does_not_show_in_the_next_ones_norm(seldom):
    model = small()
    optimizer = sgd(model, lr=1e-4)
    recorded, returned = seldom(model), []
    for iteration in range(6):
        backward(model, 1e3 if iteration % 2 else 1.0)
        norm = clip(model)
        if iteration % 2 == 0:
            returned.append(norm)
            optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == returned


# ---- several


@pytest.mark.parametrize(("watched", "to_none"), [("every_step", True), ("seldom", True), ("seldom", False)])
@pytest.mark.parametrize("clips", ["both", "critic"])
def test_clipping_two_models_says_of_each_what_is_its_own(watched, to_none, clips, request):
    """A GAN whose critic is clipped first, when nobody knows yet which optimizer counts."""
    generator, critic = small(), nn.Linear(1, 1)
    ours, other = sgd(generator, lr=1e-4), sgd(critic, lr=1e-4)
    recorded, true = request.getfixturevalue(watched)(None), []
    for _ in range(4):
        fake = generator(torch.randn(4, 8))
        for _ in range(2):
            other.zero_grad(set_to_none=to_none)
            (1000 * critic(fake.detach())).square().mean().backward()
            clip(critic)
            other.step()
        ours.zero_grad(set_to_none=to_none)
        other.zero_grad(set_to_none=to_none)
        critic(fake).square().mean().backward()
        true.append(norm_of(generator.parameters()))
        if clips == "both":
            clip(generator, limit=1e-4)
        ours.step()
    assert told(recorded) == pytest.approx(true if clips == "both" or watched == "every_step" else [], rel=1e-6)


# ---- what is kept


def test_the_agent_keeps_no_gradient_of_what_was_clipped(every_step):
    model = small()
    recorded = every_step(model)
    optimizer = sgd(model, lr=1e-4)
    backward(model)
    clip(model)
    storage = weakref.ref(model[0].weight.grad.untyped_storage())
    optimizer.zero_grad()
    assert storage() is None
    recorded.finish()


# ---- gradients without a loss


@pytest.mark.parametrize("how", ["vector", "grad", "by hand"])
def test_an_optimizer_that_steps_with_gradients_has_their_norm(every_step, how):
    """Of a vector, of `autograd.grad`, or put there (an evolution strategy): no loss of one number is
    backpropagated."""
    model = small()
    optimizer = sgd(model, lr=1e-4)
    recorded, true = every_step(model), []
    for _ in range(3):
        losses = model(torch.randn(4, 8)).square()
        if how == "vector":
            losses.backward(torch.ones_like(losses))
        else:
            gradients = torch.autograd.grad(losses.mean(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient if how == "grad" else torch.randn_like(parameter)
        true.append(norm_of(model.parameters()))
        finish(optimizer)
    assert told(recorded) == pytest.approx(true, rel=1e-6)
    assert recorded.numbers("grad_norm/0.weight") == [1, 2, 3]
    assert recorded.of("update/ratio")
