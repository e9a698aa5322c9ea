"""torch.xpu without a device: two that work through what they are given in order, and take as long as a test says,
however long the host takes. The tensors are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfagent.device import backend_of, readings

__all__ = ["Devices", "Event", "Stream", "fake_devices", "on_device"]


class Stream:
    """now: how much work it was given, in seconds; done: how much of it is over."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.now, self.done = device, 0.0, 0.0
        self.waits: tuple[Event, ...] = ()

    def wait_event(self, event: Event) -> None:
        self.now, self.done = max(self.now, event.at), float("inf")
        self.waits += (event.copy(),)


class Event:
    """Recorded at a moment of a stream; reached once the stream, and what that waits for, has come so far."""

    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        type(self).made += 1
        self.stream: Any = None
        self.at, self.waits = 0.0, ()

    @property
    def device(self) -> torch.device:
        return self.stream.device

    def copy(self) -> Event:
        made = object.__new__(Event)
        made.__dict__.update(self.__dict__)
        return made

    def record(self, stream: Stream) -> None:
        if self.stream is not None and self.device != stream.device:
            raise RuntimeError("Event device does not match recording stream's device")
        self.stream, self.at, self.waits = stream, stream.now, stream.waits

    def query(self) -> bool:
        return self.stream.done >= self.at and all(event.query() for event in self.waits)

    def elapsed_time(self, end: Event) -> float:
        if self.device != end.device or not (self.query() and end.query()):
            raise RuntimeError("events of two devices, or one that is not reached")
        return (end.at - self.at) * 1e3


class Devices:
    """Two of torch.xpu. streams: the current one of each; capturing: what they are given goes into a graph."""

    def __init__(self) -> None:
        self.capturing = False
        self.streams = [Stream(torch.device("xpu", index)) for index in range(2)]
        Event.made = 0

    def current_stream(self, device: torch.device) -> Stream:
        return self.streams[device.index]

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, device: int = 0) -> Iterator[Stream]:
        """Another stream of a device is its current one."""
        before, self.streams[device] = self.streams[device], Stream(torch.device("xpu", device))
        try:
            yield self.streams[device]
        finally:
            self.streams[device] = before

    def work(self, seconds: float, device: int = 0) -> None:
        self.streams[device].now += seconds

    def finish(self) -> None:
        for stream in self.streams:
            stream.done = stream.now


def on_device(index: int) -> Any:
    """What a clock asks of a tensor there."""
    return SimpleNamespace(get_device=lambda: index, device=torch.device("xpu", index))


@contextmanager
def fake_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """To other tests no device was ever met."""
    made = Devices()
    for name, value in {
        "Event": Event, "Stream": Stream, "current_stream": made.current_stream,
        "is_current_stream_capturing": made.is_current_stream_capturing,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.xpu, name, value)
    # not the count of values on their way: one that is dropped after the test takes itself off
    monkeypatch.setattr(readings, "_pools", {})
    monkeypatch.setattr(readings, "_device", readings._device)
    backend_of.cache_clear()
    yield made
    backend_of.cache_clear()
