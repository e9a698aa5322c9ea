"""What the kernel does for the training thread: minor page faults, and the CPU time that it spends in the kernel.

A step that gives memory back to the system and takes it again pays for it page by page: 0.7 to 1.7 µs a fault, a third
of the step in the worst case. Read from /proc, so that the training thread itself does nothing: 10 µs on the sender's
thread, every two seconds. Threads that compute for it (OpenMP's) are not counted: theirs is not the step's time alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from perfagent.samplers.kernel_file import KernelFile
from perfagent.samplers.rates import Rates

__all__ = ["TrainingThreadReader", "native_id"]

_EVERY_S = 2.0
_EARLY_S = 0.25
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_FAULTS, _SYSTEM = 7, 12
"""Places in a thread's stat, behind its name."""


def native_id(ident: int) -> int | None:
    """Returns the kernel's number of a thread that Python knows by this ident."""
    thread = getattr(threading, "_active", {}).get(ident)
    return None if thread is None else thread.native_id


class TrainingThreadReader:
    """`read(now)` gives `process/page_faults_per_step` and `process/system_cpu_pct`; now: monotonic seconds. thread:
    returns the training thread's number in the kernel, None if not known, and how many steps it has completed."""

    def __init__(self, thread: Callable[[], tuple[int | None, int]], proc: Path = Path("/proc/self")) -> None:
        self._thread, self._proc = thread, proc
        self._file = KernelFile(None)
        self._number: int | None = None
        self._steps: int | None = None
        self._next = 0.0
        self._rates = Rates()

    def read(self, now: float) -> dict[str, float]:
        if now < self._next - _EARLY_S:
            return {}
        self._next = now + _EVERY_S
        number, steps = self._thread()
        if number != self._number:  # the training has moved to another thread
            self._number, self._steps, self._rates = number, None, Rates()
            self._file = KernelFile(None if number is None else self._proc / "task" / str(number) / "stat", 1024)
        fields = (self._file.read() or b"").rpartition(b")")[2].split()
        values: dict[str, float] = {}
        if len(fields) > _SYSTEM:
            self._rates.add(values, "process/system_cpu_pct", int(fields[_SYSTEM]), now, 100.0 / _TICKS_A_SECOND, 100.0)
            if steps != self._steps:  # else the faults so far are of the step in progress
                self._steps = steps
                self._rates.add(values, "process/page_faults_per_step", int(fields[_FAULTS]), steps)
        return values
