"""Reads values and times of a device without ever waiting for it.

A value on the CPU is read at once (0.1 µs). A value on a CUDA device is copied into pinned memory on the stream that
computed it, and an event is recorded behind the copy; the sender's thread reads the value once `event.query()` is true.
On the training thread, nothing here may call `.item()`, `float()` or `tolist()` on a CUDA tensor, nor synchronize a
stream: the test on a GPU runs with `torch.cuda.set_sync_debug_mode("error")`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeviceClock", "Reading", "Value", "collect", "cuda_device_of", "current_stream", "duplicate", "fetched", "immortal",
    "is_captured", "is_tensor", "listen_here", "ready", "snapshot", "take", "take_if_any", "value_of", "waiting",
]  # fmt: skip

_MOST_WAITING = 4096
"""Values that may wait to be read. Beyond this (a stuck sender) more are dropped, which bounds the pinned memory."""
_SMALL, _AT_ONCE = 16, 64
"""Buffers of up to _SMALL numbers are allocated _AT_ONCE at a time, larger ones in powers of two: each allocation of
pinned memory waits for the device, and the number of gradients may change at each step."""
_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal"""


class Reading:
    """A value on its way from a device to the host."""

    __slots__ = ("_buffer", "_event", "_pool", "_size")

    def __init__(
        self, buffer: torch.Tensor, event: Any, pool: list[tuple[torch.Tensor, Any]] | None, size: int | None = None
    ) -> None:
        """size: of the numbers in the buffer, how many are of this value; all, if it is None."""
        self._buffer, self._event, self._pool, self._size = buffer, event, pool, size

    @property
    def on_host(self) -> bool:
        """True if the value was in host memory from the start: then any thread may read it, more than once."""
        return self._pool is None and self._buffer.is_cpu

    def ready(self) -> bool:
        """True when the value has arrived. Never blocks."""
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        """Returns the numbers and gives the buffer back to its pool. Call it once, when ready, on the
        sender's thread."""
        global _on_their_way
        numbers = self._buffer.reshape(-1).tolist()[: self._size]
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.append((self._buffer, self._event))
            _on_their_way -= 1
        return [float(number) for number in numbers]

    def __del__(self) -> None:
        """Stops counting a value that nobody read, as where only some gradients were clipped. Its buffer
        goes back to torch."""
        global _on_their_way
        if self._pool is not None:
            _on_their_way -= 1


Value = float | Reading
_pools: dict[tuple[Any, int, Any], list[tuple[torch.Tensor, Any]]] = {}
_on_their_way = 0
_elsewhere = False
_streams: dict[tuple[int, ...], Any] = {}
"""(id, device index, device type) of a stream in C++ -> its Python object, which takes longer to make than
the rest of a mark."""
_MOST_STREAMS = 256
_fetching: dict[Any, Any] = {}
"""Device -> the stream on which the sender's thread fetches copies."""
_device: Any = None
"""The first CUDA device from which a value or a mark was taken."""
_listening = threading.local()


def is_tensor(value: object) -> bool:
    """Also while another thread is importing torch, which has no tensors yet."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def take(tensor: torch.Tensor) -> Value | None:
    """Returns the value of a tensor with one element, or None where reading it would block."""
    if tensor.is_cpu:
        return float(tensor.item())
    return collect(tensor)


def take_if_any(tensor: torch.Tensor | None) -> Value | None:
    return None if tensor is None else take(tensor)


def snapshot(values: dict[str, Any]) -> None:
    """Reads the tensors among the values in place, since scripts change them later; those on a device arrive later. A
    tensor that is not a single real number is replaced by its type."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())  # as `is_tensor`, in a loop that is run at each log()
    for name, value in values.items():
        if isinstance(value, tensor):
            try:
                value = value.to_local() if hasattr(value, "to_local") else value  # noqa: PLW2901 - a replicated DTensor
                values[name] = take(value) if value.numel() == 1 and not value.is_complex() else type(value)
            except Exception:  # noqa: BLE001 - the device was lost
                values[name] = None


def collect(tensor: torch.Tensor) -> Reading | None:
    """Reads all values of a small tensor later. A CPU tensor is kept without a copy, so nobody may change
    it afterward."""
    global _elsewhere, _on_their_way
    kind = tensor.device.type
    tensor = tensor.detach()
    if kind == "cpu":
        return Reading(tensor, None, None)
    _elsewhere = True
    if kind != "cuda":  # no pinned path: the sender's thread reads a private copy, and only that thread waits
        return None if kind == "meta" else Reading(tensor.clone(), None, None)
    torch = sys.modules["torch"]
    if torch.cuda.is_current_stream_capturing():
        return None  # inside a CUDA graph, a copy and an event would become part of the script's graph
    # float32 holds whole numbers exactly up to 2**24 only
    exact = tensor.is_floating_point() and tensor.dtype != torch.float64
    dtype = torch.float32 if exact else torch.float64
    _uses(tensor.device)
    size = tensor.numel()
    room = size if size <= _SMALL else 1 << (size - 1).bit_length()
    if _on_their_way >= _MOST_WAITING:
        return None
    pool = _pools.setdefault((tensor.device, room, dtype), [])
    try:
        buffer, event = pool.pop()
    except IndexError:
        pool += _buffers(torch, room, dtype)
        buffer, event = pool.pop()
    (buffer if room == size else buffer[:size]).copy_(tensor.reshape(-1), non_blocking=True)
    event.record(current_stream(tensor.device))
    _on_their_way += 1
    return Reading(buffer, event, pool, size)


