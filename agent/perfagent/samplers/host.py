"""CPU, memory, disks, network, load and pressure of the host.

What cannot be read is absent, never 0. Each part is read as rarely as its cost demands: /proc/stat alone takes milliseconds
on a host with hundreds of cores. docs/internals/architecture.md has what each costs.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfagent.samplers import cgroup
from perfagent.samplers.kernel_file import KernelFile
from perfagent.samplers.proc_counters import ProcHost
from perfagent.samplers.rates import Rates

if TYPE_CHECKING:
    from perfagent.samplers.psutil_counters import PsutilCounters

__all__ = ["HostReader"]

_SHARE = 1e-4
"""Most of a core that one part may take: a part that costs 1 ms is read every ten seconds."""
_RAREST_S = 30.0
_EARLY_S = 0.25
"""A beat that comes a little early is the beat."""
_TIGHT = 0.8
"""Share of the memory in use from which on it is read at every tick: this process may be killed before the next second."""
_AHEAD_S = 2.0
_STALLED = re.compile(rb"^some .*\btotal=(\d+)", re.MULTILINE)
"""Microseconds. The averages beside it are over spans of the kernel's own."""

Values = dict[str, float]


@dataclass(slots=True)
class _Part:
    """One thing to read. every_s: how often, where it costs no more than its share; rarest_s: how rarely at most. spent: CPU
    seconds of the last reading."""

    read: Callable[[HostReader, Values, float], None]
    every_s: float
    rarest_s: float = _RAREST_S
    due: float = 0.0
    spent: float = 0.0


class HostReader:
    """`read(now)` gives the `host/*` values that are due; now: monotonic seconds. counters: of this host; those of `proc` by
    default."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        group: cgroup.ControlGroup | None = None,
        counters: ProcHost | PsutilCounters | None = None,
    ) -> None:
        self._counters = counters or ProcHost(proc)
        group = group or cgroup.find() or cgroup.ControlGroup()
        self._group = cgroup.GroupReader(group)
        pressures = {name: group.pressure.get(name, proc / "pressure" / name) for name in cgroup.RESOURCES}
        self._pressure = {name: KernelFile(path, 256) for name, path in pressures.items()}
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._rates = Rates()
        # no bound methods: in a cycle, files would stay open in a forked child
        self._parts = [
            _Part(HostReader._cpu_pct, 1.0),
            _Part(HostReader._memory, 1.0, rarest_s=1.0),  # whatever it costs: memory is what kills
            _Part(HostReader._disk, 2.0),
            _Part(HostReader._network, 2.0),
            _Part(HostReader._load, 5.0),
            _Part(HostReader._stalls, 5.0),
        ]
        self.tight = False
        """Memory is nearly used up, or will be within two seconds if it goes on like this."""

    def read(self, now: float) -> Values:
        values: Values = {}
        for part in self._parts:
            if now < part.due - _EARLY_S:
                continue
            begin, before = time.thread_time(), part.spent
            part.read(self, values, now)
            part.spent = time.thread_time() - begin
            cost = min(part.spent, before)  # a first reading is cold
            part.due = now + min(part.rarest_s, max(part.every_s, cost / _SHARE))
        return values

    def memory(self, now: float) -> Values:
        """`host/memory_*` alone, at once."""
        values: Values = {}
        self._memory(values, now)
        return values

    def _cpu_pct(self, values: Values, now: float) -> None:  # noqa: ARG002
        found = self._counters.cpu()
        if found is None:
            return
        busy = found.total - found.idle - (found.waiting or 0.0)
        self._rates.add(values, "host/cpu_pct", busy, found.total, 100.0, 100.0)
        if found.waiting is not None:
            self._rates.add(values, "host/iowait_pct", found.waiting, found.total, 100.0, 100.0)

    def _memory(self, values: Values, now: float) -> None:
        found = self._counters.memory()
        if found is None:
            return
        total, used = found.total, found.total - found.available
        limit = self._group.limit_bytes
        if limit is not None and limit < total:
            in_group = self._group.used_bytes(now)
            if in_group is not None:
                total, used = limit, in_group
        values["host/memory_total_bytes"], values["host/memory_used_bytes"] = total, used
        growth: Values = {}
        self._rates.add(growth, "bytes_per_s", used, now)
        self.tight = used > _TIGHT * total or used + _AHEAD_S * growth.get("bytes_per_s", 0.0) > total

    def _load(self, values: Values, now: float) -> None:  # noqa: ARG002
        self._group.events(values)
        with contextlib.suppress(OSError):
            values["host/load1"] = os.getloadavg()[0]
        cores = min(self._cores or 0, self._group.cores or float("inf"))
        if cores:
            values["host/cores"] = cores

    def _disk(self, values: Values, now: float) -> None:
        found = self._counters.disks()
        if found is None:
            return
        self._rates.add(values, "host/disk_read_bytes_per_s", found.read, now)
        self._rates.add(values, "host/disk_write_bytes_per_s", found.written, now)
        busy: Values = {}
        for disk, busy_ms in found.busy_ms.items():
            self._rates.add(busy, disk, busy_ms, now, 0.1, 100.0)
        if busy:
            values["host/disk_busy_pct"] = max(busy.values())

    def _network(self, values: Values, now: float) -> None:
        found = self._counters.links()
        if found is not None:
            self._rates.add(values, "host/net_received_bytes_per_s", found.received, now)
            self._rates.add(values, "host/net_sent_bytes_per_s", found.sent, now)

    def _stalls(self, values: Values, now: float) -> None:
        """Pressure stall information: the share of time in which some task waited for a processor, for memory or for a disk.
        Kernels before 4.20, and those started with psi=0, have none."""
        for name, file in self._pressure.items():
            found = _STALLED.search(file.read() or b"")
            if found is not None:
                self._rates.add(values, f"host/{name}_pressure_pct", int(found[1]), now, 1e-4, 100.0)
