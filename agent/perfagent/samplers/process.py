"""This process and the processes it started: CPU, memory, threads, disk; the DataLoader's workers.

Workers are those that multiprocessing started, whichever start method the loader uses;
`multiprocessing.active_children()` would reap them, so its list is only looked at. Resident memory of forked workers
counts pages they share with us once per process (worker_memory.py has what they hold of their own).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from perfagent.samplers.counters import ProcessCounters, WorkerCounters
from perfagent.samplers.proc_counters import ProcProcess, ProcWorkers

__all__ = ["ProcessReader", "WorkerReader", "started"]

_RARE_S = 10.0
_IO_S = 5.0
_WORKERS_S = 5.0
_EARLY_S = 0.25


class ProcessReader:
    """`read(now)` gives `process/*` values of this process; now: monotonic seconds."""

    def __init__(self, proc: Path = Path("/proc/self"), counters: ProcessCounters | None = None) -> None:
        self._counters = counters or ProcProcess(proc)
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
            threads = self._counters.threads()
            if threads is not None:
                values["process/threads"] = threads
        if now >= self._io_at - _EARLY_S:
            self._io_at = now + _IO_S
            self._disk(values, now)
        return values

    def memory(self) -> dict[str, float]:
        """`process/rss_bytes` and `process/rss_file_bytes` alone, at once."""
        found = self._counters.resident()
        if found is None:
            return {}
        values: dict[str, float] = {"process/rss_bytes": found.total}
        if found.of_files is not None:
            values["process/rss_file_bytes"] = found.of_files
        return values

    def close(self) -> None:
        self._counters.close()

    def _disk(self, values: dict[str, float], now: float) -> None:
        found = self._counters.disk()
        if found is None:
            return
        read, written = found
        before, self._moved = self._moved, (now, read, written)
        if before is not None and now > before[0] and read >= before[1] and written >= before[2]:
            values["process/disk_read_bytes_per_s"] = (read - before[1]) / (now - before[0])
            values["process/disk_write_bytes_per_s"] = (written - before[2]) / (now - before[0])


class WorkerReader:
    """`read(now)` gives `process/workers*`, every five seconds; nothing until the first worker is seen. 5 µs a
    worker."""

    def __init__(self, proc: Path = Path("/proc"), counters: WorkerCounters | None = None) -> None:
        self._counters = counters or ProcWorkers(proc)
        self._next = 0.0
        self._cpu: dict[int, tuple[float, float]] = {}
        self._seen = False

    def read(self, now: float) -> dict[str, float]:
        if now < self._next - _EARLY_S:
            return {}
        self._next = now + _WORKERS_S
        pids = started()
        self._seen = self._seen or bool(pids)
        if not self._seen:
            return {}
        alive, share, rss = 0, 0.0, 0
        of_files: int | None = 0
        measured: dict[int, tuple[float, float]] = {}
        for pid in pids:
            found = self._counters.of(pid)
            if found is None:
                continue
            cpu, resident = found
            alive, rss = alive + 1, rss + resident.total
            of_files = None if of_files is None or resident.of_files is None else of_files + resident.of_files
            measured[pid] = now, cpu
            before = self._cpu.get(pid)
            if before is not None and now > before[0]:
                share += max(0.0, 100.0 * (cpu - before[1]) / (now - before[0]))
        self._counters.keep(set(measured))
        known = bool(measured.keys() & self._cpu.keys())
        self._cpu = measured
        values: dict[str, float] = {"process/workers": alive}
        if alive:
            values["process/workers_rss_bytes"] = rss
            if of_files is not None:
                values["process/workers_rss_file_bytes"] = of_files
            if known:
                values["process/workers_cpu_pct"] = share
        return values

    def close(self) -> None:
        self._counters.close()


def started() -> list[int]:
    """Processes that multiprocessing started from this one and that nobody has waited for yet."""
    module: Any = sys.modules.get("multiprocessing.process")
    children = list(getattr(module, "_children", ()))  # a copy: it changes on other threads
    pids = [getattr(getattr(child, "_popen", None), "pid", None) for child in children]
    return sorted(pid for pid in pids if isinstance(pid, int))
