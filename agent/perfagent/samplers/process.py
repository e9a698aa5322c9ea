"""This process and the processes it started: CPU, memory, threads, disk; the DataLoader's workers.

Workers are those that multiprocessing started, whichever start method the loader uses;
`multiprocessing.active_children()` would reap them, so its list is only looked at. Resident memory of forked workers
counts pages they share with us once per process (worker_memory.py has what they hold of their own).
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from perfagent.samplers.proc_counters import ProcProcess, ProcWorkers
from perfagent.samplers.rates import Rates

if TYPE_CHECKING:
    from perfagent.samplers.psutil_counters import PsutilProcess, PsutilWorkers

__all__ = ["ProcessReader", "WorkerReader", "started"]

_RARE_S = 10.0
_IO_S = 5.0
_WORKERS_S = 5.0
_EARLY_S = 0.25


class ProcessReader:
    """`read(now)` gives `process/*` values of this process; now: monotonic seconds."""

    def __init__(self, counters: ProcProcess | PsutilProcess | None = None) -> None:
        self._counters = counters or ProcProcess()
        self._rates = Rates()
        self._rare_at = self._io_at = 0.0

    def read(self, now: float) -> dict[str, float]:
        values = self.memory()
        self._rates.add(values, "process/cpu_pct", time.process_time(), now, 100.0)
        if now >= self._rare_at - _EARLY_S:
            self._rare_at = now + _RARE_S
            threads = self._counters.threads()
            if threads is not None:
                values["process/threads"] = threads
        if now >= self._io_at - _EARLY_S:
            self._io_at = now + _IO_S
            moved = self._counters.disk()
            if moved is not None:
                self._rates.add(values, "process/disk_read_bytes_per_s", moved[0], now)
                self._rates.add(values, "process/disk_write_bytes_per_s", moved[1], now)
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


class WorkerReader:
    """`read(now)` gives `process/workers*`, every five seconds; nothing until the first worker is seen. 5 µs a
    worker."""

    def __init__(self, counters: ProcWorkers | PsutilWorkers | None = None) -> None:
        self._counters = counters or ProcWorkers()
        self._rates = Rates()
        self._next = 0.0
        self._seen = False

    def read(self, now: float) -> dict[str, float]:
        if now < self._next - _EARLY_S:
            return {}
        self._next = now + _WORKERS_S
        pids = started()
        self._seen = self._seen or bool(pids)
        if not self._seen:
            return {}
        alive = {pid: found for pid in pids if (found := self._counters.of(pid)) is not None}
        self._counters.keep(set(alive))
        self._rates.keep([str(pid) for pid in alive])
        values: dict[str, float] = {"process/workers": len(alive)}
        if not alive:
            return values
        shares: dict[str, float] = {}
        for pid, (cpu_s, _) in alive.items():
            self._rates.add(shares, str(pid), cpu_s, now, 100.0)
        if shares:
            values["process/workers_cpu_pct"] = sum(shares.values())
        resident = [memory for _, memory in alive.values()]
        values["process/workers_rss_bytes"] = sum(memory.total for memory in resident)
        of_files = [memory.of_files for memory in resident if memory.of_files is not None]
        if of_files:
            values["process/workers_rss_file_bytes"] = sum(of_files)
        return values

    def close(self) -> None:
        self._counters.close()


def started() -> list[int]:
    """Processes that multiprocessing started from this one and that nobody has waited for yet."""
    children = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))  # it changes on other threads
    pids = [getattr(getattr(child, "_popen", None), "pid", None) for child in children]
    return sorted(pid for pid in pids if isinstance(pid, int))
