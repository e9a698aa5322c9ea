"""Rare looks at a step: they come by themselves, one at a time, and leave nothing behind."""

from __future__ import annotations

import copy
import pickle
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from perfagent.boundary import guard
from perfagent.signals.flops.op_formulas import Operators
from perfagent.signals.modules import ModuleTimes, parts_of
from perfagent.signals.scheduled_probes import IDLE_S, Looks
from perfagent.step.state import state

CALL = "_compiled_call_impl"


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Another test of this process may have compiled something, and such a process is looked at in another way."""
    torch._dynamo.reset()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_encoder = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        x = self.vision_encoder(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def attributes(model):
    return [
        (name, sorted(module.__dict__), len(module._forward_hooks)) for name, module in model.named_modules() if name
    ]


def step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(recorded, model, optimizer, x, steps):
    """Steps with the sender's part of the work after each."""
    for _ in range(steps):
        step(model, optimizer, x)
        recorded.rows += recorded.sender.drain()
        recorded.run._look()


class Clock:
    """Seconds by hand. ticks: how far each look at it moves it on."""

    def __init__(self, ticks=0.0):
        self.now, self.ticks = 0.0, ticks

    def __call__(self):
        self.now += self.ticks
        return self.now


def with_clock(recorded, clock, device=lambda: None):
    """The run's looks, on a clock of the test's. Asking takes no CPU, whatever else this machine does."""
    run = recorded.run
    looks = run._looks = Looks(run._investigator, recorded.sender, run._known_model, device, clock, cpu=lambda: 0.0)
    return looks


@pytest.fixture
def tower(record):
    model = Tower()
    return record(model), model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_operations_are_counted_anew_when_layers_are_unfrozen(record):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[0].requires_grad_(False)
    recorded = record(model)
    looks = with_clock(recorded, Clock(ticks=1.0))
    x = torch.randn(16, 64)

    def counted():
        train(recorded, model, optimizer, x, 30)
        return looks.flops.of(looks.flops._newest[0] + 1, 16, 0)

    assert counted() == 16 * 2 * (64 * 128 + 2 * 128)
    model[0].requires_grad_(True)
    assert counted() == 16 * 2 * (64 * 128 * 2 + 3 * 128)


def test_operations_per_second_come_by_themselves_and_stay(tower):
    recorded, model, optimizer = tower
    train(recorded, model, optimizer, torch.randn(16, 64), 30)
    series = recorded.of("flops_per_s")
    per_step = 16 * 2 * (64 * 512 * 5 + 3 * 64 * 64 * 3 + 64 * 3)
    seconds = dict(recorded.of("step_time_s"))
    assert len(series) >= 15
    assert all(value * seconds[number] == pytest.approx(per_step) for number, value in series)
    assert not recorded.of("mfu"), "there is no peak of a CPU"


def test_another_batch_size_is_counted_once_and_then_exact(tower):
    recorded, model, optimizer = tower
    clock = Clock()
    looks = with_clock(recorded, clock)
    train(recorded, model, optimizer, torch.randn(16, 64), 15)
    train(recorded, model, optimizer, torch.randn(4, 64), 3)
    clock.now += IDLE_S
    train(recorded, model, optimizer, torch.randn(4, 64), 12)
    assert set(looks.flops._known) == {(16, 0, 64), (4, 0, 64)}
    seconds = dict(recorded.of("step_time_s"))
    per_sample = 2 * (64 * 512 * 5 + 3 * 64 * 64 * 3 + 64 * 3)
    per_step = {number: value * seconds[number] for number, value in recorded.of("flops_per_s")}
    assert per_step[15] == pytest.approx(16 * per_sample)
    assert all(per_step[number] == pytest.approx(4 * per_sample) for number in range(16, 31))


class Pictures(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.Flatten(2))


def told_per_step(recorded):
    seconds = dict(recorded.of("step_time_s"))
    return {number: value * seconds[number] for number, value in recorded.of("flops_per_s")}


