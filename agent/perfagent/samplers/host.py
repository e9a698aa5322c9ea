"""CPU, memory, disks, network, load and pressure of a Linux host, read from /proc and /sys.

What cannot be read is absent, never 0. Each part is read as rarely as its cost demands: /proc/stat alone takes milliseconds
on a host with hundreds of cores. docs/internals/architecture.md has what each costs.

One expression takes all numbers out of a file at once: psutil, which reads the same files, takes 2 to 6 times as long (in µs
of CPU: processor time 32 and 17, memory 89 and 15, disks 172 and 38, network 88 and 33), and 40 ms to import.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perfagent.samplers import cgroup
from perfagent.samplers.kernel_file import KernelFile
from perfagent.samplers.rates import Rates

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
_MEMORY = re.compile(rb"MemTotal: *(\d+) kB.*MemAvailable: *(\d+) kB", re.DOTALL)
_SECTOR_BYTES = 512  # of /proc/diskstats, whatever the device says of itself
_WHOLE_DISK = rb"(?:sd[a-z]+|vd[a-z]+|xvd[a-z]+|hd[a-z]+|nvme\d+n\d+|mmcblk\d+)"
_DISK = re.compile(rb"^ *\d+ +\d+ +(" + _WHOLE_DISK + rb") \d+ \d+ (\d+) \d+ \d+ \d+ (\d+) \d+ \d+ (\d+)", re.MULTILINE)
"""Name, sectors read and written, and milliseconds in which it was busy."""
_NOT_A_LINK = (
    rb"(?:lo|veth|docker|br\d|br-|virbr|lxc|lxdbr|vnet|ovs|cni|flannel|cali|cilium|kube|vxlan|genev|tun|tap|wg|tailscale|zt"
    rb"|bond|team|dummy|ifb|vlan|macv|ipvl)"
)
"""Their bytes go through another interface as well; so do those of a VLAN, which has a dot in its name, as has a partition of
InfiniBand (ib0.8001), whose bytes are counted nowhere else."""
_NAME = rb"(?!" + _NOT_A_LINK + rb")(?:ib[^ :]*|[^ :.]+)"
_LINK = re.compile(rb"^ *(" + _NAME + rb"): *(\d+)" + rb" +\d+" * 7 + rb" +(\d+)", re.MULTILINE)
"""Name, bytes received and sent."""

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
    """`read(now)` gives the `host/*` values that are due; now: monotonic seconds. interfaces: the folder of each network
    interface."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        group: cgroup.ControlGroup | None = None,
        interfaces: Path = Path("/sys/class/net"),
    ) -> None:
        self._interfaces = interfaces
        self._below: dict[bytes, bool] = {}
        self._stat, self._meminfo = KernelFile(proc / "stat", 512), KernelFile(proc / "meminfo", 512)
        self._diskstats, self._links = KernelFile(proc / "diskstats", 65536), KernelFile(proc / "net" / "dev", 65536)
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
        text = self._stat.read()
        if text is None:
            return
        fields = [int(word) for word in text[: text.find(b"\n")].split()[1:9]]
        idle, waiting, total = fields[3], fields[4], sum(fields)
        self._rates.add(values, "host/cpu_pct", total - idle - waiting, total, 100.0, 100.0)
        self._rates.add(values, "host/iowait_pct", waiting, total, 100.0, 100.0)

    def _memory(self, values: Values, now: float) -> None:
        found = _MEMORY.search(self._meminfo.read() or b"")
        if found is None:
            return
        total, available = (1024 * int(kib) for kib in found.groups())
        used = total - available
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
        found = _DISK.findall(self._diskstats.read() or b"")
        if not found:
            return
        sectors_read, sectors_written = (sum(int(disk[place]) for disk in found) for place in (1, 2))
        self._rates.add(values, "host/disk_read_bytes_per_s", sectors_read, now, _SECTOR_BYTES)
        self._rates.add(values, "host/disk_write_bytes_per_s", sectors_written, now, _SECTOR_BYTES)
        busy: Values = {}
        for name, *_, busy_ms in found:
            self._rates.add(busy, name.decode(), int(busy_ms), now, 0.1, 100.0)
        if busy:
            values["host/disk_busy_pct"] = max(busy.values())

    def _network(self, values: Values, now: float) -> None:
        found = [link for link in _LINK.findall(self._links.read() or b"") if not self._is_below_another(link[0])]
        if found:
            self._rates.add(values, "host/net_received_bytes_per_s", sum(int(link[1]) for link in found), now)
            self._rates.add(values, "host/net_sent_bytes_per_s", sum(int(link[2]) for link in found), now)

    def _is_below_another(self, name: bytes) -> bool:
        """Whether the interface above it counts the same bytes: a virtual function below its eth0 (Azure), a port of a
        bridge or bond that has a name of its own. Asked once of each."""
        known = self._below.get(name)
        if known is None:
            try:
                above = os.fsencode((self._interfaces / os.fsdecode(name) / "master").readlink().name)
            except OSError:
                above = b""
            known = self._below[name] = re.fullmatch(_NAME, above) is not None
        return known

    def _stalls(self, values: Values, now: float) -> None:
        """Pressure stall information: the share of time in which some task waited for a processor, for memory or for a disk.
        Kernels before 4.20, and those started with psi=0, have none."""
        for name, file in self._pressure.items():
            found = _STALLED.search(file.read() or b"")
            if found is not None:
                self._rates.add(values, f"host/{name}_pressure_pct", int(found[1]), now, 1e-4, 100.0)
