"""Phases by events of a device: the events are fakes (fake_streams.py), the training is real."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from agent.hooks.loops import sgd
from fake_streams import Devices, Event
from torch import nn

from perfagent.device import DeviceClock
from perfagent.hooks.host_to_device import watch_copy
from perfagent.step.state import state

PLACE = torch.device("xpu", 0)


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

    def __init__(self, device: Devices, data: torch.Tensor) -> None:
        self.device, self.data = device, data
        self.is_cpu = True


def to_device(batch: Batch, where: str) -> SimpleNamespace:
    batch.device.work(0.02)
    return SimpleNamespace(data=batch.data, is_cpu=where == "cpu")


def plain(model):
    return model(torch.ones(2, 4)).square()


def trained(record, devices, *, model=None, optimizer=None, loss=plain, steps=4, finish=True):
    """A run of so many steps whose device has done all that it was given."""
    model = model or Net(devices)
    optimizer = optimizer or sgd(model)
    recorded = record(model, optimizer=optimizer)
    state.current.clock = DeviceClock(PLACE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).mean().backward()
        optimizer.step()
    if finish:
        devices.finish()
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


@pytest.mark.parametrize(
    ("stream", "where", "h2d"), [("own", "xpu", 0.02), ("another", "xpu", None), ("own", "cpu", None)]
)
def test_phases_are_the_devices_time_and_copies_are_one(record, devices, copy, stream, where, h2d):
    """A copy on another stream overlaps, and a tensor that stays on the host is none."""

    def loss(model):
        with devices.stream() if stream == "another" else nullcontext():
            batch = copy(Batch(devices, torch.ones(2, 4)), where).data
        return model(batch)

    recorded = trained(record, devices, loss=loss, steps=40)
    assert_each(recorded, h2d=h2d, **({"forward": 0.03, "backward": 0.06} if where == "xpu" and h2d else {}))
    assert h2d or stream == "another" or Event.made <= 40 * 7, "an event that was not needed is used again"


def test_a_copy_inside_of_forward_and_backward_is_taken_off(record, devices, copy):
    class Copies(Net):
        def forward(self, batch):
            return super().forward(copy(batch, "xpu").data)

    model = Copies(devices)
    model.weight.register_hook(lambda _: copy(Batch(devices, torch.ones(1)), "xpu") and None)
    recorded = trained(record, devices, model=model, loss=lambda model: model(Batch(devices, torch.ones(2, 4))))
    assert_each(recorded, h2d=0.04, forward=0.03, backward=0.06)


def test_a_row_waits_for_every_stream_that_a_mark_lies_on(record, devices):
    sides = []

    def loss(model):
        with devices.stream() as side:
            sides.append(side)
            return plain(model)

    recorded = trained(record, devices, loss=loss)
    assert not [number for number, values in recorded.sender.drain() if number > 1 and "lr" in values]
    for side in sides:
        side.done = side.now
    assert [number for number, _ in recorded.steps()][-2:] == [3, 4]
    assert not recorded.sender.counters


def test_the_stream_that_computes_follows_the_backward_pass(record, devices, copy):
    """The first steps warm up for a graph, on a stream of their own."""

    def loss(model):
        return model(copy(Batch(devices, torch.ones(2, 4)), "xpu").data)

    optimizer = sgd(model := Net(devices))
    with devices.stream() as side:
        recorded = trained(record, devices, model=model, optimizer=optimizer, loss=loss)
        side.done = side.now
    for _ in range(4):
        optimizer.zero_grad()
        loss(model).mean().backward()
        optimizer.step()
    devices.finish()
    assert_each(recorded, 6, h2d=0.02, forward=0.03, backward=0.06)


@pytest.mark.usefixtures("devices")
def test_a_device_without_events_has_no_times(record):
    optimizer, recorded = sgd(model := nn.Linear(4, 1)), record()
    state.current.clock = DeviceClock(torch.device("mps", 0))
    for _ in range(3):
        optimizer.zero_grad()
        plain(model).mean().backward()
        optimizer.step()
    rows = [values for number, values in recorded.steps() if number > 1]
    assert rows and all(
        "step_time_s" in values and not any(name.startswith("phase/") for name in values) for values in rows
    )
