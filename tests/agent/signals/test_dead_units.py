"""Units that are zero for a whole batch, counted by hooks that are gone when the model's call returns."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from perfagent.boundary import guard
from perfagent.signals.dead_units import LEAST_ROWS, MOST_MODULES, DeadUnits, _suspects, activations_of


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch):
    """What other tests compiled in this process."""
    import torch._dynamo.eval_frame as eval_frame

    monkeypatch.setattr(eval_frame, "cached_backends", {})


def looked_at(model, batch):
    """Dead shares by module, and the output."""
    found = {}
    probe = DeadUnits(model, lambda shares: found.update(shares.shares()))
    assert probe
    output = probe.call(model, (batch,), {})
    assert not guard.failures
    return found, output


def dead(layer, units):
    with torch.no_grad():
        layer.bias[:units] = -1e6
    return layer


def test_units_that_are_zero_for_every_sample_are_dead():
    model = nn.Sequential(dead(nn.Linear(8, 10), 3), nn.ReLU(), nn.Linear(10, 4))
    with torch.no_grad():
        model[0].bias[3:] = 1e6
    found, output = looked_at(model, torch.randn(LEAST_ROWS, 8))
    assert found == {"1": pytest.approx(0.3)}
    assert output.shape == (LEAST_ROWS, 4)
    assert output.requires_grad


def test_a_unit_that_lives_for_one_sample_is_not_dead():
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    batch = -torch.ones(LEAST_ROWS, 2)
    batch[3, 0] = 0.5
    assert looked_at(model, batch)[0] == {"1": 0.5}


@pytest.mark.parametrize(
    ("first", "batch", "share"),
    [
        (dead(nn.Conv2d(3, 8, 3), 2), torch.randn(4, 3, 6, 6), 0.25),
        (dead(nn.Conv1d(3, 8, 3), 2), torch.randn(5, 3, 16), 0.25),
        (dead(nn.Linear(3, 8), 2), torch.randn(13, 5, 3), 0.25),
    ],
    ids=["channels of an image", "channels of a signal", "features of a token"],
)
def test_units_are_channels_or_features(first, batch, share):
    with torch.no_grad():
        first.bias[2:] = 1e3
    assert looked_at(nn.Sequential(first, nn.ReLU()), batch)[0] == {"1": share}


def test_nan_is_not_dead():
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    assert looked_at(model, torch.full((LEAST_ROWS, 2), float("nan")))[0] == {"1": 0.0}


def test_where_no_value_can_be_taken_of_the_device_there_is_no_row_of_it(monkeypatch):
    """Inside of a CUDA graph's capture, or behind a sender that is stuck: it cost the step its row, by a division by
    zero."""
    monkeypatch.setattr("perfagent.signals.dead_units.collect", lambda _tensor: None)
    told = []
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    DeadUnits(model, told.append).call(model, (torch.randn(LEAST_ROWS, 4),), {})
    assert not guard.failures
    assert told == []


def test_nothing_is_left_on_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    before = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    looked_at(model, torch.randn(2, 4))
    assert not any(module._forward_hooks for module in model.modules())
    assert {name: sorted(module.__dict__) for name, module in model.named_modules()} == before
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))


def test_a_call_that_fails_leaves_nothing_either():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 1))
    probe = DeadUnits(model, lambda _: None)
    with pytest.raises(RuntimeError, match="shapes"):
        probe.call(model, (torch.randn(2, 4),), {})
    assert not any(module._forward_hooks for module in model.modules())


def test_compiled_models_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert activations_of(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert not activations_of(model)
    assert not activations_of(compiled)


def test_a_deep_model_is_looked_at_in_places():
    model = nn.Sequential(*(nn.ReLU() for _ in range(1000)))
    names = [name for name, _ in activations_of(model)]
    assert MOST_MODULES // 2 < len(names) <= MOST_MODULES
    assert int(names[-1]) > 900


def test_a_model_without_relu_has_no_such_series():
    assert not DeadUnits(nn.Sequential(nn.Linear(4, 4), nn.GELU()), lambda _: None)


def small_batches(model, rows, looks):
    """What each look at a small batch tells."""
    return [looked_at(model, torch.randn(rows, 32))[0] for _ in range(looks)]


@pytest.mark.parametrize("rows", [1, 2, 4, 63])
def test_units_of_a_random_network_are_not_dead_because_the_batch_is_small(rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
    needed = -(-LEAST_ROWS // rows)
    told = small_batches(model, rows, 2 * needed)
    assert [*filter(None, told)] == [{"1": 0.0}] * 2
    assert told[needed - 1] == told[-1] == {"1": 0.0}, "once there are enough rows, and then anew"


def test_small_batches_find_dead_units_together():
    torch.manual_seed(0)
    model = nn.Sequential(dead(nn.Linear(32, 256), 64), nn.ReLU(), nn.Linear(256, 1))
    assert small_batches(model, 8, 8)[-1] == {"1": 0.25}


def test_what_small_batches_told_goes_with_the_model():
    model = nn.Sequential(nn.Linear(32, 8), nn.ReLU())
    gc.collect()  # models of other tests
    before = len(_suspects)
    small_batches(model, 2, 3)
    assert len(_suspects) == before + 1
    del model
    gc.collect()
    assert len(_suspects) == before


class _Shared(nn.Module):
    """One activation behind several layers, as many models have it."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.act = nn.ModuleList(layers), nn.ReLU()

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


