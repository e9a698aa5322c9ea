"""What a test may do with the devices, and what they counted."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["Control", "Counts"]

_MOST_THREADS = 256


@dataclass(frozen=True)
class Counts:
    """What threads asked of the devices. The order is device.h's."""

    scalar_reads: int = 0
    """`item()`, `float()`, `tolist()`: the thread waits"""
    copies_to_host: int = 0
    copies_to_device: int = 0
    copies_on_device: int = 0
    """or from one device to the other"""
    waits: int = 0
    """whatever made a thread wait for a device: scalar reads, copies that are not `non_blocking` or not pinned,
    synchronizations, operators such as `nonzero`"""
    synchronizations: int = 0
    queries: int = 0
    records: int = 0
    kernels: int = 0
    pinned: int = 0
    """allocations of pinned memory, in which a thread waits for a real device"""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


class Control:
    """The devices behind `torch.fakegpu`."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fakegpu_start_autograd()
        self._library.fakegpu_clock.argtypes = [ctypes.c_double]
        self._library.fakegpu_hold.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._library.fakegpu_work.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_double]
        self._library.fakegpu_memory.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    # ---- time

    def hold(self, device: int = 0, *, events: int = 0) -> None:
        """From now on the device works nothing off: events stay open, copies into pinned memory do not arrive (what lies there
        is no number), and a thread that waits for the device fails after 10 s. events: how many it still reaches."""
        self._library.fakegpu_hold(device, events)

    def let_go(self, device: int = 0) -> None:
        """The device works off all that its streams have."""
        self._library.fakegpu_hold(device, -1)

    @contextlib.contextmanager
    def held(self, device: int = 0) -> Iterator[None]:
        self.hold(device)
        try:
            yield
        finally:
            self.let_go(device)

    def set_clock(self, seconds: float | None) -> None:
        """The time that events note when a stream reaches them; None: the host's, as at the start."""
        self._library.fakegpu_clock(-1.0 if seconds is None else seconds)

    def work(self, seconds: float, stream: object = None) -> None:
        """Keeps a stream busy for so long by the device's clock; nobody waits. stream: None for the current one."""
        import torch

        on = torch.accelerator.current_stream() if stream is None else stream
        self._library.fakegpu_work(on.device_index, on.stream_id, seconds)

    # ---- memory, loss, capture

    def set_memory(self, total_bytes: int, device: int = 0, *, used_elsewhere: int = 0) -> None:
        """How much memory the device has, 8 GiB at the start, and what of it other processes have."""
        self._library.fakegpu_memory(device, total_bytes, used_elsewhere)

    def lose(self, device: int = 0) -> None:
        """Whatever is asked of this device from now on raises torch.AcceleratorError."""
        self._library.fakegpu_lose(device)

    def exchange_capture_mode(self, mode: int) -> None:
        """As cudaThreadExchangeStreamCaptureMode does for the calling thread. mode: 1 global, as at the start; 2 thread-local,
        3 relaxed: what this thread asks ends no other thread's capture."""
        self._library.fakegpu_thread_capture_mode(mode)

    # ---- counters

    def by_thread(self) -> dict[int, Counts]:
        """By threading.get_native_id(); those of autograd's own threads are among them."""
        width = 1 + len(fields(Counts))
        rows = (ctypes.c_int64 * (width * _MOST_THREADS))()
        number = self._library.fakegpu_counts(rows, _MOST_THREADS)
        return {rows[width * row]: Counts(*rows[width * row + 1 : width * (row + 1)]) for row in range(number)}

    def counts(self, *, without: set[int] | frozenset[int] = frozenset()) -> Counts:
        """Of all threads together, but some: those of the agent, say."""
        return sum((one for thread, one in self.by_thread().items() if thread not in without), start=Counts())

    def forget_counts(self) -> None:
        self._library.fakegpu_forget_counts()
