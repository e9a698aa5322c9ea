"""Reads values and times of a device without ever waiting for it.

A value on the CPU is read at once (0.1 µs). A value on a CUDA device is copied into pinned memory on the stream that made it
and an event is recorded behind the copy; the sender's thread reads it when `event.query()` says so. Nothing here may call
`.item()`, `float()` or `tolist()` on a CUDA tensor, nor synchronize a stream, on the training thread: the test on a GPU runs
with `torch.cuda.set_sync_debug_mode("error")`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeviceClock", "Reading", "Value", "collect", "cuda_device_of", "current_stream", "immortal", "is_captured",
    "listen_here", "ready", "snapshot", "take", "take_if_any", "value_of", "waiting",
]  # fmt: skip

_MOST_WAITING = 4096
"""Buffers that may wait to be read; beyond it (a sender that is stuck) values are dropped: pinned memory stays bounded."""
_SMALL, _AT_ONCE = 16, 64
"""Numbers of a buffer of which so many are made together: each allocation of pinned memory waits for the device."""
_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal"""


class Reading:
    """A value on its way from a device to the host."""

    __slots__ = ("_buffer", "_event", "_pool")

    def __init__(self, buffer: torch.Tensor, event: Any, pool: list[tuple[torch.Tensor, Any]] | None) -> None:
        self._buffer, self._event, self._pool = buffer, event, pool

    @property
    def on_host(self) -> bool:
        """Whether it was in host memory from the start: then it may be read on any thread, and more than once."""
        return self._pool is None and self._buffer.is_cpu

    def ready(self) -> bool:
        """Never blocks."""
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        """The numbers; to be called once, when ready, on the sender's thread. Gives the buffer back to its pool."""
        numbers = self._buffer.reshape(-1).tolist()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.append((self._buffer, self._event))
        return [float(number) for number in numbers]

    def __del__(self) -> None:
        """What nobody read (of gradients of which only a part was clipped) no longer waits. Its buffer goes back to torch."""
        global _made
        if self._pool is not None:
            _made -= 1


Value = float | Reading
_pools: dict[tuple[Any, int, Any], list[tuple[torch.Tensor, Any]]] = {}
_made = 0
_elsewhere = False
_streams: dict[tuple[int, ...], Any] = {}
"""By what C++ calls a stream the object of Python's: making one takes longer than all else that a mark does."""
_MOST_STREAMS = 256
_device: Any = None
"""The CUDA device that was the first to have a value or a mark taken of it."""
_listening = threading.local()


def take(tensor: torch.Tensor) -> Value | None:
    """The value of a tensor with one element; None where it cannot be had without waiting."""
    if tensor.is_cpu:
        return float(tensor.item())
    return collect(tensor)


def take_if_any(tensor: torch.Tensor | None) -> Value | None:
    return None if tensor is None else take(tensor)


def snapshot(values: dict[str, Any]) -> None:
    """Reads tensors now, since users change them in place; those on a device later. Of one that is no number its type remains."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            try:
                value = value.to_local() if hasattr(value, "to_local") else value  # noqa: PLW2901 - a replicated DTensor
                values[name] = take(value) if value.numel() == 1 and not value.is_complex() else type(value)
            except Exception:  # noqa: BLE001 - a device that was lost
                values[name] = None


def collect(tensor: torch.Tensor) -> Reading | None:
    """All values of a small tensor, later. A tensor on the CPU is taken as it is: it must be the caller's own."""
    global _elsewhere
    kind = tensor.device.type
    tensor = tensor.detach()
    if kind == "cpu":
        return Reading(tensor, None, None)
    _elsewhere = True
    if kind != "cuda":  # no pinned path: the sender's thread reads a private copy, and only that thread waits
        return None if kind == "meta" else Reading(tensor.clone(), None, None)
    torch = sys.modules["torch"]
    if torch.cuda.is_current_stream_capturing():
        return None  # inside a CUDA graph a copy and an event would become part of the user's graph
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    _uses(tensor.device)
    pool = _pools.setdefault((tensor.device, tensor.numel(), dtype), [])
    try:
        buffer, event = pool.pop()
    except IndexError:
        if _made >= _MOST_WAITING:
            return None
        pool += _buffers(torch, tensor.numel(), dtype)
        buffer, event = pool.pop()
    buffer.copy_(tensor.reshape(-1), non_blocking=True)
    event.record(current_stream(tensor.device))
    return Reading(buffer, event, pool)


