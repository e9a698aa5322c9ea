"""Norms of many tensors of one shape, taken together: each is the one that the tensor has by itself, at its own
place."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from perfagent.signals.foreach_norms import LARGE, MOST_NUMBERS
from perfagent.signals.gradients import Plan, norms


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
    report = norms(gradients(parameters), plan).report()
    return [None if square is None else math.sqrt(square) for square in report.layers], report


def expected(parameters):
    return [
        None if p.grad is None else pytest.approx(float(p.grad.detach().double().norm()), rel=1e-3) for p in parameters
    ]


MIXED = [(16, 3), (5,), (), (7, 2), (5,), (0,), *[(5,), ()] * 9, (MOST_NUMBERS + 1,), *[(2, 4)] * 8, (7, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_tensor_has_its_own_norm_at_its_own_place(dtype):
    parameters, plan = model_of(MIXED, dtype)
    found, _ = each(parameters, plan)
    assert found == expected(parameters)
    assert plan.uniform
    assert plan.order(list(range(len(MIXED)))).places != list(range(len(MIXED))), "some of them were stacked"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("size", [LARGE, 4 * LARGE + 7])
def test_the_norm_of_a_large_tensor_is_exact(dtype, mixed, size):
    """Of equal numbers torch's own is 0.2 % off at 8 million: a float32 sum swallows what is added to it."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)), nn.Parameter(torch.zeros(3, dtype=dtype))]
    if mixed:
        parameters.append(nn.Parameter(torch.zeros(2, dtype=torch.float16)))
    plan = Plan.of(torch.optim.SGD(parameters, lr=0.1), None)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    found, _ = each(parameters, plan)
    assert plan.uniform != mixed
    assert found[0] == pytest.approx(float(parameters[0].grad[0]) * math.sqrt(size), rel=2e-5)
    assert found[1:] == expected(parameters)[1:]


def test_a_large_gradient_that_lies_otherwise_in_memory_has_its_norm():
    parameters, plan = model_of([(1024, LARGE // 1024)])
    parameters[0].grad = torch.randn(LARGE // 1024, 1024).t()
    found, _ = each(parameters, plan)
    assert found == expected(parameters)
    assert plan.uniform


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 2, 2, 2)])
def test_tensors_of_any_shape_stack(shape):
    parameters, plan = model_of([shape] * 12)
    found, _ = each(parameters, plan)
    assert found == expected(parameters)
    assert plan.uniform


def test_halves_do_not_overflow_in_a_stack():
    parameters, plan = model_of([(1000,)] * 10, torch.float16)
    for parameter in parameters:
        parameter.grad = torch.full((1000,), 60000.0, dtype=torch.float16)
    found, report = each(parameters, plan)
    assert found == [pytest.approx(60000 * math.sqrt(1000), rel=1e-3)] * 10
    assert report.nonfinite == []


def test_halves_among_gradients_of_full_precision_do_not_overflow():
    parameters, plan = model_of([(1000,), (1000, 1)], torch.float16)
    parameters[0].grad = None
    parameters[0].grad_dtype = torch.float32
    parameters[0].grad = torch.ones(1000)
    parameters[1].grad = torch.full((1000, 1), 60000.0, dtype=torch.float16)
    _, report = each(parameters, plan)
    assert report.nonfinite == []


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found_where_it_is(poison):
    parameters, plan = model_of([(40, 40), *[(5,)] * 20, (40, 40), *[(6,)] * 20])
    parameters[9].grad[3] = parameters[21].grad[1, 1] = parameters[41].grad[0] = poison
    found = norms(gradients(parameters), plan)
    assert sorted(found.bad_on_host()) == [9, 21, 41]
    found.count_numbers(gradients(parameters), found.bad_on_host())
    report = found.report()
    assert report.nonfinite == [9, 21, 41]
    assert report.counts == {9: 1.0, 21: 1.0, 41: 1.0}


def test_shares_count_stacked_gradients_too():
    parameters, plan = model_of([(5,)] * 16)
    for parameter in parameters[:4]:
        parameter.grad.zero_()
    for parameter in parameters[4:6]:
        parameter.grad.fill_(1e-8)
    _, report = each(parameters, plan)
    assert report.shares == {"grad/zero_share": 0.25, "grad/vanishing_share": 0.125}


def test_gradients_that_come_and_go_between_passes():
    parameters, plan = model_of([(5,)] * 20 + [(40, 40)] * 3)
    kept = gradients(parameters)
    for missing in ((), (3, 21), (), range(1, 19), range(1, 23), (0,), ()):
        for place, parameter in enumerate(parameters):
            parameter.grad = None if place in missing else kept[place]
        found, report = each(parameters, plan)
        assert found == expected(parameters)
        assert report.shares["grad/zero_share"] == 0.0
    assert plan.uniform


def test_gradients_replaced_by_others_are_the_ones_measured():
    parameters, plan = model_of([(5,)] * 20)
    each(parameters, plan)
    for parameter in parameters:
        parameter.grad = torch.full((5,), 2.0)
    assert each(parameters, plan)[0] == [pytest.approx(math.sqrt(20))] * 20


@pytest.mark.parametrize("places", [range(3, 4), range(20)])
def test_parameters_given_other_shapes_are_measured_as_they_are(places):
    parameters, plan = model_of([(5,)] * 20)
    for place in places:
        parameters[place].grad = None
        parameters[place].data = torch.zeros(2, 4)
        parameters[place].grad = torch.randn(2, 4)
    for _ in range(2):
        assert each(parameters, plan)[0] == expected(parameters)


@pytest.mark.parametrize("places", [range(3, 4), range(20)])
def test_sparse_gradients_are_measured_one_by_one(places):
    parameters, plan = model_of([(5, 2)] * 20)
    for place in places:
        parameters[place].grad = torch.sparse_coo_tensor(
            [[3, 3]], [[1.0, 1.0], [1.0, 1.0]], (5, 2), check_invariants=True
        )
    true = [float(p.grad.to_dense().norm()) for p in parameters]
    for _ in range(2):
        assert each(parameters, plan)[0] == pytest.approx(true)


def test_gradients_that_are_not_contiguous_or_part_of_a_graph():
    parameters, plan = model_of([(4, 6)] * 12)
    for parameter in parameters:
        parameter.grad = torch.randn(6, 4).t().requires_grad_()
    assert each(parameters, plan)[0] == expected(parameters)


def test_the_number_of_operations_does_not_grow_with_the_model_and_none_reads():
    class Count(TorchDispatchMode):
        operations: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    for layers in (10, 100):
        parameters, plan = model_of([(5,), (40, 40)] * layers)
        Count.operations.clear()
        with Count():
            norms(gradients(parameters), plan)
        launched = [name for name in Count.operations if name not in ("detach", "view")]
        assert launched == ["_foreach_norm", "stack", "stack", "linalg_vector_norm", "cat"]


@pytest.mark.parametrize(("device", "as_listed"), [("cpu", False), ("meta", True)])
def test_only_on_the_cpu_are_gradients_stacked(device, as_listed):
    parameters = [nn.Parameter(torch.zeros(5 + number % 2, device=device)) for number in range(20)]
    order = Plan.of(torch.optim.SGD(parameters, lr=0.1), None).order(list(range(20)))
    assert (order.places == list(range(20))) is as_listed
    assert order.norms(parameters, None).shape == (20,)