def test_a_module_that_is_called_for_several_layers_has_the_units_of_all():
    model = _Shared(nn.Linear(32, 48), dead(nn.Linear(48, 16), 16))
    with torch.no_grad():
        model.layers[0].bias[:] = 1e3
    assert looked_at(model, torch.randn(LEAST_ROWS, 32))[0] == {"act": 0.25}
    assert small_batches(model, 40, 4) == [{}, {"act": 0.25}, {}, {"act": 0.25}]


def test_calls_with_the_same_units_are_looked_at_once():
    """A recurrent network's: a unit that is off in its first step may be on in the others, and is no other unit
    there."""
    layer = nn.Linear(32, 32)
    model = _Shared(layer, layer, layer)
    with torch.no_grad():
        layer.bias[:8] = -1e6
        layer.bias[8:] = 1e3
    assert looked_at(model, torch.randn(LEAST_ROWS, 32))[0] == {"act": 0.25}
    assert small_batches(model, 40, 2) == [{}, {"act": 0.25}], "its rows count once"


def test_units_of_a_call_that_has_too_few_rows_are_waited_for():
    """A head without positions behind convolutions with many."""
    model = _Shared(nn.Conv2d(3, 8, 3), nn.Flatten(), dead(nn.Linear(8 * 16, 8), 8))
    with torch.no_grad():
        model.layers[0].bias[:] = 1e3
    assert [looked_at(model, torch.randn(32, 3, 6, 6))[0] for _ in range(2)] == [{}, {"act": 0.5}]


def test_units_of_a_call_that_came_once_are_not_waited_for():
    model = _Shared(nn.Linear(32, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model.layers[0].bias[:] = 1e3
    assert small_batches(model, 40, 1) == [{}]
    model.layers = model.layers[:1]
    assert small_batches(model, 40, 1) == [{"act": 0.0}]


class _Block(nn.Module):
    """A residual block: the sum of two convolutions goes through the activation."""

    def __init__(self, *, inplace):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x):
        return self.act(self.first(x) + self.second(x))


class _Unknown(nn.Module):
    """Nothing tells where the units are: attention's product, reshaped."""

    def __init__(self):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.randn(8, 8)), nn.ReLU()

    def forward(self, x):
        return self.act(torch.einsum("bchw,cd->bdhw", x, self.weight))


def _half_dead(*modules, bias):
    with torch.no_grad():
        bias[: len(bias) // 2] = -1e3
    return nn.Sequential(*modules)


def _looked_at(model, x):
    told = []
    DeadUnits(model, told.append).call(model, (x,), {})
    return told[0].shares() if told else {}


def test_units_of_a_linear_are_in_the_last_of_four_dimensions():
    linear = nn.Linear(8, 32)
    shares = _looked_at(_half_dead(linear, nn.ReLU(), bias=linear.bias), torch.randn(8, 6, 6, 8))
    assert shares == {"1": pytest.approx(0.5, abs=0.1)}


def test_channels_of_a_convolution_are_the_second_dimension_whatever_linears_there_are():
    convolution = nn.Conv1d(1, 64, 3, padding=1)
    model = _half_dead(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(64 * 40, 64), nn.ReLU(), bias=convolution.bias)
    assert _looked_at(model, torch.randn(32, 1, 40))["1"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_sum_has_its_units_where_its_parts_have_them(inplace):
    block = _Block(inplace=inplace)
    with torch.no_grad():
        block.first.bias[:4] = -1e3
    assert _looked_at(block, torch.randn(4, 3, 8, 8)) == {"act": pytest.approx(0.5)}


def test_where_nothing_says_which_dimension_the_units_are_in_nothing_is_told():
    assert _looked_at(_Unknown(), torch.randn(4, 8, 8, 8)) == {}


class CopiesItself(nn.Sequential):
    """In the midst of its call."""

    def forward(self, x):
        self.made = pickle.dumps(list(self)), copy.deepcopy(list(self))
        return super().forward(x)


def test_a_model_may_copy_and_pickle_its_parts_in_the_midst_of_the_call():
    model = CopiesItself(dead(nn.Linear(8, 10), 5), nn.ReLU(), nn.Linear(10, 4))
    found, output = looked_at(model, torch.ones(LEAST_ROWS, 8))
    pickled, copied = model.made
    assert found["1"] >= 0.5
    assert b"perfagent" not in pickled
    for parts in (pickle.loads(pickled), copied):
        assert torch.equal(nn.Sequential(*parts)(torch.ones(LEAST_ROWS, 8)), output)
    assert not guard.failures
