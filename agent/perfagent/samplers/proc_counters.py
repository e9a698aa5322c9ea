"""Counters of a Linux host and its processes, read from /proc and /sys; None for one that the system does not have.

Files are kept open, and one expression takes all numbers out of a file at once: psutil, which reads the same files, takes 2
to 6 times as long (in µs of CPU: processor time 32 and 17, memory 89 and 15, disks 172 and 38, network 88 and 33, resident
memory of the process 31 and 6), and 40 ms to import.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from perfagent.samplers.kernel_file import KernelFile

__all__ = ["CpuTime", "Disks", "Links", "Memory", "ProcHost", "ProcProcess", "ProcWorkers", "Resident"]

SECTOR_BYTES = 512  # of /proc/diskstats, whatever the device says of itself
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WHOLE_DISK = rb"(?:sd[a-z]+|vd[a-z]+|xvd[a-z]+|hd[a-z]+|nvme\d+n\d+|mmcblk\d+)"
_DISK = re.compile(rb"^ *\d+ +\d+ +(" + _WHOLE_DISK + rb") \d+ \d+ (\d+) \d+ \d+ \d+ (\d+) \d+ \d+ (\d+)", re.MULTILINE)
_NOT_A_LINK = (
    rb"(?:lo|veth|docker|br\d|br-|virbr|lxc|lxdbr|vnet|ovs|cni|flannel|cali|cilium|kube|vxlan|genev|tun|tap|wg|tailscale|zt"
    rb"|bond|team|dummy|ifb|vlan|macv|ipvl)"
)
"""Their bytes go through another interface as well; so do those of a VLAN, which has a dot in its name, as has a partition of
InfiniBand (ib0.8001), whose bytes are counted nowhere else."""
_NAME = rb"(?!" + _NOT_A_LINK + rb")(?:ib[^ :]*|[^ :.]+)"
_LINK = re.compile(rb"^ *(" + _NAME + rb"): *(\d+)" + rb" +\d+" * 7 + rb" +(\d+)", re.MULTILINE)
_RESIDENT = re.compile(rb"VmRSS:\s*(\d+) kB.*RssFile:\s*(\d+) kB", re.DOTALL)
_MOVED = re.compile(rb"\nread_bytes: (\d+)\nwrite_bytes: (\d+)")
_MEMORY = re.compile(rb"MemTotal: *(\d+) kB.*MemAvailable: *(\d+) kB", re.DOTALL)


class CpuTime(NamedTuple):
    """Time of all processors since the start of the system, in one unit. waiting: for disks, while idle."""

    idle: float
    waiting: float | None
    total: float


class Memory(NamedTuple):
    """Bytes."""

    total: int
    available: int


class Disks(NamedTuple):
    """Bytes since the start of the system, and the milliseconds in which each disk was busy."""

    read: int
    written: int
    busy_ms: dict[str, int]


class Links(NamedTuple):
    """Bytes through the network since the start of the system."""

    received: int
    sent: int


class Resident(NamedTuple):
    """Bytes of a process in memory. of_files: those of mapped files, which the system takes back when memory is short."""

    total: int
    of_files: int | None


class ProcHost:
    """Counters of the host."""

    def __init__(self, proc: Path = Path("/proc"), interfaces: Path = Path("/sys/class/net")) -> None:
        self._interfaces = interfaces
        self._below: dict[bytes, bool] = {}
        self._stat, self._meminfo = KernelFile(proc / "stat", 512), KernelFile(proc / "meminfo", 512)
        self._diskstats, self._links = KernelFile(proc / "diskstats", 65536), KernelFile(proc / "net" / "dev", 65536)

    def cpu(self) -> CpuTime | None:
        text = self._stat.read()
        if text is None:
            return None
        fields = [int(word) for word in text[: text.find(b"\n")].split()[1:9]]
        return CpuTime(fields[3], fields[4], sum(fields))

    def memory(self) -> Memory | None:
        found = _MEMORY.search(self._meminfo.read() or b"")
        return None if found is None else Memory(1024 * int(found[1]), 1024 * int(found[2]))

    def disks(self) -> Disks | None:
        found = _DISK.findall(self._diskstats.read() or b"")
        if not found:
            return None
        read, written = (SECTOR_BYTES * sum(int(disk[place]) for disk in found) for place in (1, 2))
        return Disks(read, written, {disk[0].decode(): int(disk[3]) for disk in found})

    def links(self) -> Links | None:
        found = [link for link in _LINK.findall(self._links.read() or b"") if not self._is_below_another(link[0])]
        return Links(sum(int(link[1]) for link in found), sum(int(link[2]) for link in found)) if found else None

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


class ProcProcess:
    """Counters of this process."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._stat = KernelFile(proc / "stat", 1024)
        self._status, self._io = KernelFile(proc / "status"), KernelFile(proc / "io")

    def resident(self) -> Resident | None:
        """From status: statm does not tell files from shared memory, in which batches may be kept."""
        found = _RESIDENT.search(self._status.read() or b"")
        return None if found is None else Resident(1024 * int(found[1]), 1024 * int(found[2]))

    def threads(self) -> int | None:
        text = self._stat.read()
        return None if text is None else int(text.rpartition(b")")[2].split()[17])

    def disk(self) -> tuple[int, int] | None:
        """Bytes that it really read from disks and wrote there; hits in the page cache do not count."""
        found = _MOVED.search(self._io.read() or b"")  # not readable in some containers
        return None if found is None else (int(found[1]), int(found[2]))


class ProcWorkers:
    """Counters of processes that this one started. CPU comes from the process's own clock (exact to the nanosecond, 1.4
    µs), not from /proc's ticks of 10 ms."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._files: dict[int, KernelFile] = {}

    def of(self, pid: int) -> tuple[float, Resident] | None:
        """CPU seconds and memory; None for a process that has ended."""
        file = self._files.get(pid)
        if file is None:
            file = self._files[pid] = KernelFile(self._proc / str(pid) / "statm", 128)
        text = file.read()
        if text is None:
            return None
        resident, of_files = (int(pages) for pages in text.split()[1:3])  # a worker's batches leave its shared memory
        try:
            cpu = time.clock_gettime((~pid << 3) | 2)  # the process's clock, as clock_getcpuclockid(3) numbers it
        except OSError:
            return None
        if not resident:  # a zombie holds no memory
            return None
        return cpu, Resident(resident * _PAGE, of_files * _PAGE)

    def keep(self, pids: set[int]) -> None:
        for gone in self._files.keys() - pids:
            del self._files[gone]
