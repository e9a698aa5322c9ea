"""Units that are zero for a whole batch, counted by hooks that are gone when the model's call returns."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from perfagent.boundary import guard
from perfagent.measure.dead_units import LEAST_ROWS, DeadUnits, activations_of

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def look(model, batch):
    """Dead shares by module, where there are any yet."""
    told = []
    output = DeadUnits(model, told.append).call(model, (batch,), {})
    assert not guard.failures
    assert output.requires_grad or not any(True for _ in model.parameters())
    return {
        name: share
        for one in told
        for reading, names in one.readings
        for name, share in zip(names, reading.values(), strict=True)
    }


def dead(layer, units, others=1e3):
    """Its first units are off whatever comes, all others on."""
    with torch.no_grad():
        layer.bias[:units], layer.bias[units:] = -1e6, others
    return layer


class Sum(nn.Module):
    """A residual block: the sum of two convolutions goes through the activation."""

    def __init__(self, *, inplace):
        super().__init__()
        self.first, self.second = dead(nn.Conv2d(3, 8, 3, padding=1), 4), nn.Conv2d(3, 8, 1)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x):
        return self.act(self.first(x) + self.second(x))


def then_relu(layer, *more):
    return nn.Sequential(layer, nn.ReLU(), *more)


SHARES = {
    "units of a linear": (lambda: then_relu(dead(nn.Linear(8, 10), 3), nn.Linear(10, 4)), (LEAST_ROWS, 8), {"1": 0.3}),
    "channels of an image": (lambda: then_relu(dead(nn.Conv2d(3, 8, 3), 2)), (4, 3, 6, 6), {"1": 0.25}),
    "last of four dimensions": (lambda: then_relu(dead(nn.Linear(8, 32), 16)), (8, 6, 6, 8), {"1": 0.5}),
    "convolution before linears": (
        lambda: then_relu(dead(nn.Conv1d(1, 64, 3, padding=1), 32), nn.Flatten(), nn.Linear(64 * 40, 64), nn.ReLU()),
        (32, 1, 40), {"1": 0.5},  # of the second there are too few rows
    ),
    "a sum": (lambda: Sum(inplace=False), (4, 3, 8, 8), {"act": 0.5}),
    "a sum in place": (lambda: Sum(inplace=True), (4, 3, 8, 8), {"act": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARES)
def test_units_that_are_zero_for_every_sample_are_dead(kind):
    make, shape, expected = SHARES[kind]
    torch.manual_seed(0)
    assert look(make(), torch.randn(shape)) == pytest.approx(expected)


# ---- small batches, and one module for several layers


@pytest.mark.parametrize("rows", [1, LEAST_ROWS - 1])
def test_rows_of_small_batches_are_waited_for(rows):
    """Of a random network's units many look dead in two rows, and none in enough of them."""
    torch.manual_seed(0)
    needed = -(-LEAST_ROWS // rows)
    for model, share in (
        (then_relu(nn.Linear(32, 256), nn.Linear(256, 1)), 0.0), (then_relu(dead(nn.Linear(32, 256), 64)), 0.25),
    ):  # fmt: skip
        told = [look(model, torch.randn(rows, 32)) for _ in range(2 * needed)]
        assert [*filter(None, told)] == [{"1": share}] * 2
        assert told[needed - 1] == told[-1] == {"1": share}, "once there are enough rows, and then anew"


# ---- which models, and what is left behind


def test_compiled_models_are_left_alone():
    model = then_relu(nn.Linear(4, 4))
    assert activations_of(model)
    compiled = torch.compile(model, backend="eager")
    assert not activations_of(model)
    assert not activations_of(compiled)
    torch._dynamo.reset()
    assert activations_of(model)


def test_a_model_without_relu_has_no_such_series():
    assert not DeadUnits(nn.Sequential(nn.Linear(4, 4), nn.GELU()), lambda _: None)


@pytest.mark.parametrize("width", [1, 2])
def test_nothing_is_left_on_the_model(width):
    """Also where its call fails."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    before = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    if width == 2:
        with pytest.raises(RuntimeError, match="shapes"):
            look(model, torch.randn(2, 2))
    else:
        look(model, torch.randn(2, 4))
    assert not any(module._forward_hooks for module in model.modules())
    assert {name: sorted(module.__dict__) for name, module in model.named_modules()} == before
    pickle.loads(pickle.dumps(copy.deepcopy(model)))
