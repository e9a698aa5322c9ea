"""Units that are zero for a whole batch, counted by hooks that are gone when the model's call returns."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from perfagent.boundary import guard
from perfagent.signals.dead_units import LEAST_ROWS, MOST_MODULES, DeadUnits, activations_of

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def look(model, batch):
    """Dead shares by module, where there are any yet."""
    told = []
    output = DeadUnits(model, told.append).call(model, (batch,), {})
    assert not guard.failures
    assert output.requires_grad or not any(True for _ in model.parameters())
    return told[0].shares() if told else {}


def looks(model, rows, times):
    """What each look at a small batch tells."""
    return [look(model, torch.randn(rows, 32)) for _ in range(times)]


def dead(layer, units, others=1e3):
    """Its first units are off whatever comes, all others on."""
    with torch.no_grad():
        layer.bias[:units], layer.bias[units:] = -1e6, others
    return layer


def alive(layer):
    return dead(layer, 0)


class Shared(nn.Module):
    """One activation behind several layers, as many models have it."""

    def __init__(self, *layers, act=None):
        super().__init__()
        self.layers, self.act = nn.ModuleList(layers), act or nn.ReLU()

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class Sum(nn.Module):
    """A residual block: the sum of two convolutions goes through the activation."""

    def __init__(self, *, inplace):
        super().__init__()
        self.first, self.second = dead(nn.Conv2d(3, 8, 3, padding=1), 4), nn.Conv2d(3, 8, 1)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x):
        return self.act(self.first(x) + self.second(x))


class Unknown(nn.Module):
    """Nothing tells where the units are: attention's product, reshaped."""

    def __init__(self):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.randn(8, 8)), nn.ReLU()

    def forward(self, x):
        return self.act(torch.einsum("bchw,cd->bdhw", x, self.weight))


def then_relu(layer, *more):
    return nn.Sequential(layer, nn.ReLU(), *more)


