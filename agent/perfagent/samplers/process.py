"""This process and the processes it started: CPU, memory, threads, disk; the DataLoader's workers.

CPU comes from the processes' own clocks (exact to the nanosecond, 1.4 µs), not from /proc's ticks of 10 ms. Workers are those
that multiprocessing started, whichever start method the loader uses; `multiprocessing.active_children()` would reap them, so
its list is only looked at. Resident memory of forked workers counts pages they share with us once per process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from perfagent.samplers.kernel_file import KernelFile

__all__ = ["ProcessReader", "WorkerReader"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_RARE_S = 10.0
_IO_S = 5.0
_WORKERS_S = 5.0
_EARLY_S = 0.25


class ProcessReader:
    """`read(now)` gives `process/*` values of this process; now: monotonic seconds."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._statm, self._status = KernelFile(proc / "statm", 128), KernelFile(proc / "stat", 1024)
        self._io = KernelFile(proc / "io")
        self._cpu: tuple[float, float] | None = None
        self._moved: tuple[float, int, int] | None = None
        self._rare_at = self._io_at = 0.0

    def read(self, now: float) -> dict[str, float]:
        values: dict[str, float] = {}
        cpu = time.process_time()
        if self._cpu is not None and now > self._cpu[0]:
            values["process/cpu_pct"] = max(0.0, 100.0 * (cpu - self._cpu[1]) / (now - self._cpu[0]))
        self._cpu = now, cpu
        values.update(self.memory())
        if now >= self._rare_at - _EARLY_S:
            self._rare_at = now + _RARE_S
            text = self._status.read()
            if text is not None:
                values["process/threads"] = int(text.rpartition(b")")[2].split()[17])
        if now >= self._io_at - _EARLY_S:
            self._io_at = now + _IO_S
            self._disk(values, now)
        return values

    def memory(self) -> dict[str, float]:
        """`process/rss_bytes` alone, at once."""
        text = self._statm.read()
        return {} if text is None else {"process/rss_bytes": int(text.split()[1]) * _PAGE}

    def close(self) -> None:
        for file in (self._statm, self._status, self._io):
            file.close()

    def _disk(self, values: dict[str, float], now: float) -> None:
        """What this process really fetched from disks and sent there; page cache hits do not count."""
        text = self._io.read()  # not readable in some containers
        if text is None or b"read_bytes: " not in text:
            return
        read, written = (int(text.partition(name)[2].split(b"\n", 1)[0]) for name in (b"\nread_bytes: ", b"\nwrite_bytes: "))
        before, self._moved = self._moved, (now, read, written)
        if before is not None and now > before[0] and read >= before[1] and written >= before[2]:
            values["process/disk_read_bytes_per_s"] = (read - before[1]) / (now - before[0])
            values["process/disk_write_bytes_per_s"] = (written - before[2]) / (now - before[0])


class WorkerReader:
    """`read(now)` gives `process/workers*`, every five seconds; nothing until the first worker is seen. 5 µs a worker."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._next = 0.0
        self._files: dict[int, KernelFile] = {}
        self._cpu: dict[int, tuple[float, float]] = {}
        self._seen = False

    def read(self, now: float) -> dict[str, float]:
        if now < self._next - _EARLY_S:
            return {}
        self._next = now + _WORKERS_S
        pids = _started()
        self._seen = self._seen or bool(pids)
        if not self._seen:
            return {}
        alive, share, rss = 0, 0.0, 0
        measured: dict[int, tuple[float, float]] = {}
        for pid in pids:
            found = self._one(pid)
            if found is None:
                continue
            cpu, resident = found
            alive, rss = alive + 1, rss + resident
            measured[pid] = now, cpu
            before = self._cpu.get(pid)
            if before is not None and now > before[0]:
                share += max(0.0, 100.0 * (cpu - before[1]) / (now - before[0]))
        for gone in self._files.keys() - measured.keys():
            self._files.pop(gone).close()
        known = bool(measured.keys() & self._cpu.keys())
        self._cpu = measured
        values: dict[str, float] = {"process/workers": alive}
        if alive:
            values["process/workers_rss_bytes"] = rss
            if known:
                values["process/workers_cpu_pct"] = share
        return values

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _one(self, pid: int) -> tuple[float, int] | None:
        """CPU seconds and resident bytes of a worker; None when it has ended."""
        file = self._files.get(pid)
        if file is None:
            file = self._files[pid] = KernelFile(self._proc / str(pid) / "statm", 128)
        text = file.read()
        if text is None:
            return None
        resident = int(text.split()[1])
        try:
            cpu = time.clock_gettime((~pid << 3) | 2)  # the process's clock, as clock_getcpuclockid(3) numbers it
        except OSError:
            return None
        return (cpu, resident * _PAGE) if resident else None  # a zombie holds no memory


def _started() -> list[int]:
    """Processes that multiprocessing started from this one and that nobody has waited for yet."""
    module: Any = sys.modules.get("multiprocessing.process")
    children = list(getattr(module, "_children", ()))  # a copy: it changes on other threads
    pids = [getattr(getattr(child, "_popen", None), "pid", None) for child in children]
    return sorted(pid for pid in pids if isinstance(pid, int))