def duplicate(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copies a large tensor where it lies, and returns the copy and the event behind it; None where there is none to wait
    for. Pinned memory of that size would have to be allocated, which waits for the device."""
    global _elsewhere
    torch = sys.modules["torch"]
    copy = tensor.clone(memory_format=torch.contiguous_format)
    _elsewhere = _elsewhere or not copy.is_cpu
    if not copy.is_cuda:
        return copy, None
    _uses(copy.device)
    event = torch.cuda.Event()
    event.record(current_stream(copy.device))
    return copy, event


def fetched(copy: torch.Tensor) -> torch.Tensor:
    """Returns such a copy in host memory. On the sender's thread, which sleeps until it is there, some milliseconds; and on a
    stream of its own, since on the script's it would wait behind all that the script has queued."""
    if not copy.is_cuda:
        return copy.cpu()
    cuda = sys.modules["torch"].cuda
    stream = _fetching.get(copy.device)
    if stream is None:
        stream = _fetching[copy.device] = cuda.Stream(copy.device)
    with cuda.stream(stream):
        host = copy.to("cpu", non_blocking=True)  # pinned; torch keeps that memory for the next one
        arrived = cuda.Event()
        arrived.record(stream)
    while not arrived.query():
        time.sleep(0.0005)
    return host


def current_stream(device: torch.device | None) -> Any:
    """Returns the same as `torch.cuda.current_stream`, faster, for a device that is in use."""
    torch = sys.modules["torch"]
    ask = getattr(torch._C, "_cuda_getCurrentStream", None)
    if ask is None or device is None or device.index is None:
        return torch.cuda.current_stream(device)
    number = ask(device.index)
    stream = _streams.get(number)
    if stream is None:
        if len(_streams) >= _MOST_STREAMS:  # a script that keeps creating streams
            _streams.clear()
        stream = _streams[number] = torch.cuda.current_stream(device)
    return stream


def is_captured(tensor: Any) -> bool:
    """True if computing on this tensor now would add to a CUDA graph that the script captures, and run at
    each replay."""
    return bool(tensor.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing())


def _buffers(torch: Any, size: int, dtype: Any) -> list[tuple[torch.Tensor, Any]]:
    """Allocates pinned memory for the next values of that size, each with its event."""
    count = _AT_ONCE if size <= _SMALL else 1
    whole = _buffer(count * size, dtype, pinned=True)
    with torch.inference_mode(False):
        return [(part, torch.cuda.Event()) for part in whole.tensor_split(count)]


def _buffer(size: int, dtype: Any, *, pinned: bool) -> Any:
    """Allocates a buffer on the CPU outside of inference mode, whatever the script's default device and mode
    are. A buffer made while a validation logs in `torch.inference_mode()` could not be written to later, but
    buffers are reused."""
    torch = sys.modules["torch"]
    with torch.inference_mode(False):
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)


def _uses(device: Any) -> None:
    global _device
    if _device is None:
        _device = device
        os.register_at_fork(after_in_child=lambda: immortal(_pools))


def listen_here() -> None:
    """Prepares the calling thread to query events, before its first query. Only for a thread that does nothing else on
    a device, so never for one that trains.

    A new thread's current device is device 0. Querying an event from there creates a context on it, half a GiB for each
    rank that trains on another device (meta-pytorch/torchcomms PR 777). And while the script captures a CUDA graph, a
    query from any other thread invalidates the capture, unless that thread has set its capture mode to thread-local
    (pytorch/pytorch PRs 104487 and 148594).
    """
    if _device is None or hasattr(_listening, "device"):
        return
    import ctypes  # torch imported it long before

    _listening.device = _device
    torch = sys.modules["torch"]
    try:
        torch.cuda.set_device(_device)
        library = ctypes.CDLL(str(Path(torch.__file__ or "").parent / "lib" / "libc10_cuda.so"))  # or what links to it
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
    except (AttributeError, OSError, RuntimeError):  # torch links CUDA statically, is built for AMD, or lost its device
        return


def immortal(*held: Any) -> None:
    """Keeps, in a forked child, the given objects and all that they hold alive, even at the child's exit.

    When the last reference to an event or to pinned memory goes, torch calls CUDA, which refuses every call in a forked
    child. In a destructor that ends the process ("terminate called after throwing an instance of 'c10::Error'", torch
    2.13): all workers of a DataLoader would abort.
    """
    import ctypes  # torch imported it long before

    for one in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def waiting() -> bool:
    """True if this process ever read a value from a device. If not, all values are on the host."""
    return _elsewhere


def cuda_device_of(optimizer: Any, current: int) -> int:
    """Returns the index of the device that holds the parameters, since a script may never make it the
    current device."""
    groups = getattr(optimizer, "param_groups", None) or []
    found = next((p.device.index for group in groups for p in group["params"] if getattr(p, "is_cuda", False)), None)
    return current if found is None else found


def ready(value: Value | None) -> bool:
    return not isinstance(value, Reading) or value.ready()


def value_of(value: Value) -> float:
    """Returns the number. Call it only when ready."""
    return value.values()[0] if isinstance(value, Reading) else value


class DeviceClock:
    """Records marks on the current stream of a CUDA device. The host runs ahead of the device, so host time
    says little there.

    device: the device that computes, which need not be the current one (`model.to("cuda:1")` without `set_device`);
    None: the current device.
    """

    __slots__ = ("_event", "_free", "device")

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        if device is not None:
            _uses(device)
        self._event = sys.modules["torch"].cuda.Event
        self._free: list[Any] = []

    def mark(self) -> Any:
        """Returns an event recorded on the device's current stream. Returns None while a CUDA graph is captured, and on
        a lost device: the script learns of that from its own calls."""
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
        """Returns the device time between two marks, once the device has reached the later one. Any thread."""
        return float(begin.elapsed_time(end)) / 1e3

    def release(self, events: list[Any]) -> None:
        """Takes back events that nobody reads any more, for reuse."""
        self._free.extend(events)
