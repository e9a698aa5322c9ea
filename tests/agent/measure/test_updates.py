"""How far a step moved the weights, from a bounded sample of them; of all optimizers that share the step together."""

from __future__ import annotations

import math

import pytest
import torch
from agent.hooks.test_multi_optimizer import BIG, SMALL, THIRD, backward, three_parts
from torch import nn

from perfagent.decode.gradient_report import ratios_of
from perfagent.measure.gradients import Plan
from perfagent.measure.updates import Weights


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def optimizer_of(parameters, lr=0.1):
    """With a gradient for each parameter that is trained."""
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.randn_like(parameter)
    return parameters, torch.optim.SGD(parameters, lr=lr)


def kept(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def moved(before, parameters):
    """The true ratio of all weights, and of each."""
    double = [
        (old.to(torch.promote_types(old.dtype, torch.float64)), p.detach())
        for old, p in zip(before, parameters, strict=True)
    ]
    changes, weights = [float((p - old).norm()) for old, p in double], [float(old.norm()) for old, _ in double]
    each = [change / weight if weight else None for change, weight in zip(changes, weights, strict=True)]
    return math.hypot(*changes) / (math.hypot(*weights) or 1), each


def stepped(model, *, lr=0.1, most=2**18, then=lambda: None):
    """What was measured of a step of its parameters, and what is true. then: right after the step."""
    parameters, optimizer = optimizer_of(model.parameters(), lr)
    before, weights = kept(parameters), Weights(parameters, Plan.of(optimizer, model), most)
    optimizer.step()
    then()
    compared = weights.compare(parameters)
    return None if compared is None else ratios_of([compared]), moved(before, parameters)


MODELS = {
    "small": lambda: nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5)),
    "bfloat16": lambda: nn.Linear(64, 64).bfloat16(),  # changes are not rounded again
    "half": lambda: nn.Linear(64, 64).half(),
    "channels last": lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
    "complex": lambda: nn.ParameterList(
        [torch.randn(40, dtype=torch.complex64), torch.randn(30), torch.randn(5, 2, dtype=torch.complex128)]
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_small_model_is_compared_whole(kind):
    (total, layers), (true, each) = stepped(MODELS[kind]())
    assert list(layers.values()) == pytest.approx(each, rel=1e-4)
    assert total == pytest.approx(true, rel=1e-4)


LARGE = {
    "several": lambda: nn.Sequential(
        nn.Linear(300, 300), nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last), nn.Linear(300, 10)
    ),
    "wide rows": lambda: nn.Linear(1 << 16, 16, bias=False),
    "a square": lambda: nn.Linear(1 << 10, 1 << 10, bias=False),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_model_is_sampled_from_all_its_rows_and_columns(kind):
    model = LARGE[kind]()
    for parameter in model.parameters():
        places = torch.meshgrid(*(torch.linspace(0, 1, size) for size in parameter.shape), indexing="ij")
        parameter.grad = torch.randn_like(parameter) * sum(places)
    (total, layers), (true, each) = stepped(model, most=2**12)
    assert list(layers.values()) == pytest.approx(each, rel=0.2)
    assert total == pytest.approx(true, rel=0.2)


def test_zero_weights_have_no_ratio_and_nan_is_told():
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)
    (total, layers), _ = stepped(model, then=lambda: nn.init.constant_(model.weight, float("nan")))
    assert [*layers] == ["weight"]
    assert math.isnan(total) and math.isnan(layers["weight"])


def test_frozen_weights_are_left_out_and_take_no_room():
    model = nn.Sequential(nn.Linear(100, 100).requires_grad_(False), nn.Linear(100, 10))
    # gradients are gone by the end of a step in a closure, or by a hook
    (total, layers), (_, each) = stepped(model, most=1010, then=model.zero_grad)
    assert layers == pytest.approx({"1.weight": each[2], "1.bias": each[3]}, rel=1e-5)
    assert min(each[2:]) < total < max(each[2:])


# ---- several optimizers of one step


@pytest.mark.parametrize("order", [(BIG, SMALL, THIRD), (SMALL, BIG, THIRD), (SMALL, THIRD, BIG)])
@pytest.mark.parametrize("clips", [False, True])
def test_the_ratio_is_of_all_that_step_in_whatever_order(everything, order, clips):
    model, optimizers = three_parts()
    parameters, recorded, true = list(model.parameters()), everything(model), {}
    for step in range(1, 5):
        backward(model)
        if clips:
            nn.utils.clip_grad_norm_(parameters, 1e3)
        before = kept(parameters)
        for name in order:
            optimizers[name].step()
            optimizers[name].zero_grad()
        true[step], each = moved(before, parameters)
    if clips:
        del true[1]  # its gradients were clipped before any optimizer was known
    assert recorded.series("update/ratio") == pytest.approx(true, rel=1e-5)
    for (name, _), ratio in zip(model.named_parameters(), each, strict=True):
        assert dict(recorded.of(f"update_ratio/{name}"))[4] == pytest.approx(ratio, rel=1e-5), name
