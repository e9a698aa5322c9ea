"""Phases by events of a device: a fake clock stands for CUDA, the training is real.

The fake device works through what it is given in order and takes as long as the test says, however long the host takes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from agent.hooks.loops import sgd
from torch import nn

from perfagent.device import cuda_device_of
from perfagent.hooks.host_to_device import watch_copy
from perfagent.step.state import state

MAIN, OTHER = 1, 2


class Event:
    """Recorded at a moment of the device; passed once the device has come so far."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.device.done >= self.at

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Device:
    """now: how much work it was given, in seconds; done: how much of it is over."""

    def __init__(self) -> None:
        self.now = self.done = 0.0
        self.made = 0
        self.free: list[Event] = []
        self.stream = MAIN
        self.device = torch.device("cuda", 1)

    def work(self, seconds: float) -> None:
        self.now += seconds

    # what DeviceClock has

    def mark(self) -> Event:
        if self.free:
            event = self.free.pop()
        else:
            self.made += 1
            event = Event(self)
        event.record()
        return event

    def seconds(self, begin: Event, end: Event) -> float:
        assert end.query(), "read before the device had come so far"
        return begin.elapsed_time(end) / 1e3

    def release(self, events: list[Event]) -> None:
        self.free.extend(events)


@pytest.fixture
def without_driver(monkeypatch):
    """What a CUDA build of torch would ask the driver, where there is none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream", raising=False)


@pytest.fixture
def device(monkeypatch, without_driver):
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=device.stream))
    return device


class Worker(torch.autograd.Function):
    """Keeps the device busy in forward and backward."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.device = device
        device.work(0.03)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.work(0.06)
        return gradient, None


class Net(nn.Linear):
    def __init__(self, device):
        super().__init__(4, 1)
        self.device = device

    def forward(self, x):
        return Worker.apply(super().forward(x), self.device)


class Batch:
    """Stands for a tensor on the host whose copy to the device takes a while."""

    def __init__(self, device: Device, data: torch.Tensor) -> None:
        self.device, self.data = device, data
        self.is_cpu, self.is_cuda = True, False


def to_device(batch: Batch, where: str) -> SimpleNamespace:
    batch.device.work(0.02)
    return SimpleNamespace(data=batch.data, is_cpu=where == "cpu", is_cuda=where == "cuda")


def plain(model):
    return model(torch.ones(2, 4)).square()


def trained(record, device, *, model=None, optimizer=None, loss=plain, steps=4, finish=True):
    """A run of so many steps whose device has done all that it was given."""
    model = model or Net(device)
    optimizer = optimizer or sgd(model)
    recorded = record(model, optimizer=optimizer)
    state.current.clock, state.current.stream = device, MAIN
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).mean().backward()
        optimizer.step()
    if finish:
        device.done = device.now
    return recorded


def assert_each(recorded, first=2, **seconds):
    """From step `first` on each step has these phases, as long as this; None for one that there is not."""
    steps = [values for number, values in recorded.steps() if number >= first]
    assert len(steps) >= 2
    for values in steps:
        told = {name: values.get(f"phase/{name}_s") for name in seconds}
        assert told == {name: value and pytest.approx(value) for name, value in seconds.items()}


@pytest.fixture
def copy():
    return watch_copy(to_device)


def test_phases_are_the_devices_time_and_copies_are_one(record, device, copy):
    def loss(model):
        return model(copy(Batch(device, torch.ones(2, 4)), "cuda").data)

    assert_each(trained(record, device, loss=loss), h2d=0.02, forward=0.03, backward=0.06)


def test_a_copy_inside_of_forward_and_backward_is_taken_off(record, device, copy):
    class Copies(Net):
        def forward(self, batch):
            return super().forward(copy(batch, "cuda").data)

    model = Copies(device)
    model.weight.register_hook(lambda _: copy(Batch(device, torch.ones(1)), "cuda") and None)
    recorded = trained(record, device, model=model, loss=lambda model: model(Batch(device, torch.ones(2, 4))))
    assert_each(recorded, h2d=0.04, forward=0.03, backward=0.06)


def test_a_copy_on_another_stream_overlaps_and_is_not_counted(record, device, copy):
    def loss(model):
        device.stream = OTHER
        batch = copy(Batch(device, torch.ones(2, 4)), "cuda").data
        device.stream = MAIN
        return model(batch)

    assert_each(trained(record, device, loss=loss), h2d=None)


def test_a_tensor_that_stays_on_the_host_is_no_copy(record, device, copy):
    loss = lambda model: model(copy(Batch(device, torch.ones(2, 4)), "cpu").data)  # noqa: E731
    assert_each(trained(record, device, loss=loss, steps=40), h2d=None)
    assert device.made <= 40 * 7, "an event that was not needed is used again"
    assert len(device.free) == device.made


def test_a_row_waits_for_the_device_and_not_the_training(record, device):
    recorded = trained(record, device, steps=3, finish=False)
    assert not [number for number, values in recorded.sender.drain() if number > 1 and "lr" in values]
    device.done = device.now
    assert [number for number, _ in recorded.steps()][-2:] == [2, 3]


# ---- a device that is not the current one


@pytest.mark.parametrize(("places", "expected"), [(["cpu", "cuda:3"], 3), (["cpu"], 0), ([], 0)])
def test_the_device_of_a_run_is_where_its_parameters_are(places, expected) -> None:
    devices = [torch.device(place) for place in places]
    parameters = [SimpleNamespace(is_cuda=device.type == "cuda", device=device) for device in devices]
    assert cuda_device_of(SimpleNamespace(param_groups=[{"params": parameters}]), 0) == expected