SHARES = {
    "units of a linear": (lambda: then_relu(dead(nn.Linear(8, 10), 3), nn.Linear(10, 4)), (LEAST_ROWS, 8), {"1": 0.3}),
    "channels of an image": (lambda: then_relu(dead(nn.Conv2d(3, 8, 3), 2)), (4, 3, 6, 6), {"1": 0.25}),
    "channels of a signal": (lambda: then_relu(dead(nn.Conv1d(3, 8, 3), 2)), (5, 3, 16), {"1": 0.25}),
    "features of a token": (lambda: then_relu(dead(nn.Linear(3, 8), 2)), (13, 5, 3), {"1": 0.25}),
    "last of four dimensions": (lambda: then_relu(dead(nn.Linear(8, 32), 16)), (8, 6, 6, 8), {"1": 0.5}),
    "convolution before linears": (
        lambda: then_relu(dead(nn.Conv1d(1, 64, 3, padding=1), 32), nn.Flatten(), nn.Linear(64 * 40, 64), nn.ReLU()),
        (32, 1, 40), {"1": 0.5},  # of the second there are too few rows
    ),
    "a sum": (lambda: Sum(inplace=False), (4, 3, 8, 8), {"act": 0.5}),
    "a sum in place": (lambda: Sum(inplace=True), (4, 3, 8, 8), {"act": 0.5}),
    "nobody knows which dimension": (Unknown, (4, 8, 8, 8), {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARES)
def test_units_that_are_zero_for_every_sample_are_dead(kind):
    make, shape, expected = SHARES[kind]
    torch.manual_seed(0)
    assert look(make(), torch.randn(shape)) == pytest.approx(expected)


def test_one_living_sample_or_nan_is_not_dead():
    model, batch = then_relu(nn.Identity()), -torch.ones(LEAST_ROWS, 2)
    batch[3, 0] = 0.5
    assert look(model, batch) == {"1": 0.5}
    assert look(model, torch.full((LEAST_ROWS, 2), float("nan"))) == {"1": 0.0}


# ---- small batches, and one module for several layers


@pytest.mark.parametrize("rows", [1, 2, 4, LEAST_ROWS - 1])
def test_rows_of_small_batches_are_waited_for(rows):
    """Of a random network's units many look dead in two rows, and none in enough of them."""
    torch.manual_seed(0)
    model, needed = then_relu(nn.Linear(32, 256), nn.Linear(256, 1)), -(-LEAST_ROWS // rows)
    told = looks(model, rows, 2 * needed)
    assert [*filter(None, told)] == [{"1": 0.0}] * 2
    assert told[needed - 1] == told[-1] == {"1": 0.0}, "once there are enough rows, and then anew"
    assert looks(then_relu(dead(nn.Linear(32, 256), 64)), rows, needed)[-1] == {"1": 0.25}


def test_what_small_batches_told_goes_with_the_model():
    model = then_relu(nn.Linear(32, 8))
    looks(model, 2, 3)
    gone = weakref.ref(model[1])
    del model
    gc.collect()
    assert gone() is None


def test_a_module_behind_several_layers_has_the_units_of_all():
    model = Shared(alive(nn.Linear(32, 48)), dead(nn.Linear(48, 16), 16))
    assert look(model, torch.randn(LEAST_ROWS, 32)) == {"act": 0.25}
    assert looks(model, 40, 4) == [{}, {"act": 0.25}, {}, {"act": 0.25}]


def test_calls_with_the_same_units_are_looked_at_once():
    """A recurrent network's: a unit that is off in its first step may be on in the others, and is no other unit
    there."""
    model = Shared(*[dead(nn.Linear(32, 32), 8)] * 3)
    assert look(model, torch.randn(LEAST_ROWS, 32)) == {"act": 0.25}
    assert looks(model, 40, 2) == [{}, {"act": 0.25}], "its rows count once"


def test_units_of_a_call_that_has_too_few_rows_are_waited_for():
    """A head without positions behind convolutions with many."""
    model = Shared(alive(nn.Conv2d(3, 8, 3)), nn.Flatten(), dead(nn.Linear(8 * 16, 8), 8))
    assert [look(model, torch.randn(32, 3, 6, 6)) for _ in range(2)] == [{}, {"act": 0.5}]


def test_units_of_a_call_that_came_once_are_not_waited_for():
    model = Shared(alive(nn.Linear(32, 8)), nn.Linear(8, 8))
    assert looks(model, 40, 1) == [{}]
    model.layers = model.layers[:1]
    assert looks(model, 40, 1) == [{"act": 0.0}]


# ---- which models, and what is left behind


def test_compiled_models_are_left_alone():
    model = then_relu(nn.Linear(4, 4))
    assert activations_of(model)
    compiled = torch.compile(model, backend="eager")
    assert not activations_of(model)
    assert not activations_of(compiled)


def test_a_deep_model_is_looked_at_in_places():
    names = [name for name, _ in activations_of(nn.Sequential(*(nn.ReLU() for _ in range(1000))))]
    assert MOST_MODULES // 2 < len(names) <= MOST_MODULES
    assert int(names[-1]) > 900


def test_a_model_without_relu_has_no_such_series():
    assert not DeadUnits(nn.Sequential(nn.Linear(4, 4), nn.GELU()), lambda _: None)


def test_where_no_value_can_be_taken_of_the_device_there_is_no_row():
    """Inside of a CUDA graph's capture, or behind a sender that is stuck: it cost the step its row, by a division by
    zero."""
    assert look(then_relu(nn.Linear(4, 8)).to("meta"), torch.randn(LEAST_ROWS, 4, device="meta")) == {}


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


class CopiesItself(nn.Sequential):
    """In the midst of its call."""

    def forward(self, x):
        self.made = pickle.dumps(list(self)), copy.deepcopy(list(self)), super().forward(x)
        return self.made[-1]


def test_a_model_may_copy_its_parts_in_the_midst_of_the_call():
    model, x = CopiesItself(dead(nn.Linear(8, 10), 5), nn.ReLU(), nn.Linear(10, 4)), torch.ones(LEAST_ROWS, 8)
    assert look(model, x) == {"1": 0.5}
    pickled, copied, output = model.made
    assert b"perfagent" not in pickled
    for parts in (pickle.loads(pickled), copied):
        assert torch.equal(nn.Sequential(*parts)(x), output)