def test_pictures_of_another_resolution_are_counted_anew_and_those_seen_before_are_known(record):
    model = Pictures()
    recorded, optimizer, clock = record(model), torch.optim.SGD(model.parameters(), lr=0.001), Clock()
    with_clock(recorded, clock)
    for side in (32, 8, 32):
        train(recorded, model, optimizer, torch.randn(4, 3, side, side), 10)
        clock.now += IDLE_S
        train(recorded, model, optimizer, torch.randn(4, 3, side, side), 10)
    per_pixel = 4 * 2 * 9 * (3 * 8 * 2 + 8 * 4 * 3)
    told = told_per_step(recorded)
    assert all(
        value == pytest.approx(per_pixel * (8 * 8 if 20 < number <= 40 else 32 * 32)) for number, value in told.items()
    )
    assert set(range(10, 21)) | set(range(36, 61)) <= set(told)


def test_recordings_of_many_lengths_are_told_nothing(record):
    model = nn.Conv1d(1, 4, 3)
    recorded, optimizer, clock = record(model), torch.optim.SGD(model.parameters(), lr=0.001), Clock(ticks=0.1)
    looks = with_clock(recorded, clock)
    for length in range(20, 60):
        train(recorded, model, optimizer, torch.randn(4, 1, length), 1)
    assert not recorded.of("flops_per_s")
    assert not looks.flops._known


class Deep(nn.Sequential):
    """So many operators that what is recorded of a step takes room."""

    def __init__(self):
        super().__init__(*(layer for _ in range(80) for layer in (nn.Linear(8, 8), nn.ReLU())))


DEEP_STEP = 4 * 2 * 8 * 8 * (80 * 3 - 1)
"""Its operations on a batch of 4: the first layer's input needs no gradient."""


class Held(list):
    """What one thread recorded; a list that can be watched as it goes."""


@pytest.fixture
def held(monkeypatch):
    """Watches over what torch's recording handed over, the newest last."""
    found, disable = Held(), torch._C._autograd._disable_profiler_legacy
    found.most = 0  # events at once

    def disabled(*options):
        threads = [Held(events) for events in disable(*options)]
        found.most = max([found.most, *map(len, threads)])
        found.extend(weakref.ref(events) for events in threads)
        return threads

    monkeypatch.setattr(torch._C._autograd, "_disable_profiler_legacy", disabled)
    return found


def test_what_was_recorded_of_a_micro_step_is_gone_before_the_next_one(record, held):
    """15 MB of a model of 300 tensors, and a step may have a hundred of them."""
    model = Deep()
    recorded = record(model)
    looks = with_clock(recorded, Clock(ticks=0.001))
    optimizer, at_once = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(20):
        for _ in range(6):
            model(torch.randn(4, 8)).square().mean().backward()
            at_once.append(sum(one() is not None for one in held))
        optimizer.step()
        optimizer.zero_grad()
        recorded.rows += recorded.sender.drain()
        recorded.run._look()
    assert len(held) > 2 * 6, "a step was recorded"
    assert not any(at_once)
    (known,) = looks.flops._known.values()
    assert known.total == 6 * DEEP_STEP
    recorded.finish()


@pytest.mark.long
def test_a_step_of_a_large_model_is_read_in_parts(record, held):
    """What waits for the end of a call waits in one array, and once that is freed glibc keeps as much and more for
    good."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 40, enable_nested_tensor=False)
    recorded = record(model)
    looks = with_clock(recorded, Clock(ticks=0.001))
    train(recorded, model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(2, 4, 16), 20)
    (known,) = looks.flops._known.values()
    layer = 2 * 8 * (3 * 16 * 16 + 16 * 16 + 2 * 16 * 32) + 2 * 2 * 2 * 2 * 4 * 4 * 8
    backward = 2 * 40 * layer - 2 * 8 * 3 * 16 * 16  # the first layer's input needs no gradient
    assert known.total == pytest.approx(40 * layer + backward, rel=0.02)
    assert 0 < held.most < 3000, "of 25,000"
    recorded.finish()


@pytest.mark.long
def test_a_model_that_calls_its_modules_often_is_read_in_parts_too(record, held):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            state = None
            for at in x.unbind(1):
                state = self.cell(at, state)
            return self.head(state[0])

    model = Cells()
    recorded = record(model)
    looks = with_clock(recorded, Clock(ticks=0.001))
    train(recorded, model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(2, 150, 8), 20)
    assert [known.products > 0 for known in looks.flops._known.values()] == [True]
    assert 0 < held.most < 4000, "of 10,000 in each pass"
    assert attributes(model) == attributes(Cells())
    recorded.finish()


def test_a_step_that_ends_within_its_own_backward_pass_is_not_counted(record):
    """Of an optimizer that steps while gradients come, the rest of the pass is another step's."""
    model = Deep()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    hook = parameters[len(parameters) // 2].register_post_accumulate_grad_hook(lambda _: optimizer.step())
    recorded = record(model)
    looks = with_clock(recorded, Clock(ticks=0.001))
    for _ in range(40):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.zero_grad()
        recorded.rows += recorded.sender.drain()
        recorded.run._look()
    hook.remove()  # it holds the optimizer, which holds the parameter, and no collector sees through that
    assert looks.flops._wasted, "it was tried"
    assert not looks.flops._known
    recorded.finish()


def test_a_recording_that_cannot_be_read_is_no_count_and_no_trouble(record, monkeypatch):
    model = Deep()
    recorded = record(model)
    looks = with_clock(recorded, Clock(ticks=0.001))
    monkeypatch.setattr(Operators, "_take", lambda *_: 1 / 0)
    train(recorded, model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4, 8), 20)
    assert not looks.flops.tells
    assert not torch.autograd._profiler_enabled()
    recorded.finish()
    assert not recorded.of("flops_per_s")
    assert guard.failures.pop("perfagent.signals.flops.step_recording") == 1, "told once"


