"""This process and the processes it started, as /proc has them: CPU, memory, threads, disk; the DataLoader's workers.

Workers are those that multiprocessing started, whichever start method the loader uses;
`multiprocessing.active_children()` would reap them, so its list is only looked at. Resident memory of forked workers
counts pages they share with us once per process (WorkerMemory has what they hold of their own).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from perfagent.samplers.kernel_file import KernelFile
from perfagent.samplers.rates import Rates

__all__ = ["PSS_EVERY_S", "ProcessReader", "WorkerMemory", "WorkerReader", "count_started", "started"]

_RARE_S = 10.0
_IO_S = 5.0
_WORKERS_S = 5.0
_EARLY_S = 0.25
PSS_EVERY_S = 5.0
_SHARE = 0.002
_PAGE = os.sysconf("SC_PAGE_SIZE")
_RESIDENT = re.compile(rb"VmRSS:\s*(\d+) kB.*RssFile:\s*(\d+) kB", re.DOTALL)
"""Of status: statm does not tell files from shared memory, in which batches may be kept."""
_MOVED = re.compile(rb"\nread_bytes: (\d+)\nwrite_bytes: (\d+)")
"""What was really read from disks and written there; hits in the page cache do not count."""
_OWN = re.compile(rb"^Pss_Anon:\s*(\d+) kB", re.MULTILINE)


class ProcessReader:
    """`read(now)` gives `process/*` values of this process; now: monotonic seconds."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._stat = KernelFile(proc / "stat", 1024)
        self._status, self._io = KernelFile(proc / "status"), KernelFile(proc / "io")
        self._rates = Rates()
        self._rare_at = self._io_at = 0.0

    def read(self, now: float) -> dict[str, float]:
        values = self.memory()
        self._rates.add(values, "process/cpu_pct", time.process_time(), now, 100.0)
        if now >= self._rare_at - _EARLY_S:
            self._rare_at = now + _RARE_S
            text = self._stat.read()
            if text is not None:
                values["process/threads"] = int(text.rpartition(b")")[2].split()[17])
        if now >= self._io_at - _EARLY_S:
            self._io_at = now + _IO_S
            moved = _MOVED.search(self._io.read() or b"")  # not readable in some containers
            if moved is not None:
                self._rates.add(values, "process/disk_read_bytes_per_s", int(moved[1]), now)
                self._rates.add(values, "process/disk_write_bytes_per_s", int(moved[2]), now)
        return values

    def memory(self) -> dict[str, float]:
        """`process/rss_bytes` and `process/rss_file_bytes` alone, at once. Those of files are of mapped ones, which the
        system takes back when memory is short."""
        found = _RESIDENT.search(self._status.read() or b"")
        if found is None:
            return {}
        return {"process/rss_bytes": 1024 * int(found[1]), "process/rss_file_bytes": 1024 * int(found[2])}


class WorkerReader:
    """`read(now)` gives `process/workers*`, every five seconds from the first worker on: the most that there were since it
    last did, as a look between two epochs may find only some of them. 5 µs a worker."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._files: dict[int, KernelFile] = {}
        self._rates = Rates()
        self._next = 0.0
        self._most: int | None = None  # None until the first worker is seen

    def read(self, now: float) -> dict[str, float]:
        pids = started()
        if self._most is None and not pids:
            return {}
        if now < self._next - _EARLY_S:
            self._most = max(self._most or 0, len(pids))
            return {}
        self._next = now + _WORKERS_S
        alive = {pid: found for pid in pids if (found := self._of(pid)) is not None}
        self._files = {pid: self._files[pid] for pid in alive}
        self._rates.keep([str(pid) for pid in alive])
        values: dict[str, float] = {"process/workers": max(self._most or 0, len(alive))}
        self._most = 0
        if not alive:
            return values
        shares: dict[str, float] = {}
        for pid, (cpu_s, _, _) in alive.items():
            self._rates.add(shares, str(pid), cpu_s, now, 100.0)
        if shares:
            values["process/workers_cpu_pct"] = sum(shares.values())
        values["process/workers_rss_bytes"] = _PAGE * sum(resident for _, resident, _ in alive.values())
        values["process/workers_rss_file_bytes"] = _PAGE * sum(of_files for _, _, of_files in alive.values())
        return values

    def _of(self, pid: int) -> tuple[float, int, int] | None:
        """CPU seconds, pages in memory, and those of them that are of files; None for a process that has ended. CPU comes
        from the process's own clock (exact to the nanosecond, 1.4 µs), not from /proc's ticks of 10 ms."""
        file = self._files.get(pid)
        if file is None:
            file = self._files[pid] = KernelFile(self._proc / str(pid) / "statm", 128)
        text = file.read()
        if text is None:
            return None
        resident, of_files = map(int, text.split()[1:3])  # a worker's batches leave its shared memory
        try:
            cpu_s = time.clock_gettime((~pid << 3) | 2)  # the process's clock, as clock_getcpuclockid(3) numbers it
        except OSError:
            return None
        return (cpu_s, resident, of_files) if resident else None  # a zombie holds no memory


class WorkerMemory:
    """Measures the memory of the DataLoader's workers: `poll()` emits `process/workers_pss_bytes` once all were read.

    Reading a Python object of the dataset copies its page into a forked worker, because its reference count changes. The
    proportional size (PSS) grows with each copy; resident memory, which counts shared pages in each process, does not.

    The kernel walks all pages to compute it: 60 ms for 600 MiB, in which the worker cannot map memory. So the courier thread
    reads one worker at a time, seldom enough to stay below 0.2 % of a core. spent: CPU seconds of the calling thread.
    """

    def __init__(
        self,
        emit: Callable[[dict[str, float]], None],
        proc: Path = Path("/proc"),
        *,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._emit, self._proc, self._clock, self._spent = emit, proc, clock, spent
        self._known: dict[int, int] = {}
        """Process id -> bytes, in the order in which they were asked."""
        self._due = 0.0

    def poll(self) -> bool:
        """At most every PSS_EVERY_S seconds. False where the system does not tell."""
        now = self._clock()
        if now < self._due:
            return True
        pids = started()
        self._known = {pid: size for pid, size in self._known.items() if pid in pids}
        new = next((pid for pid in pids if pid not in self._known), None)
        asked = next(iter(self._known), None) if new is None else new
        if asked is None:
            return True
        began = self._spent()
        try:
            found = _OWN.search((self._proc / str(asked) / "smaps_rollup").read_bytes())
        except ProcessLookupError:  # it has just ended
            return True
        except OSError:
            return (self._proc / "self" / "smaps_rollup").exists()
        self._due = now + (self._spent() - began) / _SHARE
        if found is None:  # a kernel before 5.4, or one that has ended
            return True
        self._known.pop(asked, None)
        self._known[asked] = 1024 * int(found[1])
        if len(self._known) == len(pids):
            self._emit({"process/workers_pss_bytes": float(sum(self._known.values()))})
        return True


def started() -> list[int]:
    """Processes that multiprocessing started from this one and that nobody has waited for yet."""
    children = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))  # it changes on other threads
    pids = [getattr(getattr(child, "_popen", None), "pid", None) for child in children]
    return sorted(pid for pid in pids if isinstance(pid, int))


def count_started() -> int:
    """How many processes this one has started by multiprocessing. Imports nothing."""
    counter = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
    number = repr(counter).removeprefix("count(").removesuffix(")")
    return int(number) - 1 if number.isdigit() else 0
