"""How far a step moved the weights, from a bounded sample of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from perfagent.signals.gradients import Plan
from perfagent.signals.updates import Weights, _share


def with_gradients(parameters):
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return list(parameters)


def stepped(model, *, lr=0.1, most=2**18, dtype=None):
    """(what was measured, the true change over the true weights by parameter)."""
    if dtype is not None:
        model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    parameters = with_gradients(list(model.parameters()))
    before = [parameter.detach().double().clone() for parameter in parameters]
    kept = Weights(parameters, Plan.of(optimizer, model), most)
    optimizer.step()
    measured = kept.compare(parameters).rows()
    pairs = zip(parameters, before, strict=True)
    return measured, [float((now.detach().double() - old).norm() / old.norm()) for now, old in pairs]


def test_a_small_model_is_compared_whole():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5))
    (total, layers), true = stepped(model)
    assert list(layers.values()) == pytest.approx(true, rel=1e-5)
    assert min(true) < total < max(true)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_changes_of_half_precision_weights_are_not_rounded_again(dtype):
    torch.manual_seed(0)
    (_, layers), true = stepped(nn.Linear(64, 64), lr=0.01, dtype=dtype)
    assert list(layers.values()) == pytest.approx(true, rel=1e-4)


def test_complex_weights_count_like_all_others():
    torch.manual_seed(0)
    model = nn.ParameterList(
        [torch.randn(40, dtype=torch.complex64), torch.randn(30), torch.randn(5, 2, dtype=torch.complex128)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = with_gradients(list(model.parameters()))
    before = [parameter.detach().clone() for parameter in parameters]
    kept = Weights(parameters, Plan.of(optimizer, model))
    optimizer.step()
    total, layers = kept.compare(parameters).rows()
    changes = [float((now.detach() - old).norm()) for now, old in zip(parameters, before, strict=True)]
    weights = [float(old.norm()) for old in before]
    true = [change / weight for change, weight in zip(changes, weights, strict=True)]
    assert list(layers.values()) == pytest.approx(true, rel=1e-5)
    assert total == pytest.approx(math.hypot(*changes) / math.hypot(*weights), rel=1e-5)


def test_a_large_model_is_sampled_within_bounds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Weights(with_gradients(list(model.parameters())), Plan.of(optimizer, model), 4000)
    assert sum(numbers.numel() for numbers, _, _ in kept._before) <= 4000
    (total, layers), true = stepped(model, most=4000)
    assert list(layers.values()) == pytest.approx(true, rel=0.15)
    assert total == pytest.approx(true[0], rel=0.15)


def test_a_sample_of_a_matrix_is_of_all_its_columns():
    """Runs that are whole rows apart would all be of the first columns: weights that change elsewhere would stand
    still."""
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(1024, 1024))
    matrix.grad = torch.zeros(1024, 1024)
    matrix.grad[:, 512:] = 1.0
    optimizer = torch.optim.SGD([matrix], lr=0.1)
    kept = Weights([matrix], Plan.of(optimizer, None), 2**12)
    before = matrix.detach().clone()
    optimizer.step()
    total, _ = kept.compare([matrix]).rows()
    assert total == pytest.approx(float((matrix.detach() - before).norm() / before.norm()), rel=0.15)


@pytest.mark.parametrize(
    "shape", [(1 << 20,), (1, 1 << 20), (2, 1 << 19), (16, 1 << 16), (1 << 16, 16), (64, 64, 16, 16)]
)
def test_a_sample_stays_within_its_parameter_and_no_number_counts_twice(shape):
    matrix = nn.Parameter(torch.arange(1, 1 + (1 << 20), dtype=torch.float64).view(shape))
    matrix.grad = torch.ones(shape, dtype=torch.float64)
    kept = Weights([matrix], Plan.of(torch.optim.SGD([matrix], lr=0.1), None), 2**12)
    ((numbers, _, _),) = kept._before
    assert len(set(numbers.tolist())) == 2**12
    assert numbers.max() > 0.9 * (1 << 20), "from its beginning to its end"


def test_what_small_parameters_leave_large_ones_get():
    assert _share([10, 10, 10_000], 1000) == 980
    assert _share([5, 5], 1000) == 5


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_weights_in_another_order_of_memory_count_the_same(layout):
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3).to(memory_format=layout)
    (_, layers), true = stepped(model, most=100)
    assert layers["weight"] == pytest.approx(true[0], rel=0.5)
    (_, layers), true = stepped(model)
    assert list(layers.values()) == pytest.approx(true, rel=1e-5)


def test_weights_that_are_all_zero_have_no_ratio():
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.bias)
    (total, layers), _ = stepped(model)
    assert set(layers) == {"weight"}
    assert total > 0


def test_a_step_that_changes_nothing_has_the_ratio_zero():
    (total, layers), _ = stepped(nn.Linear(4, 4), lr=0.0)
    assert total == 0.0
    assert set(layers.values()) == {0.0}


def test_weights_that_became_nan_are_told():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = Weights(with_gradients(list(model.parameters())), Plan.of(optimizer, model))
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    total, layers = kept.compare(list(model.parameters())).rows()
    assert math.isnan(total)
    assert math.isnan(layers["weight"])


def test_other_parameters_after_the_step_are_not_compared():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = Weights(with_gradients(list(model.parameters())), Plan.of(optimizer, model))
    model.weight.data = torch.ones(8, 8)
    assert kept.compare(list(model.parameters())) is None


def test_frozen_weights_are_left_out_and_take_no_room():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    frozen, trained = list(model[0].parameters()), list(model[1].parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_gradients(trained)
    before = [parameter.detach().clone() for parameter in trained]
    kept = Weights([*frozen, *trained], Plan.of(optimizer, model), 1010)
    assert sum(numbers.numel() for numbers, _, _ in kept._before) == 1010, "all of what is trained"
    optimizer.step()
    optimizer.zero_grad()  # in a closure, or by a hook: gradients are gone by then
    total, layers = kept.compare([*frozen, *trained]).rows()
    changes = torch.cat([(now.detach() - old).flatten() for now, old in zip(trained, before, strict=True)]).norm()
    assert set(layers) == {"1.weight", "1.bias"}
    assert total == pytest.approx(float(changes / torch.cat([old.flatten() for old in before]).norm()), rel=1e-5)


def test_a_step_in_which_nothing_has_a_gradient_has_no_ratio():
    model = nn.Linear(4, 4)
    kept = Weights(list(model.parameters()), Plan.of(torch.optim.SGD(model.parameters(), lr=0.1), model))
    assert kept.compare(list(model.parameters())).rows() == (None, {})
