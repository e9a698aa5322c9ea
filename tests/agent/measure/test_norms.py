"""Norms of many gradients from one pass: each is the one that the tensor has by itself, at its own place."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_versions import since_torch

from perfagent.decode.gradient_report import summarize
from perfagent.measure.dead_units import DeadUnits
from perfagent.measure.gradients import Plan, bad_on_host, count_nonfinite, norms
from perfagent.measure.updates import Weights

pytestmark = pytest.mark.usefixtures("nothing_compiled")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def model_of(shapes, dtype=torch.float32):
    """Parameters of these shapes, each with a gradient of its own size, and the plan of an optimizer over them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for number, parameter in enumerate(parameters, start=1):
        parameter.grad = number * torch.randn(parameter.shape).to(dtype)
    return parameters, Plan.of(torch.optim.SGD(parameters, lr=0.1), None)


def gradients(parameters):
    return [parameter.grad for parameter in parameters]


def each(parameters, plan):
    """The norm of every gradient, by the layers of the report (each parameter is one), None where there is none."""
    report = summarize([(norms(gradients(parameters), plan), 1.0)])
    return [None if square is None else math.sqrt(square) for square in report.layers], report


def expected(parameters):
    dense = [p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad for p in parameters]
    return [None if g is None else pytest.approx(float(g.detach().double().norm()), rel=1e-3) for g in dense]


MIXED = [(16, 3), (5,), (), (7, 2), (0,), *[(5,), ()] * 3, (1025,), (7, 2)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_tensor_has_its_own_norm_at_its_own_place(dtype):
    parameters, plan = model_of(MIXED, dtype)
    found, report = each(parameters, plan)
    assert found == expected(parameters)
    assert plan.uniform
    whole = nn.utils.get_total_norm([gradient.double() for gradient in gradients(parameters)])
    assert math.sqrt(report.square_sum) == pytest.approx(float(whole), rel=1e-3)


@since_torch(2, 7, "a gradient has the type of its weight")
def test_half_precision_does_not_overflow():
    parameters, plan = model_of([(1000,)] * 3, torch.float16)
    for parameter in parameters:
        parameter.grad = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert each(parameters, plan)[0] == [pytest.approx(60000 * math.sqrt(1000), rel=1e-3)] * 3
    parameters[0].grad = None
    parameters[0].grad_dtype = torch.float32
    parameters[0].grad = torch.ones(1000)
    assert each(parameters, plan)[1].nonfinite == [], "nor beside full precision"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found_where_it_is(poison):
    parameters, plan = model_of([(40, 40), *[(5,)] * 20, (40, 40), *[(6,)] * 20])
    parameters[9].grad[3] = parameters[21].grad[1, 1] = parameters[41].grad[0] = poison
    found = norms(gradients(parameters), plan)
    assert sorted(bad_on_host(found)) == [9, 21, 41]
    count_nonfinite(found, gradients(parameters), bad_on_host(found))
    report = summarize([(found, 1.0)])
    assert (report.nonfinite, report.counts) == ([9, 21, 41], {9: 1.0, 21: 1.0, 41: 1.0})
    assert not math.isfinite(math.sqrt(report.square_sum))


def test_shares_of_zero_and_vanishing_gradients_count_tensors():
    parameters, plan = model_of([(5,)] * 15 + [(0,)])
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.0 if place < 3 else 4e-8 if place < 9 else 1.0)
    found = norms(gradients(parameters), plan)
    for scale, vanishing in ((1.0, 0.4), (0.1, 0.0)):  # what is empty is neither
        assert summarize([(found, scale)]).shares == {"grad/zero_share": 0.2, "grad/vanishing_share": vanishing}


def test_gradients_that_come_and_go_are_measured():
    parameters, plan = model_of([(5,)] * 20 + [(40, 40)] * 3)
    kept = gradients(parameters)
    for missing in ((), (3, 21), range(1, 23), (0,)):
        for place, parameter in enumerate(parameters):
            parameter.grad = None if place in missing else kept[place]
        found, report = each(parameters, plan)
        assert found == expected(parameters)
        assert report.shares["grad/zero_share"] == 0.0
    assert plan.uniform


# ---- what a pass launches


READS = {"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero"}


class Dispatched(TorchDispatchMode):
    """names: of the operations that torch runs inside of the block, but for those that only make another view."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names += [name] if name not in ("detach", "view") else []
        return function(*args, **(kwargs or {}))


def test_nothing_is_read_back_on_the_training_thread():
    """What reads a tensor's value waits for the device on a GPU: none of it may happen in a pass, a comparison or a
    look."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model(torch.randn(4, 8)).square().mean().backward()
    parameters, plan = list(model.parameters()), Plan.of(torch.optim.SGD(model.parameters(), lr=0.1), model)
    probe = DeadUnits(model, lambda _: None)
    assert probe
    with Dispatched() as ran:
        found = norms(gradients(parameters), plan)
        assert ran.names == ["_foreach_norm", "stack"], "two launches, whatever the number of parameters"
        count_nonfinite(found, gradients(parameters), [0, 2])
        Weights(parameters, plan, 40).compare(parameters)
        probe.call(model, (torch.randn(4, 8),), {})
    assert not READS & set(ran.names)
