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
        self._file: KernelFile | None = None
        self._number: int | None = None
        self._next = 0.0
        self._system: tuple[float, int] | None = None
        self._faults: tuple[int, int] | None = None

    def read(self, now: float) -> dict[str, float]:
        if now < self._next - _EARLY_S:
            return {}
        self._next = now + _EVERY_S
        number, steps = self._thread()
        if number != self._number:  # the training has moved to another thread
            self.close()
            self._number = number
            self._file = None if number is None else KernelFile(self._proc / "task" / str(number) / "stat", 1024)
            self._system = self._faults = None
        fields = ((self._file.read() if self._file is not None else None) or b"").rpartition(b")")[2].split()
        if len(fields) <= _SYSTEM:
            return {}
        return self._rates(now, steps, int(fields[_FAULTS]), int(fields[_SYSTEM]))

    def _rates(self, now: float, steps: int, faults: int, ticks: int) -> dict[str, float]:
        values: dict[str, float] = {}
        system, self._system = self._system, (now, ticks)
        if system is not None and now > system[0]:
            share = (ticks - system[1]) / _TICKS_A_SECOND / (now - system[0])
            values["process/system_cpu_pct"] = 100.0 * min(1.0, max(0.0, share))
        before = self._faults
        if before is None or steps > before[0]:
            self._faults = steps, faults
            if before is not None:
                values["process/page_faults_per_step"] = max(0, faults - before[1]) / (steps - before[0])
        return values

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
