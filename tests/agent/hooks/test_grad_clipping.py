"""The norm of a step is that of all gradients before clipping, however a loop clips them."""

from __future__ import annotations

import copy
import math
import sys
import types

import pytest
import torch
from torch import nn
from truth import norm_of

from perfagent.boundary import guard
from perfagent.hooks import grad_clipping

clip_grad_value_ = nn.utils.clip_grad_value_
"""Imported by name before there is a run, as scripts do."""


def told(recorded):
    return [norm for _, norm in recorded.of("grad/norm")]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def backward(model, scale=30.0) -> None:
    (scale * model(torch.randn(4, 8)).square().mean()).backward()


def sgd(*modules) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-4)


def test_one_clipping_of_what_two_optimizers_take(seldom):
    """Muon beside AdamW: the first gradient of the model belongs to the smaller of them."""
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 64))
    little, big = sgd(model[0]), sgd(model[1])
    recorded = seldom(model, big)
    returned = []
    for _ in range(3):
        backward(model)
        returned.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for optimizer in (little, big):
            optimizer.step()
            optimizer.zero_grad()
    assert told(recorded) == returned


@pytest.mark.parametrize("watched", ["every_step", "seldom"])
def test_gradients_clipped_twice_have_the_norm_of_the_first_time(watched, request):
    """A script asks for the norm with an infinite limit, logs it, and clips then."""
    model = small()
    optimizer = sgd(model)
    recorded = request.getfixturevalue(watched)(model)
    returned = []
    for _ in range(3):
        backward(model)
        returned.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == returned


@pytest.mark.parametrize("watched", ["every_step", "seldom"])
@pytest.mark.parametrize("limit", [1.0, 1e9])
def test_clipping_after_every_micro_batch_tells_the_norm_of_the_last_time(watched, limit, request):
    model = small()
    optimizer = sgd(model)
    recorded = request.getfixturevalue(watched)(model)
    returned, layers = [], []
    for _ in range(4):
        for _ in range(3):
            backward(model)
            before = norm_of([model[2].weight])
            last = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        returned.append(last)
        layers.append(before)
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == returned
    if watched == "every_step":
        of_layer = dict(recorded.of("grad_norm/2.weight"))
        assert set(of_layer) >= {2, 3, 4}
        assert all(norm == pytest.approx(layers[step - 1], rel=1e-5) for step, norm in of_layer.items())


def test_only_the_last_of_many_clippings_of_a_step_is_measured(every_step):
    model = small()
    optimizer = sgd(model)
    recorded = every_step(model)
    passes = []
    for _ in range(3):
        for _ in range(5):
            backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        passes.append(recorded.run._progress.health._passes)
    assert passes[2] - passes[1] == 1, "a pass for each would cost five times what the governor granted"


@pytest.mark.parametrize("watched", ["every_step", "seldom"])
def test_clipping_in_parts_tells_the_norm_of_all(watched, request):
    model = small()
    optimizer = sgd(model)
    recorded = request.getfixturevalue(watched)(model)
    true = []
    for _ in range(3):
        backward(model)
        true.append(norm_of(model.parameters()))
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == pytest.approx(true, rel=1e-6)


def test_a_part_clipped_before_the_whole_leaves_no_norm_but_a_measured_one(request):
    for watched, expects in (("every_step", 3), ("seldom", 0)):
        model = small()
        optimizer = sgd(model)
        recorded = request.getfixturevalue(watched)(model, optimizer)
        true = []
        for _ in range(3):
            backward(model)
            true.append(norm_of(model.parameters()))
            nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert told(recorded) == pytest.approx(true[:expects], rel=1e-6)


def test_clipping_by_value_is_no_reason_to_tell_the_norm_after_it(every_step):
    model = small()
    optimizer = sgd(model)
    recorded = every_step(model)
    true = []
    for _ in range(3):
        backward(model)
        true.append(norm_of(model.parameters()))
        clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == pytest.approx(true, rel=1e-6)


def test_a_norm_of_gradients_clipped_by_value_is_not_the_norm_of_the_step(seldom):
    model = small()
    optimizer = sgd(model)
    recorded = seldom(model)
    for _ in range(3):
        backward(model)
        clip_grad_value_(model.parameters(), 0.01)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == []


