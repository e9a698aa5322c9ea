"""Reads values of a device without ever waiting for it.

A value on the CPU is read at once (0.1 µs). A value on a device is copied into pinned memory on the stream that
computed it, and an event is recorded behind the copy; the sender's thread reads the value once the event is reached. On
the training thread, nothing here may call `.item()`, `float()` or `tolist()` on a tensor of a device, nor synchronize a
stream: the test on a GPU runs with `torch.cuda.set_sync_debug_mode("error")`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeGuard

from perfagent.device.backends import Backend, Event, Stream, backend_of, is_capture_endangered, reached

if TYPE_CHECKING:
    import torch

__all__ = [
    "Reading", "Value", "device_was_read", "duplicate", "fetched", "is_captured", "is_tensor", "leak_in_forked_child",
    "listen_here", "read_all_later", "read_later", "read_number_later", "ready", "uses", "value_of",
]  # fmt: skip

_MOST_WAITING = 4096
"""Values that may wait to be read. Beyond this (a stuck sender) more are dropped, which bounds the pinned memory."""
FETCH_S = 10.0
"""How long a fetch of a large copy may take, captures of the script included."""
_SMALL, _AT_ONCE = 16, 64
"""Buffers of up to _SMALL numbers are allocated _AT_ONCE at a time, larger ones in powers of two: each allocation of
pinned memory waits for the device, and the number of gradients may change at each step."""


class Reading:
    """A value on its way from a device to the host."""

    __slots__ = ("_buffer", "_event", "_pool", "_size")

    def __init__(
        self, buffer: torch.Tensor, event: Event | None, pool: _Pool | None = None, size: int | None = None
    ) -> None:
        """size: of the numbers in the buffer, how many are of this value; all, if it is None."""
        global _on_their_way
        _on_their_way += pool is not None
        self._buffer, self._event, self._pool, self._size = buffer, event, pool, size

    @property
    def on_host(self) -> bool:
        """True if the value was in host memory from the start: any thread may read it, more than once."""
        return self._pool is None and self._buffer.is_cpu

    def ready(self) -> bool:
        """True when the value has arrived. Never blocks."""
        return reached(self._event)

    def seen(self) -> float | None:
        """Returns a single number if it has come from a device, and the sender's thread has not read it yet. On the
        training thread, which alone fills buffers again."""
        if self._event is None or not reached(self._event) or self._pool is None:
            return None
        return float(self._buffer.item())

    def values(self) -> list[float]:
        """Returns the numbers and gives the buffer back to its pool. Once, when ready, on the sender's thread."""
        global _on_their_way
        numbers = self._buffer.reshape(-1).tolist()[: self._size]
        if self._pool is not None and self._event is not None:
            pool, self._pool = self._pool, None
            pool.append((self._buffer, self._event))
            _on_their_way -= 1
        return [float(number) for number in numbers]

    def __del__(self) -> None:
        """Stops counting a value that nobody read. Its buffer goes back to torch."""
        global _on_their_way
        if self._pool is not None:
            _on_their_way -= 1


Value = float | Reading
_Pool = list[tuple[Any, Event]]
"""Buffers in pinned memory, each with its event."""
_pools: dict[tuple[torch.device, int, torch.dtype], _Pool] = {}
_on_their_way = 0
_fetching: dict[torch.device, Stream] = {}
"""Device -> the stream on which the sender's thread fetches copies."""
_device: torch.device | None = None
"""The newest one of a kind from which values or marks were taken."""
_listening = threading.local()


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Also while another thread is importing torch, which has no tensors yet."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def read_number_later(tensor: torch.Tensor | None) -> Value | None:
    """Returns the value of a tensor with one element, at once on the CPU. None where reading it would block, and for None."""
    if tensor is None:
        return None
    return float(tensor.item()) if tensor.is_cpu else read_later(tensor)


