"""CPU, memory, disks, network, load and pressure of the host.

Rates are differences of counters, so the first reading has none. What cannot be read is absent, never 0. Each part is
read as rarely as its cost demands: /proc/stat alone takes milliseconds on a host with hundreds of cores. Measured with
/proc (2 cores, shared): 66 µs of CPU a second, 106 µs when everything is due; docs/architecture.md has the table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from perfagent.samplers import cgroup
from perfagent.samplers.counters import CpuTime, Disks, HostCounters, Links
from perfagent.samplers.pressure import PressureReader
from perfagent.samplers.proc_counters import ProcHost

__all__ = ["HostReader"]

_SHARE = 1e-4
"""Of one core that a single part may take: one that costs 1 ms is read every ten seconds."""
_RAREST_S = 30.0
_EARLY_S = 0.25
"""A beat that comes a little early is the beat."""
_TIGHT = 0.8
"""Share of the memory in use from which on it is read at every tick: whoever kills this process leaves the last
word."""
_AHEAD_S = 2.0

Values = dict[str, float]


class _Part:
    """One thing to read. every_s: how often, where it costs no more than its share; rarest_s: how rarely at most."""

    __slots__ = ("_spent", "due", "every_s", "rarest_s", "read")

    def __init__(self, read: Callable[[Values, float], None], every_s: float, rarest_s: float = _RAREST_S) -> None:
        self.read, self.every_s, self.rarest_s = read, every_s, rarest_s
        self.due = self._spent = 0.0

    def settle(self, now: float, spent: float) -> None:
        """When to read it next. The lower of two costs counts: a first reading is cold, another may have been in the
        way."""
        cost, self._spent = min(spent, self._spent), spent
        self.due = now + min(self.rarest_s, max(self.every_s, cost / _SHARE))


class HostReader:
    """`read(now)` gives the `host/*` values that are due; now: monotonic seconds.

    counters: of this host; those of `proc` and `interfaces` by default. cost: CPU seconds of this thread so far.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        group: cgroup.ControlGroup | None = None,
        cost: Callable[[], float] = time.thread_time,
        interfaces: Path = Path("/sys/class/net"),
        counters: HostCounters | None = None,
    ) -> None:
        self._cost = cost
        self._counters = counters or ProcHost(proc, interfaces)
        group = group if group is not None else cgroup.find()
        self._group = cgroup.GroupReader(group)
        self._pressure = PressureReader(group.pressure if group is not None else {}, proc)
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._cpu: CpuTime | None = None
        self._disks: tuple[float, Disks] | None = None
        self._links: tuple[float, Links] | None = None
        self._parts = [
            _Part(self._cpu_pct, 1.0),
            _Part(self._memory, 1.0, rarest_s=1.0),  # whatever it costs: memory is what kills
            _Part(self._disk, 2.0),
            _Part(self._network, 2.0),
            _Part(self._load, 5.0),
            _Part(self._group.events, 5.0),
            _Part(self._pressure.read, 5.0),
        ]
        self._used: tuple[float, int] | None = None
        self.tight = False
        """Memory is nearly used up, or will be within two seconds if it goes on like this."""

    def read(self, now: float) -> Values:
        values: Values = {}
        for part in self._parts:
            if now < part.due - _EARLY_S:
                continue
            begin = self._cost()
            part.read(values, now)
            part.settle(now, self._cost() - begin)
        return values

    def memory(self, now: float) -> Values:
        """`host/memory_*` alone, at once."""
        values: Values = {}
        self._memory(values, now)
        return values

    def close(self) -> None:
        self._counters.close()
        self._group.close()
        self._pressure.close()

    def _cpu_pct(self, values: Values, now: float) -> None:  # noqa: ARG002
        found = self._counters.cpu()
        if found is None:
            return
        before, self._cpu = self._cpu, found
        if before is None or found.total <= before.total:
            return
        passed, idle = found.total - before.total, found.idle - before.idle
        if found.waiting is not None and before.waiting is not None:
            waiting = found.waiting - before.waiting
            values["host/iowait_pct"] = _percent(waiting, passed)
            idle += waiting
        values["host/cpu_pct"] = _percent(passed - idle, passed)

    def _memory(self, values: Values, now: float) -> None:
        found = self._counters.memory()
        if found is None:
            return
        total, available = found
        used = total - available
        limit = self._group.limit_bytes
        if limit is not None and limit < total:
            in_group = self._group.used_bytes(now)
            if in_group is not None:
                total, used = limit, in_group
        values["host/memory_total_bytes"], values["host/memory_used_bytes"] = total, used
        before, self._used = self._used, (now, used)
        growth = (used - before[1]) / (now - before[0]) if before is not None and now > before[0] else 0.0
        self.tight = used > _TIGHT * total or used + _AHEAD_S * growth > total

    def _load(self, values: Values, now: float) -> None:  # noqa: ARG002
        try:
            values["host/load1"] = os.getloadavg()[0]
        except OSError:
            return
        cores = min(self._cores or 0, self._group.cores or float("inf"))
        if cores:
            values["host/cores"] = cores

    def _disk(self, values: Values, now: float) -> None:
        found = self._counters.disks()
        if found is None:
            return
        before, self._disks = self._disks, (now, found)
        if before is None:
            return
        passed, earlier = now - before[0], before[1]
        _rate(values, "host/disk_read_bytes_per_s", found.read - earlier.read, passed)
        _rate(values, "host/disk_write_bytes_per_s", found.written - earlier.written, passed)
        if (
            found.busy_ms is None
            or earlier.busy_ms is None
            or len(found.busy_ms) != len(earlier.busy_ms)
            or passed <= 0
        ):
            return
        grown = [busy - busy_before for busy_before, busy in zip(earlier.busy_ms, found.busy_ms, strict=True)]
        if min(grown) >= 0:
            values["host/disk_busy_pct"] = min(100.0, max(grown) / (10.0 * passed))

    def _network(self, values: Values, now: float) -> None:
        found = self._counters.links()
        if found is None:
            return
        before, self._links = self._links, (now, found)
        if before is not None:
            _rate(values, "host/net_received_bytes_per_s", found.received - before[1].received, now - before[0])
            _rate(values, "host/net_sent_bytes_per_s", found.sent - before[1].sent, now - before[0])


def _percent(part: float, whole: float) -> float:
    return 100.0 * min(1.0, max(0.0, part / whole))


def _rate(values: Values, name: str, difference: int, seconds: float) -> None:
    if difference >= 0 and seconds > 0:  # a counter goes back when a disk or an interface disappears
        values[name] = difference / seconds