def current_stream(device: torch.device | None) -> Any:
    """What `torch.cuda.current_stream` answers, of a device that is in use."""
    torch = sys.modules["torch"]
    ask = getattr(torch._C, "_cuda_getCurrentStream", None)
    if ask is None or device is None or device.index is None:
        return torch.cuda.current_stream(device)
    number = ask(device.index)
    stream = _streams.get(number)
    if stream is None:
        if len(_streams) >= _MOST_STREAMS:  # a script that makes new ones of its own all the time
            _streams.clear()
        stream = _streams[number] = torch.cuda.current_stream(device)
    return stream


def is_captured(tensor: Any) -> bool:
    """Whether what is computed of it now would become part of a CUDA graph of the script's, and run whenever that does."""
    return bool(tensor.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing())


def _buffers(torch: Any, size: int, dtype: Any) -> list[tuple[torch.Tensor, Any]]:
    """Pinned memory for the next values of that size, each with its event."""
    global _made
    count = _AT_ONCE if size <= _SMALL else 1
    whole = _buffer(count * size, dtype, pinned=True)
    _made += count
    with torch.inference_mode(False):
        return [(part, torch.cuda.Event()) for part in whole.tensor_split(count)]


def _buffer(size: int, dtype: Any, *, pinned: bool) -> Any:
    """Whatever the default device is, and whatever mode the script is in: one that was made while a validation logs in
    `torch.inference_mode()` could not be written to outside of it, and it is used again and again."""
    torch = sys.modules["torch"]
    with torch.inference_mode(False):
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)


def _uses(device: Any) -> None:
    global _device
    if _device is None:
        _device = device
        os.register_at_fork(after_in_child=lambda: immortal(_pools))


def listen_here() -> None:
    """Prepares the calling thread, which asks of events and does nothing else on a device; before it asks. Not for one that
    trains.

    A new thread's device is the first one: an event asked of from there gives that device half a GiB for a context of its own, by
    each rank that trains on another (meta-pytorch/torchcomms PR 777). And while the script captures a CUDA graph, what is asked
    from any other thread spoils its capture, unless that thread has said that it minds its own business only (pytorch/pytorch
    PRs 104487 and 148594).
    """
    if _device is None or hasattr(_listening, "device"):
        return
    import ctypes  # torch has imported it long since

    _listening.device = _device
    torch = sys.modules["torch"]
    try:
        torch.cuda.set_device(_device)
        library = ctypes.CDLL(str(Path(torch.__file__ or "").parent / "lib" / "libc10_cuda.so"))  # or what that was linked with
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
    except (AttributeError, OSError, RuntimeError):  # a torch that holds CUDA in itself, or for AMD; a device that was lost
        return


def immortal(*held: Any) -> None:
    """In a forked child: nothing that these hold is ever freed there, not at its end either.

    Where the last reference to an event or to pinned memory goes, torch calls CUDA, which refuses whatever a forked child asks.
    In a destructor that ends the process ("terminate called after throwing an instance of 'c10::Error'", torch 2.13): all workers
    of a DataLoader would be aborted.
    """
    import ctypes  # torch has imported it long since

    for one in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def waiting() -> bool:
    """Whether any value of this process ever was on its way from a device: where not, all are there."""
    return _elsewhere


def cuda_device_of(optimizer: Any, current: int) -> int:
    """The index of the device that computes: where the parameters are, for a script may never make it the current one."""
    groups = getattr(optimizer, "param_groups", None) or []
    found = next((p.device.index for group in groups for p in group["params"] if getattr(p, "is_cuda", False)), None)
    return current if found is None else found


def ready(value: Value | None) -> bool:
    return not isinstance(value, Reading) or value.ready()


def value_of(value: Value) -> float:
    """The number; only when ready."""
    return value.values()[0] if isinstance(value, Reading) else value


class DeviceClock:
    """Marks on the current stream of a CUDA device: the host runs ahead of it, so host time says little about a phase there.

    device: that computes, which need not be the current one (`model.to("cuda:1")` without `set_device`); None: the current one.
    """

    __slots__ = ("_event", "_free", "device")

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        if device is not None:
            _uses(device)
        self._event = sys.modules["torch"].cuda.Event
        self._free: list[Any] = []

    def mark(self) -> Any:
        """An event recorded on the device's current stream; None inside a CUDA graph's capture, and on a device that was lost:
        the script is to hear of that by its own calls."""
        try:
            if sys.modules["torch"].cuda.is_current_stream_capturing():
                return None
            try:
                event = self._free.pop()
            except IndexError:
                event = self._event(enable_timing=True)
            event.record(current_stream(self.device))
        except RuntimeError:
            return None
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Device time between two marks, once the later one is reached. Any thread."""
        return float(begin.elapsed_time(end)) / 1e3

    def release(self, events: list[Any]) -> None:
        """Events that nobody reads any more, to be used again."""
        self._free.extend(events)