def read_all_later(values: dict[str, Any]) -> None:
    """Reads the tensors among the values in place, since scripts change them later; those on a device arrive later. A
    tensor that is not a single real number is replaced by its type."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())  # as `is_tensor`, in a loop that is run at each log()
    for name, value in values.items():
        if isinstance(value, tensor):
            try:
                value = value.to_local() if hasattr(value, "to_local") else value  # noqa: PLW2901 - a replicated DTensor
                values[name] = (
                    read_number_later(value) if value.numel() == 1 and not value.is_complex() else type(value)
                )
            except Exception:  # noqa: BLE001 - the device was lost
                values[name] = None


def read_later(tensor: torch.Tensor) -> Reading | None:
    """Reads all values of a small tensor later. A CPU tensor is kept without a copy, so nobody may change it afterward."""
    device = tensor.device
    kind = device.type
    tensor = tensor.detach()
    if kind == "cpu":
        return Reading(tensor, None)
    if kind == "meta":
        return None
    backend = backend_of(kind)
    if not backend.used:
        uses(backend, device)
    if not backend.has_events:  # the sender's thread reads a private copy, and only that thread waits
        return Reading(tensor.clone(), None)
    if backend.is_capturing():
        return None  # inside a CUDA graph, a copy and an event would become part of the script's graph
    # float32 holds whole numbers exactly up to 2**24 only
    torch = sys.modules["torch"]
    exact = tensor.is_floating_point() and tensor.dtype != torch.float64
    dtype = torch.float32 if exact else torch.float64
    size = tensor.numel()
    room = size if size <= _SMALL else 1 << (size - 1).bit_length()
    if _on_their_way >= _MOST_WAITING:
        return None
    pool = _pools.setdefault((device, room, dtype), [])
    if not pool:
        pool += _buffers(backend, room, dtype)
    if not pool:
        return Reading(*duplicate(tensor))
    buffer, event = pool.pop()
    (buffer if room == size else buffer[:size]).copy_(tensor.reshape(-1), non_blocking=True)
    event.record(backend.current_stream(device))
    return Reading(buffer, event, pool, size)


def _buffers(backend: Backend, size: int, dtype: torch.dtype) -> _Pool:
    """Allocates pinned memory for the next values of that size, each with its event; nothing where there is none."""
    count = _AT_ONCE if size <= _SMALL else 1
    whole = backend.pinned(count * size, dtype)
    if whole is None:
        return []
    with sys.modules["torch"].inference_mode(mode=False):
        return [(part, backend.event()) for part in whole.tensor_split(count)]


def duplicate(tensor: torch.Tensor) -> tuple[torch.Tensor, Event | None]:
    """Copies a large tensor where it lies, and returns the copy and the event behind it; None where there is none to wait
    for. Pinned memory of that size would have to be allocated, which waits for the device."""
    copy = tensor.clone(memory_format=sys.modules["torch"].contiguous_format)
    backend = backend_of(copy.device.type)
    return copy, _event_behind(backend, copy.device) if backend.has_events else None


def fetched(copy: torch.Tensor) -> torch.Tensor:
    """Returns such a copy in host memory. On the sender's thread, which sleeps until it is there, some milliseconds; and on a
    stream of its own, since on the script's it would wait behind all that the script has queued. Raises TimeoutError."""
    backend = backend_of(copy.device.type)
    if not backend.has_events:
        return copy.cpu()
    module, until = backend.module, time.monotonic() + FETCH_S
    while is_capture_endangered():
        _sleep(until)
    stream = _fetching.get(copy.device)
    if stream is None:
        stream = _fetching[copy.device] = module.Stream(copy.device)
    with module.stream(stream):
        host = copy.to("cpu", non_blocking=True)  # pinned; torch keeps that memory for the next one
        arrived = backend.event()
        arrived.record(stream)
    while not reached(arrived):
        _sleep(until)
    return host


def _sleep(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"its device did not answer within {FETCH_S:.0f} s")
    time.sleep(0.0005)


def _event_behind(backend: Backend, device: torch.device) -> Event:
    if not backend.used:
        uses(backend, device)
    event = backend.event()
    event.record(backend.current_stream(device))
    return event


def is_captured(tensor: Any) -> bool:
    """True if computing on this tensor now would add to a graph that the script captures, and run at each replay."""
    return not tensor.is_cpu and backend_of(tensor.device.type).is_capturing()


def uses(backend: Backend, device: torch.device) -> None:
    """Notes that values or times are taken from a device, the first of its kind. On the training thread."""
    global _device
    if _device is None:
        os.register_at_fork(after_in_child=lambda: leak_in_forked_child(_pools))
    _device, backend.used = device, True
    backend.keep_out_of_captures()


def listen_here() -> None:
    """Prepares the calling thread to query events, before its first query. Only for a thread that does nothing else on
    a device, so never for one that trains."""
    if _device is not None and not hasattr(_listening, "device"):
        _listening.device = _device
        backend_of(_device.type).listen_here(_device.index)


def leak_in_forked_child(*held: Any) -> None:
    """Keeps, in a forked child, the given objects and all that they hold alive, even at the child's exit.

    When the last reference to an event or to pinned memory goes, torch calls CUDA, which refuses every call in a forked
    child. In a destructor that ends the process ("terminate called after throwing an instance of 'c10::Error'", torch
    2.13): all workers of a DataLoader would abort.
    """
    import ctypes  # torch imported it long before

    for one in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def device_was_read() -> bool:
    """True if this process ever took a value or a time from a device. If not, all values are on the host."""
    return _device is not None


def ready(value: Value | None) -> bool:
    return not isinstance(value, Reading) or value.ready()


def value_of(value: Value) -> float:
    """Returns the number, once it is ready."""
    return value.values()[0] if isinstance(value, Reading) else value
