"""Asks a kind of device what differs from kind to kind: events, streams, graphs, memory, names. The rest of the agent
names no kind.

The modules of torch (torch.cuda, which is ROCm's too, torch.xpu, torch.npu, and whatever a PrivateUse1 backend brings)
have most of this under the same names. What a module has not is absent, and so is everything of a kind without one
(XLA): such a device is the null object. docs/evidence/compatibility.md has the table.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "Backend", "Event", "Stream", "accelerator", "backend_of", "devices_of", "is_capture_endangered", "ran_out_of_memory",
    "reached", "tolerating_out_of_memory",
]  # fmt: skip

logger = logging.getLogger("perfagent")
_MOST_STREAMS = 256
_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal, and HIP's"""
_CAPTURE_MODES = (
    ("libc10_cuda.so", "cudaThreadExchangeStreamCaptureMode"), ("libc10_hip.so", "hipThreadExchangeStreamCaptureMode"),
)  # fmt: skip
"""A library of torch, and the function in it or in what it links to."""
_capturing: set[int] = set()
"""ids of the graphs that are being captured, where a query from another thread could break that."""


class Stream(Protocol):
    """A queue of work on a device. The host waits for none of it."""

    def wait_event(self, event: Event) -> None: ...


class Event(Protocol):
    """A place in a stream; `elapsed_time`: the milliseconds from there to another, once both are reached."""

    device: torch.device

    def record(self, stream: Stream) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Event) -> float: ...


