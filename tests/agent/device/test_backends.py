"""What is asked of each kind of device, and what becomes of an answer that a kind has not."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from fake_streams import Devices, Event

from perfagent.device import (
    Backend,
    DeviceClock,
    accelerator,
    backend_of,
    ran_out_of_memory,
    reached,
    tolerating_out_of_memory,
)


@pytest.mark.parametrize("kind", ["cpu", "meta", "xla", "mps"])
@pytest.mark.usefixtures("devices")
def test_a_kind_without_events_times_nothing(kind: str) -> None:
    clock = DeviceClock(torch.device(kind, 0))
    assert (clock.mark(), clock.begin(None), clock.mark_if_computing()) == (None, None, None)


def test_events_are_used_again(devices: Devices) -> None:
    clock = DeviceClock(torch.device("xpu", 0))
    for _ in range(10):
        clock.release([mark for mark in (clock.mark(), clock.mark()) if mark])
    assert Event.made == 2


def test_a_kind_without_a_module_has_no_answers() -> None:
    backend = backend_of("xla")
    assert (backend.count(), backend.name(0), backend.memory_stats(0)) == (0, "", {})
    assert (backend.property(0, "total_memory"), backend.segments(0), backend.is_capturing()) == (None, [], False)


def test_mps_says_what_its_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"current_allocated_memory": 3, "driver_allocated_memory": 7, "recommended_max_memory": 11}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.mps, name, lambda size=size: size)
    backend = backend_of("mps")
    held = {"allocated_bytes": {"all": {"current": 3}}, "reserved_bytes": {"all": {"current": 7}}}
    assert (backend.memory_stats(0), backend.property(0, "total_memory")) == (held, 11)


def test_flat_counters_are_nested(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a PrivateUse1 backend may have them."""
    monkeypatch.delattr(torch.xpu, "memory_stats_as_nested_dict")
    monkeypatch.setattr(torch.xpu, "memory_stats", lambda index: {"allocated_bytes.all.peak": 5, "num_ooms": 1})
    assert backend_of("xpu").memory_stats(0) == {"allocated_bytes": {"all": {"peak": 5}}, "num_ooms": 1}


def test_streams_are_known_by_their_numbers(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make torch's object of one takes longer than a mark. A script may create streams for ever."""
    numbers, made = iter([1, 1, *range(1000)]), []
    monkeypatch.setattr(torch._C, "_xpu_getCurrentStream", lambda index: (next(numbers), index, 14), raising=False)
    monkeypatch.setattr(torch.xpu, "current_stream", lambda device: made.append(object()) or made[-1])
    backend = Backend("xpu")
    streams = [backend.current_stream(torch.device("xpu", 0)) for _ in range(600)]
    assert streams[0] is streams[1] is streams[3]
    assert len(made) == len(set(map(id, streams))) >= 598


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)."), True),
        (RuntimeError("expected scalar type Float but found Half"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_known_of_any_kind(error: Exception, ran_out: bool) -> None:
    assert ran_out_of_memory(error) is ran_out
    with nullcontext() if ran_out else pytest.raises(type(error)), tolerating_out_of_memory():
        raise error


def refuse(*_: object, **__: object) -> None:
    raise NotImplementedError


def test_a_process_without_an_accelerator_has_a_null_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(torch, "empty", refuse)
    assert (accelerator().kind, accelerator().pinned(1, torch.float32)) == ("cuda", None)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert accelerator().kind == "cpu", "while torch is being imported"


# ---- captures of graphs


class Graph:
    """torch.cuda.CUDAGraph, of a capture that a query would end."""

    def capture_begin(self, error: str = "") -> None:
        if error:
            raise RuntimeError(error)

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_nothing_is_queried_during_a_capture_that_it_could_end(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a thread cannot be kept out of another's capture: as in builds that link CUDA statically."""
    monkeypatch.setattr(torch.xpu, "XPUGraph", type("XPUGraph", (), dict(vars(Graph))))
    monkeypatch.setattr(torch.accelerator, "Graph", type("Graph", (), dict(vars(Graph))))
    with caplog.at_level(logging.INFO, logger="perfagent"):
        backend_of("xpu").keep_out_of_captures()
    assert len(caplog.records) == 1
    event = Event()
    event.record(devices.streams[0])
    asked: list[Event] = []
    monkeypatch.setattr(Event, "query", lambda self: not asked.append(self))
    for graph in (torch.xpu.XPUGraph(), torch.accelerator.Graph()):
        assert reached(event)
        asked.clear()
        graph.capture_begin()
        assert not reached(event)
        assert not asked
        with pytest.raises(RuntimeError, match="previous error"):
            graph.capture_end()
        assert reached(event)
        with pytest.raises(RuntimeError, match="not now"):
            graph.capture_begin("not now")
        assert reached(event)


def test_a_thread_that_is_kept_out_of_captures_may_query(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = type("XPUGraph", (), dict(vars(Graph)))
    monkeypatch.setattr(torch.xpu, "XPUGraph", graph)
    backend, modes = backend_of("xpu"), []
    monkeypatch.setattr(torch.xpu, "set_device", lambda index: modes.append(index))
    monkeypatch.setattr(backend, "capture_mode", lambda mode: modes.append(mode._obj.value))
    backend.keep_out_of_captures()
    assert graph.capture_begin is Graph.capture_begin
    backend.listen_here(1)
    assert modes == [1, 1], "its device, and thread-local"
