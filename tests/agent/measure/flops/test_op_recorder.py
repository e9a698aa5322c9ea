"""The recording of a step's operators gives way to the script, and leaves nothing behind."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from counted_step import counted_in, recorded_step
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

pytestmark = pytest.mark.usefixtures("nothing_compiled")
X = torch.randn(2, 4)


@pytest.fixture(autouse=True)
def no_callback_is_left():
    """One that is left writes into the next profiler of this thread as if that were its own."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    has_callbacks = library._ZN2at23hasThreadLocalCallbacksEv
    has_callbacks.restype = ctypes.c_bool
    assert not has_callbacks()
    yield
    assert not has_callbacks()


def loss_of(model):
    return model(X).sum()


def profiled(call):
    """What the call returns, and how many multiplications the script's profiler saw."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        made = call()
    return made, sum(event.name == "aten::mul" for event in profiler.events())


class Linear(nn.Linear):
    """Does something of the script's with its result. backward: when the gradient comes through."""

    def __init__(self, does, *, backward=False):
        super().__init__(4, 4)
        self.does, self.backward = does, backward

    def forward(self, x):
        made = super().forward(x)
        if not self.backward:
            return made if (other := self.does(made)) is None else other
        made.register_hook(self.does)
        return made


# ---- profilers of the script's


@pytest.mark.parametrize(("backward", "times"), [(False, 1), (True, 1), (True, 3)])
def test_a_script_may_profile_in_the_recorded_step(record, backward, times):
    """Also in several nodes of one pass, and after it: a callback of ours that stayed would write into them."""
    seen = []

    def double(x):
        made, count = profiled(lambda: x * 2)
        seen.append(count)
        return made

    model = nn.Sequential(nn.Linear(4, 4), *(Linear(double, backward=backward) for _ in range(times)))
    record(model)
    look = recorded_step(model, loss_of)
    assert set(seen) == {1}
    assert look.failed, "no other step is recorded: the next one would be in the way as well"
    assert counted_in(look, model).total == 0
    assert [profiled(lambda: X * 2)[1] for _ in range(20)] == [1] * 20


def test_backward_pass_inside_the_root_call_breaks_nothing_off(record):
    model = Linear(lambda made: made.sum().backward(retain_graph=True))
    record(model)
    assert not recorded_step(model, loss_of).broken_off


# ---- what is left behind


def test_no_range_that_the_script_names_leads_to_the_recorder(record):
    """At its end it would write into a profiler of the script's that has begun in the midst of it: a hang or an abort."""

    def begin_in_a_range(made):
        profiler = profile(activities=[ProfilerActivity.CPU])
        with record_function("a range"):
            profiler.start()
        made = made * 2
        profiler.stop()
        assert sum(event.name == "aten::mul" for event in profiler.events()) == 1
        return made

    model = Linear(begin_in_a_range)
    record(model)
    assert recorded_step(model, loss_of).failed