def test_an_event_of_a_recording_is_asked_for_little():
    """One question an event. Names are judged once each, and shapes are asked of what computes: most operators do
    not."""
    profiler = torch._C._profiler
    model, inputs = Deep(), torch.randn(4, 8)
    torch._C._autograd._enable_profiler_legacy(
        profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, True, False, False, False, False, profiler._ExperimentalConfig()
        )
    )
    try:
        model(inputs).sum().backward()
    finally:
        (events,) = torch._C._autograd._disable_profiler_legacy()
    calls, outer = Counter(), sys.getprofile()
    sys.setprofile(lambda _frame, event, called: calls.update([called.__name__] if event == "c_call" else []))
    try:
        Operators(backward=True).read(events)
    finally:
        sys.setprofile(outer)
    assert calls["name"] == len(events) > 1000
    assert not calls["kind"]
    assert calls["fullmatch"] < len(events) / 20
    assert calls["shapes"] <= 3 * 80


def test_while_no_look_is_due_that_is_asked_once_a_second(tower, monkeypatch):
    recorded, model, optimizer = tower
    asked, clock = [], Clock()
    looks = with_clock(recorded, clock)
    monkeypatch.setattr(looks, "_notice_what_is_trained", lambda: asked.append(clock.now))
    train(recorded, model, optimizer, torch.randn(4, 64), 20)
    clock.now += IDLE_S
    asked.clear()
    for _ in range(10):
        looks.poll()
    assert len(asked) == 1
    clock.now += IDLE_S
    looks.poll()
    assert len(asked) == 2


def test_shares_of_the_parts_of_a_model(tower):
    recorded, model, optimizer = tower
    before = attributes(model)
    train(recorded, model, optimizer, torch.randn(256, 64), 30)
    recorded.finish()
    told = [values for _, values in recorded.rows if "module_share/head" in values]
    assert len(told) == 1, "one look within a minute"
    parts = ("vision_encoder", "layers", "head")
    assert set(told[0]) >= {f"module_share/{part}" for part in parts}
    assert 0.5 < sum(told[0][f"module_share/{part}"] for part in parts) <= 1.0
    assert told[0]["module_share/vision_encoder"] > told[0]["module_share/head"] > 0.0
    assert attributes(model) == before


def test_a_model_with_one_child_that_is_nearly_all_of_it_is_looked_into():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = Tower(), nn.Linear(1, 1)

    inside = ["vision_encoder", "vision_encoder.0", "vision_encoder.1", "vision_encoder.2", "layers", "head"]
    assert list(parts_of(Tower())) == inside, "the encoder holds most of it"
    assert list(parts_of(nn.Sequential(Tower()))) == [f"0.{name}" for name in inside]
    assert {"inner", "inner.layers", "inner.head", "scale"} <= set(parts_of(Wrapper()))
    assert len(parts_of(Tower())["layers"]) == 3
    assert parts_of(nn.Linear(2, 2)) == {}