class Backend:
    """One kind of device. Answers are those of the host: nothing here waits for a device or starts one.

    kind: as `torch.device.type` has it. has_events: events can be timed and queried without waiting. is_capturing: asks
    whether the calling thread's current stream is being captured. used: a value or a time was taken from one.
    """

    used = False

    def __init__(self, kind: str) -> None:
        self.kind = kind
        module = self.module
        self.has_events = hasattr(module, "Event") and hasattr(module, "current_stream")
        self.is_capturing: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)
        self._stream_number = getattr(sys.modules.get("torch._C"), f"_{kind}_getCurrentStream", None)
        self._streams: dict[tuple[int, ...], Stream] = {}
        """(id, device index, device type) of a stream in C++ -> its Python object, which takes longer to make than the
        rest of a mark."""

    @property
    def module(self) -> Any:
        return None if self.kind in ("cpu", "meta") else getattr(sys.modules.get("torch"), self.kind, None)

    def ask(self, function: str, *args: Any, **options: Any) -> Any:
        """The answer of a function of the kind's module; None where there is no such function, or no answer."""
        try:
            return getattr(self.module, function)(*args, **options)
        except (AttributeError, AssertionError, RuntimeError, TypeError):  # TypeError: of other arguments than CUDA's
            return None

    def in_use(self) -> bool:
        """True if this process has started a device of the kind."""
        return self.used or bool(self.ask("is_initialized"))

    def count(self) -> int:
        return int(self.ask("device_count") or 0)

    def current_index(self) -> int:
        """The device that the calling thread's new tensors are put on."""
        return int(self.ask("current_device") or 0)

    def name(self, index: int) -> str:
        return str(self.ask("get_device_name", index) or "")

    def property(self, index: int, name: str) -> Any:
        """`total_memory` (bytes), `uuid` ...; None if not known. Cached by torch."""
        return getattr(self.ask("get_device_properties", index), name, None)

    # ---- events and streams

    def event(self, *, timed: bool = False) -> Event:
        event: Event = self.module.Event(enable_timing=timed)
        return event

    def stream(self, device: torch.device) -> Stream:
        """A new one."""
        stream: Stream = self.module.Stream(device)
        return stream

    def current_stream(self, device: torch.device) -> Stream:
        """Faster than the module's `current_stream`, with the same answer."""
        number = None if self._stream_number is None else self._stream_number(device.index)
        stream = None if number is None else self._streams.get(number)
        if stream is None:
            stream = self.module.current_stream(device)
            if number is not None:
                if len(self._streams) >= _MOST_STREAMS:  # a script that keeps creating streams
                    self._streams.clear()
                self._streams[number] = stream
        return stream

    def pinned(self, size: int | torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Host memory that the device copies to while the host goes on; None where there is none. A buffer made in a
        script's inference mode could not be written to later."""
        of_torch: Any = sys.modules["torch"]
        try:
            with of_torch.inference_mode(mode=False):
                buffer: torch.Tensor = of_torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
        except (RuntimeError, NotImplementedError):
            return None
        return buffer

    # ---- memory

    def memory_stats(self, index: int) -> Mapping[str, Any]:
        """The allocator's counters, nested as torch.cuda.memory_stats_as_nested_dict has them (flattened and sorted they
        cost several times as much); empty for another library's allocator, which keeps none."""
        nested: Mapping[str, Any] | None = self.ask("memory_stats_as_nested_dict", index)
        return _nested(self.ask("memory_stats", index) or {}) if nested is None else nested

    def segments(self, index: int) -> list[dict[str, Any]]:
        """The allocator's segments on a device. Not where torch adds the traces of every allocation: where the script
        records those, they take seconds and GiB."""
        found = self.ask("memory_snapshot", include_traces=False) or []
        return [segment for segment in found if segment.get("device") == index]

    # ---- graphs

    def keep_out_of_captures(self) -> None:
        """Before the first query of a device by the sender's thread. While a script captures a graph, a query from
        another thread invalidates the capture, unless that thread has set its capture mode to thread-local
        (pytorch/pytorch PRs 104487 and 148594). Where a thread cannot, nobody queries while a graph is captured."""
        if not self.has_events or self.capture_mode is not None:
            return
        owners = self.module, getattr(sys.modules["torch"], "accelerator", None)
        named = {
            one for owner in owners for name, one in getattr(owner, "__dict__", {}).items() if name.endswith("Graph")
        }
        graphs = [one for one in named if hasattr(one, "capture_begin")]
        for graph in graphs:
            graph.capture_begin = _noted(graph.capture_begin, begins=True)
            graph.capture_end = _noted(graph.capture_end, begins=False)
        if graphs:
            logger.info(
                "perfagent: values and times of the device (%s) are read only while no graph is captured, since this build of "
                "torch cannot do both", self.kind,
            )  # fmt: skip

    @functools.cached_property
    def capture_mode(self) -> Callable[[Any], int] | None:
        """Sets the capture mode of the calling thread; None where this build of torch has no such function."""
        import ctypes  # torch imported it long before

        folder = Path(sys.modules["torch"].__file__ or "").parent / "lib"
        for library, function in _CAPTURE_MODES if self.kind == "cuda" else ():  # pragma: no cover - CUDA's own
            try:
                return getattr(ctypes.CDLL(str(folder / library)), function)  # type: ignore[no-any-return]
            except (AttributeError, OSError):  # links CUDA statically, or is built for the other
                continue
        return None

    def listen_here(self, index: int) -> None:
        """Prepares the calling thread, which does nothing else on a device, to query events. Its current device would be
        device 0: a query from there creates a context on it, half a GiB for each rank that trains on another device
        (meta-pytorch/torchcomms PR 777)."""
        import ctypes  # torch imported it long before

        self.ask("set_device", index)
        if self.capture_mode is not None:
            self.capture_mode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


class Mps(Backend):
    """Apple's. Its events have no stream, each one commits what is queued, and `elapsed_time` waits for the device: so
    there are none here. Its allocator keeps no peaks."""

    def memory_stats(self, index: int) -> Mapping[str, Any]:  # noqa: ARG002
        sizes = {"allocated_bytes": "current_allocated_memory", "reserved_bytes": "driver_allocated_memory"}
        found = {name: self.ask(function) for name, function in sizes.items()}
        return {name: {"all": {"current": size}} for name, size in found.items() if size is not None}

    def property(self, index: int, name: str) -> Any:  # noqa: ARG002
        return self.ask("recommended_max_memory") if name == "total_memory" else None


@functools.cache
def backend_of(kind: str) -> Backend:
    """kind: `torch.device.type`."""
    return Mps(kind) if kind == "mps" else Backend(kind)


def accelerator() -> Backend:
    """The kind of accelerator that this process can have: a build of torch has one; "cpu" while torch is not imported."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "compile"):  # defined near the end of torch's own import
        return backend_of("cpu")
    if (current := getattr(getattr(torch, "accelerator", None), "current_accelerator", None)) is not None:
        found = current()  # since torch 2.6
        if found is not None:
            return backend_of(found.type)
    return backend_of("cuda")


def devices_of(optimizer: Any) -> list[torch.device]:
    """The accelerators that hold its parameters, those of the first parameters first: a script may never make them the
    current device."""
    groups = getattr(optimizer, "param_groups", None) or []
    found = dict.fromkeys(getattr(parameter, "device", None) for group in groups for parameter in group["params"])
    return [device for device in found if device is not None and device.type not in ("cpu", "meta")]


def ran_out_of_memory(error: BaseException) -> bool:
    """True if an allocation on a device failed. (Not every kind has torch's own exception for it.)"""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and "out of memory" in str(error))


@contextlib.contextmanager
def tolerating_out_of_memory() -> Iterator[None]:
    """Leaves the block where an allocation on a device fails in it."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise


def is_capture_endangered() -> bool:
    """True while a query or a copy by another thread could break a capture."""
    return bool(_capturing)


def reached(event: Event | None) -> bool:
    """True once the device has come to the event. Never blocks. False while a query could break a capture."""
    return event is None or (not _capturing and bool(event.query()))


def _noted(original: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
    """The begin or the end of a capture, which one that fails ends as well."""

    @functools.wraps(original)
    def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
        is_captured = False
        _capturing.add(id(graph))
        try:
            result = original(graph, *args, **kwargs)
            is_captured = begins
            return result
        finally:
            if not is_captured:
                _capturing.discard(id(graph))

    return call


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        functools.reduce(lambda inner, part: inner.setdefault(part, {}), outer, nested)[last] = value
    return nested
