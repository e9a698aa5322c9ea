"""CPU, memory, disks, network, load and pressure of the host, read from /proc (psutil costs 3 to 5 times as much).

Rates are differences of counters, so the first reading has none. What cannot be read is absent, never 0. Files are kept open,
one expression takes all numbers out of a file at once, and each part is read as rarely as its cost demands: /proc/stat alone
takes milliseconds on a host with hundreds of cores. Measured (2 cores, shared): 58 µs of CPU a second, 98 µs when everything
is due; docs/architecture.md has the table.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from perfagent.samplers import cgroup
from perfagent.samplers.kernel_file import KernelFile
from perfagent.samplers.pressure import PressureReader

__all__ = ["HostReader"]

SECTOR_BYTES = 512  # of /proc/diskstats, whatever the device says of itself
_SHARE = 1e-4
"""Of one core that a single part may take: one that costs 1 ms is read every ten seconds."""
_RAREST_S = 30.0
_EARLY_S = 0.25
"""A beat that comes a little early is the beat."""
_TIGHT = 0.8
"""Share of the memory in use from which on it is read at every tick: whoever kills this process leaves the last word."""
_AHEAD_S = 2.0
_WHOLE_DISK = rb"(?:sd[a-z]+|vd[a-z]+|xvd[a-z]+|hd[a-z]+|nvme\d+n\d+|mmcblk\d+)"
_DISK = re.compile(rb"^ *\d+ +\d+ +" + _WHOLE_DISK + rb" \d+ \d+ (\d+) \d+ \d+ \d+ (\d+) \d+ \d+ (\d+)", re.MULTILINE)
_NOT_A_LINK = (
    rb"(?:lo|veth|docker|br\d|br-|virbr|lxc|lxdbr|vnet|ovs|cni|flannel|cali|cilium|kube|vxlan|genev|tun|tap|wg|tailscale|zt"
    rb"|bond|team|dummy|ifb|vlan|macv|ipvl)"
)
"""Their bytes go through another interface as well; so do those of a VLAN, which has a dot in its name, as has a partition of
InfiniBand (ib0.8001), whose bytes are counted nowhere else."""
_NAME = rb"(?!" + _NOT_A_LINK + rb")(?:ib[^ :]*|[^ :.]+)"
_LINK = re.compile(rb"^ *(" + _NAME + rb"): *(\d+)" + rb" +\d+" * 7 + rb" +(\d+)", re.MULTILINE)
_MEMORY = re.compile(rb"MemTotal: *(\d+) kB.*MemAvailable: *(\d+) kB", re.DOTALL)

Values = dict[str, float]


class _Part:
    """One thing to read. every_s: how often, where it costs no more than its share; rarest_s: how rarely at most."""

    __slots__ = ("_spent", "due", "every_s", "rarest_s", "read")

    def __init__(self, read: Callable[[Values, float], None], every_s: float, rarest_s: float = _RAREST_S) -> None:
        self.read, self.every_s, self.rarest_s = read, every_s, rarest_s
        self.due = self._spent = 0.0

    def settle(self, now: float, spent: float) -> None:
        """When to read it next. The lower of two costs counts: a first reading is cold, another may have been in the way."""
        cost, self._spent = min(spent, self._spent), spent
        self.due = now + min(self.rarest_s, max(self.every_s, cost / _SHARE))


class HostReader:
    """`read(now)` gives the `host/*` values that are due; now: monotonic seconds.

    cost: CPU seconds of this thread so far; a test passes its own.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        group: cgroup.ControlGroup | None = None,
        cost: Callable[[], float] = time.thread_time,
        interfaces: Path = Path("/sys/class/net"),
    ) -> None:
        self._cost, self._interfaces = cost, interfaces
        self._below: dict[bytes, bool] = {}
        group = group if group is not None else cgroup.find()
        self._group = cgroup.GroupReader(group)
        self._pressure = PressureReader(group.pressure if group is not None else {}, proc)
        self._stat, self._meminfo = KernelFile(proc / "stat", 512), KernelFile(proc / "meminfo", 512)
        self._diskstats, self._links = KernelFile(proc / "diskstats", 65536), KernelFile(proc / "net" / "dev", 65536)
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._cpu: tuple[int, int, int] | None = None
        self._io: tuple[float, int, int, list[int]] | None = None
        self._net: tuple[float, int, int] | None = None
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
        for file in (self._stat, self._meminfo, self._diskstats, self._links):
            file.close()
        self._group.close()
        self._pressure.close()

    def _cpu_pct(self, values: Values, now: float) -> None:  # noqa: ARG002
        text = self._stat.read()
        if text is None:
            return
        fields = [int(word) for word in text[: text.find(b"\n")].split()[1:9]]
        idle, waiting, total = fields[3], fields[4], sum(fields)
        if self._cpu is not None and total > self._cpu[2]:
            passed = total - self._cpu[2]
            values["host/cpu_pct"] = _percent(passed - (idle - self._cpu[0]) - (waiting - self._cpu[1]), passed)
            values["host/iowait_pct"] = _percent(waiting - self._cpu[1], passed)
        self._cpu = idle, waiting, total

    def _memory(self, values: Values, now: float) -> None:
        found = _MEMORY.search(self._meminfo.read() or b"")
        if found is None:
            return
        total, available = 1024 * int(found[1]), 1024 * int(found[2])
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
        disks = _DISK.findall(self._diskstats.read() or b"")
        if not disks:
            return
        read, written = (SECTOR_BYTES * sum(int(disk[place]) for disk in disks) for place in (0, 1))
        busy_ms = [int(disk[2]) for disk in disks]
        if self._io is not None:
            passed = now - self._io[0]
            _rate(values, "host/disk_read_bytes_per_s", read - self._io[1], passed)
            _rate(values, "host/disk_write_bytes_per_s", written - self._io[2], passed)
            grown = [after - before for before, after in zip(self._io[3], busy_ms, strict=False)]
            if len(busy_ms) == len(self._io[3]) and passed > 0 and min(grown) >= 0:
                values["host/disk_busy_pct"] = min(100.0, max(grown) / (10.0 * passed))
        self._io = now, read, written, busy_ms

    def _network(self, values: Values, now: float) -> None:
        links = [link for link in _LINK.findall(self._links.read() or b"") if not self._is_below_another(link[0])]
        if not links:
            return
        received, sent = (sum(int(link[place]) for link in links) for place in (1, 2))
        if self._net is not None:
            _rate(values, "host/net_received_bytes_per_s", received - self._net[1], now - self._net[0])
            _rate(values, "host/net_sent_bytes_per_s", sent - self._net[2], now - self._net[0])
        self._net = now, received, sent

    def _is_below_another(self, name: bytes) -> bool:
        """Whether the interface above it counts the same bytes: a virtual function below its eth0 (Azure), a port of a bridge or
        bond that has a name of its own. Asked once of each."""
        known = self._below.get(name)
        if known is None:
            try:
                above = os.fsencode((self._interfaces / os.fsdecode(name) / "master").readlink().name)
            except OSError:
                above = b""
            known = self._below[name] = re.fullmatch(_NAME, above) is not None
        return known


def _percent(part: int, whole: int) -> float:
    return 100.0 * min(1.0, max(0.0, part / whole))


def _rate(values: Values, name: str, difference: int, seconds: float) -> None:
    if difference >= 0 and seconds > 0:  # a counter goes back when a disk or an interface disappears
        values[name] = difference / seconds