def test_layers_in_lists_of_lists_and_in_modules_that_only_hold_others_are_parts():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(
                [nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), nn.ModuleDict({"last": nn.Linear(2, 2)})]
            )
            self.heads = nn.Module()
            self.heads.value, self.heads.policy = nn.Linear(2, 1), nn.Linear(2, 3)

    model = Stages()
    (first, second), last = model.stages[0], model.stages[1]["last"]
    assert parts_of(model) == {"stages": [first, second, last], "heads": [model.heads.value, model.heads.policy]}


def test_timers_are_there_in_the_root_s_call_only(record):
    seen = []

    class Looks(Tower):
        def forward(self, x):
            seen.append(self.head.__dict__.get(CALL))
            copy.deepcopy(self.head)
            pickle.loads(pickle.dumps(self.head))
            return super().forward(x)

    model = Looks()
    recorded = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer, torch.randn(2, 64))
    while state.current.probe is not None:
        step(model, optimizer, torch.randn(2, 64))
    seen.clear()
    look = ModuleTimes(state.current, model)
    assert look.at_boundary()
    step(model, optimizer, torch.randn(2, 64))
    assert model.head.__dict__.get(CALL) is None
    assert not look.at_boundary()
    step(model, optimizer, torch.randn(2, 64))
    assert [timer is not None for timer in seen] == [True, False]
    assert look.ready()
    assert look.shares()["module_share/head"] > 0.0
    recorded.finish()


def test_an_exception_in_the_timed_call_leaves_nothing_behind(tower):
    _, model, optimizer = tower
    for _ in range(3):
        step(model, optimizer, torch.randn(2, 64))
    state.current.probe = None
    look = ModuleTimes(state.current, model)
    assert look.at_boundary()
    with pytest.raises(RuntimeError, match=r"shapes|size"):
        model(torch.randn(2, 3))
    assert all(CALL not in module.__dict__ for name, module in model.named_modules() if name)
    look.close()
    assert state.current.probe is None


def test_the_end_of_a_run_takes_a_look_that_is_going_on_out(tower):
    recorded, model, optimizer = tower
    backward = torch.autograd.backward
    for _ in range(40):
        step(model, optimizer, torch.randn(2, 64))
        recorded.rows += recorded.sender.drain()
        recorded.run._look()
        if recorded.run._looks._look is not None and recorded.run._looks._look.step:
            break
    else:
        raise AssertionError("no look began")
    recorded.finish()
    assert backward is not torch.autograd.backward
    assert all(CALL not in module.__dict__ for module in model.modules())
    assert not torch.autograd._profiler_enabled()


def test_a_compiled_model_keeps_its_graph_and_its_results(record):
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    def trained(watched):
        torch.manual_seed(5)
        model = Tower()
        compiled = torch.compile(model, backend="aot_eager")
        recorded = record(model) if watched else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(16, 64)
        if recorded is None:
            for _ in range(20):
                step(compiled, optimizer, x)
        else:
            train(recorded, compiled, optimizer, x, 20)
        return recorded, [parameter.detach().clone() for parameter in model.parameters()]

    _, weights = trained(False)
    torch._dynamo.reset()
    counters.clear()
    recorded, watched_weights = trained(True)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))
    seconds = dict(recorded.of("step_time_s"))
    per_step = 16 * 2 * (64 * 512 * 5 + 3 * 64 * 64 * 3 + 64 * 3)
    series = recorded.of("flops_per_s")
    assert series
    assert all(value * seconds[number] == pytest.approx(per_step) for number, value in series)
    assert not any(name.startswith("module_share/") for _, values in recorded.rows for name in values)
    torch._dynamo.reset()


def test_a_clone_that_is_made_while_a_step_is_timed_computes_with_its_own_weights(record):
    """Meta-learning copies a module's `__dict__`, whatever stands in it just then."""

    class Learner(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            clone = nn.Linear.__new__(nn.Linear)
            clone.__dict__ = dict(self.second.__dict__)
            clone._parameters = {name: torch.zeros_like(p) for name, p in self.second._parameters.items()}
            self.clones = CALL in clone.__dict__, clone(self.first(x)).abs().sum().item()
            return self.second(self.first(x))

    model = Learner()
    recorded = record(model)
    times = ModuleTimes(recorded.run._progress, model)
    times.step = 1
    times.call(model, (torch.ones(2, 4),), {})
    assert model.clones == (True, 0.0)