def test_norm_and_clipping_called_one_by_one(every_step):
    """As torchtitan does; what scripts imported by name is not the function that is watched."""
    model = small()
    optimizer = sgd(model)
    recorded = every_step(model)
    true = []
    for _ in range(3):
        backward(model)
        true.append(norm_of(model.parameters()))
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("watched", ["every_step", "seldom"])
def test_parameters_that_train_later_and_are_not_clipped_end_the_norm_of_clipping(watched, request):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    recorded = request.getfixturevalue(watched)(model)
    true = []
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        backward(model)
        true.append(norm_of(model.parameters()))
        nn.utils.clip_grad_norm_(model[1:].parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == pytest.approx(true if watched == "every_step" else true[:2], rel=1e-6)


@pytest.mark.parametrize("watched", ["every_step", "seldom"])
@pytest.mark.parametrize("to_none", [True, False])
def test_clipping_two_models_says_of_each_what_is_its_own(watched, to_none, request):
    """A GAN whose critic is clipped first, when nobody knows yet which optimizer counts."""
    generator, critic = small(), nn.Linear(1, 1)
    ours, other = sgd(generator), sgd(critic)
    recorded = request.getfixturevalue(watched)(None)
    returned = []
    for _ in range(4):
        fake = generator(torch.randn(4, 8))
        for _ in range(2):
            other.zero_grad(set_to_none=to_none)
            (1000 * critic(fake.detach())).square().mean().backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            other.step()
        ours.zero_grad(set_to_none=to_none)
        other.zero_grad(set_to_none=to_none)
        critic(fake).square().mean().backward()
        returned.append(float(nn.utils.clip_grad_norm_(generator.parameters(), 1e-4)))
        ours.step()
    assert told(recorded) == returned


def test_a_clipped_critic_before_any_optimizer_is_known_is_not_measured_for_the_generator(every_step):
    generator, critic = small(), nn.Linear(1, 1)
    ours, other = sgd(generator), sgd(critic)
    recorded = every_step(None)
    true = []
    for _ in range(3):
        fake = generator(torch.randn(4, 8))
        other.zero_grad()
        (1000 * critic(fake.detach())).square().mean().backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        other.step()
        ours.zero_grad()
        critic(fake).square().mean().backward()
        true.append(norm_of(generator.parameters()))
        ours.step()
    assert told(recorded) == pytest.approx(true, rel=1e-6)


def test_a_step_that_the_loop_leaves_out_does_not_show_in_the_next_ones_norm(seldom):
    model = small()
    optimizer = sgd(model)
    recorded = seldom(model)
    returned = []
    for iteration in range(6):
        backward(model, 1e3 if iteration % 2 else 1.0)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if iteration % 2 == 0:
            returned.append(norm)
            optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == returned


def test_a_loop_that_clips_and_never_steps_is_not_remembered_for_ever():
    clips, gradients = grad_clipping.Clips(), [object() for _ in range(grad_clipping._MOST * 2)]
    for begin in range(0, len(gradients), 1000):
        clips.add(gradients[begin : begin + 1000], [])
    assert len(clips._of) <= grad_clipping._MOST + 1001


def test_the_agent_keeps_no_gradient_of_what_was_clipped(every_step):
    import weakref

    model = small()
    recorded = every_step(model)
    optimizer = sgd(model)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    storage = weakref.ref(model[0].weight.grad.untyped_storage())
    optimizer.zero_grad()
    assert storage() is None
    recorded.finish()


def test_clipping_is_bit_equal_with_the_agent(every_step):
    def train(model):
        torch.manual_seed(1)
        optimizer = sgd(model)
        for _ in range(4):
            backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model = small()
    alone = train(copy.deepcopy(model))
    every_step(model)
    assert all(map(torch.equal, alone, train(model)))


# ---- gradients without a loss


@pytest.mark.parametrize("how", ["vector", "grad", "by hand"])
def test_an_optimizer_that_steps_with_gradients_has_their_norm(every_step, how):
    """Of a vector, of `autograd.grad`, or put there (an evolution strategy): no loss of one number is
    backpropagated."""
    model = small()
    optimizer = sgd(model)
    recorded = every_step(model)
    true = []
    for _ in range(3):
        losses = model(torch.randn(4, 8)).square()
        if how == "vector":
            losses.backward(torch.ones_like(losses))
        else:
            gradients = torch.autograd.grad(losses.mean(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient if how == "grad" else torch.randn_like(parameter)
        true.append(norm_of(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert told(recorded) == pytest.approx(true, rel=1e-6)
    assert [step for step, _ in recorded.of("grad_norm/0.weight")] == [1, 2, 3]
    assert recorded.of("update/ratio")


def test_an_optimizer_without_gradients_tells_nothing_and_is_not_measured(every_step):
    model = small()
    optimizer = sgd(model)
    recorded = every_step(model)
    for _ in range(3):
        optimizer.step()
    assert told(recorded) == []
    assert recorded.run._progress.health._passes == 0


# ---- failures


def test_a_failed_hook_of_another_kind_leaves_the_steps_alone(every_step):
    model = small()
    optimizer = sgd(model)
    recorded = every_step(model)
    whole = []
    for step in range(4):
        if step == 2:
            guard.failed("perfagent.hooks.host_to_device.something", ValueError("not ours"))
        backward(model)
        undo = optimizer.register_step_pre_hook(lambda *_: whole.append(recorded.run._progress.whole))
        optimizer.step()
        undo.remove()
        optimizer.zero_grad()
    guard.reset()
    assert whole == [False, True, True, True], "timed from outside of torch's wrapper, from the second step on"
    assert [step for step, _ in recorded.steps()] == [1, 2, 3, 4]


def test_gradients_that_get_the_ids_of_those_that_a_stepped_optimizer_let_go_of_have_their_own_norm(seldom):
    """Both backward passes first: what Python knows the generator's gradients by is made when they are clipped."""
    generator, critic = small(), small()
    ours, other = sgd(generator), sgd(critic)
    recorded = seldom(generator, ours)
    returned = []
    for _ in range(4):
        backward(critic)
        backward(generator)
        norm = float(nn.utils.clip_grad_norm_(critic.parameters(), 1.0))
        other.step()
        other.zero_grad()
        returned.append(math.hypot(norm, float(nn.utils.clip_grad_norm_(generator.parameters(), 1.0))))
        ours.step()
        ours.zero_grad()
    assert told(recorded) == pytest.approx(returned, rel=1e-6)


def of_timm(parameters, clip_factor=0.01):
    """What timm does: each row of a gradient becomes at most so large a share of its row of the weight."""
    for parameter in parameters:
        if parameter.grad is not None:
            weight, gradient = (
                each.reshape(len(each), -1).norm(dim=1) for each in (parameter.detach(), parameter.grad)
            )
            share = (clip_factor * weight.clamp(min=1e-3) / gradient.clamp(min=1e-6)).clamp(max=1.0)
            parameter.grad.copy_(parameter.grad * share.reshape(-1, *[1] * (parameter.dim() - 1)))


@pytest.mark.parametrize("part", [False, True], ids=["all", "all but the last layer"])
def test_adaptive_clipping_of_timm_is_clipping(every_step, monkeypatch, part):
    modules = [types.ModuleType(name) for name in ("timm.utils.agc", "timm.utils.clip_grad")]
    for module in modules:
        module.adaptive_clip_grad = of_timm  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    model = small()
    optimizer = sgd(model)
    recorded = every_step(model)
    norms = []
    for module in modules * 2:
        optimizer.zero_grad()
        backward(model)
        norms.append(norm_of(model.parameters()))
        module.adaptive_clip_grad(parameter for parameter in (model[:-1] if part else model).parameters())
        assert norm_of(model.parameters()) < norms[-1]
        optimizer.step()
    known = [*enumerate(norms, 1)][part:]  # of the first step there is only what was clipped: no optimizer was known
    assert recorded.of("grad/norm") == [(step, pytest.approx(norm, rel=1e-5)) for step, norm in known]
    assert all(module.adaptive_clip_grad is of_timm for module in modules)
