"""CPU, memory, disk, network and load of the host, and of this process, read from /proc (psutil costs 3 to 5 times as much).

Rates are differences of counters, so the first reading has none. What cannot be read is absent, never 0. Where there is no
/proc (macOS), psutil answers for the few that it can.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from perfagent.samplers import cgroup

__all__ = ["HostReader", "ProcessReader"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
SECTOR_BYTES = 512  # of /proc/diskstats, whatever the device says of itself
_WHOLE_DISK = re.compile(r"(?:sd[a-z]+|vd[a-z]+|xvd[a-z]+|hd[a-z]+|nvme\d+n\d+|mmcblk\d+)$")
_NO_LINK = re.compile(r"(?:lo|veth|docker|br-|virbr|cni|flannel|cali|tun|tap|bond|team|dummy)")


class HostReader:
    """`read(now)` gives `host/*` values; now: monotonic seconds. disks: every how many readings /proc/diskstats is looked at
    (it is the dearest of them)."""

    def __init__(self, proc: Path = Path("/proc"), group: cgroup.ControlGroup | None = None) -> None:
        self._proc, self._group = proc, group if group is not None else cgroup.find()
        self._cpu: tuple[int, int] | None = None
        self._io: tuple[float, int, int] | None = None
        self._net: tuple[float, int, int] | None = None

    def read(self, now: float) -> dict[str, float]:
        values: dict[str, float] = {}
        for part in (self._cpu_pct, self._memory, self._load):
            part(values)
        self._disk(values, now)
        self._network(values, now)
        return values

    def _cpu_pct(self, values: dict[str, float]) -> None:
        text = _read(self._proc / "stat")
        if text is None:
            return
        fields = [int(word) for word in text[: text.find(b"\n")].split()[1:9]]
        idle, total = fields[3] + fields[4], sum(fields)
        if self._cpu is not None and total > self._cpu[1]:
            busy = 1.0 - (idle - self._cpu[0]) / (total - self._cpu[1])
            values["host/cpu_pct"] = 100.0 * min(1.0, max(0.0, busy))
        self._cpu = idle, total

    def _memory(self, values: dict[str, float]) -> None:
        text = _read(self._proc / "meminfo")
        if text is None:
            return
        total = _kib(text, b"MemTotal:")
        available = _kib(text, b"MemAvailable:")
        if total is None:
            return
        limit = self._group.limit_bytes if self._group is not None else None
        used = self._group.used_bytes() if self._group is not None and limit is not None and limit < total else None
        if used is not None and limit is not None:
            values["host/memory_total_bytes"], values["host/memory_used_bytes"] = limit, used
            return
        values["host/memory_total_bytes"] = total
        if available is not None:
            values["host/memory_used_bytes"] = total - available

    def _load(self, values: dict[str, float]) -> None:
        try:
            values["host/load1"] = os.getloadavg()[0]
        except OSError:
            return

    def _disk(self, values: dict[str, float], now: float) -> None:
        text = _read(self._proc / "diskstats")
        if text is None:
            return
        read = written = 0
        for line in text.splitlines():
            words = line.split()
            if len(words) > 9 and _WHOLE_DISK.match(words[2].decode("ascii", "replace")):
                read += int(words[5]) * SECTOR_BYTES
                written += int(words[9]) * SECTOR_BYTES
        if self._io is not None:
            _rate(values, "host/disk_read_bytes_per_s", read - self._io[1], now - self._io[0])
            _rate(values, "host/disk_write_bytes_per_s", written - self._io[2], now - self._io[0])
        self._io = now, read, written

    def _network(self, values: dict[str, float], now: float) -> None:
        text = _read(self._proc / "net" / "dev")
        if text is None:
            return
        received = sent = 0
        for line in text.splitlines()[2:]:
            name, _, counters = line.partition(b":")
            words = counters.split()
            if len(words) > 8 and not _NO_LINK.match(name.strip().decode("ascii", "replace")):
                received += int(words[0])
                sent += int(words[8])
        if self._net is not None:
            _rate(values, "host/net_received_bytes_per_s", received - self._net[1], now - self._net[0])
            _rate(values, "host/net_sent_bytes_per_s", sent - self._net[2], now - self._net[0])
        self._net = now, received, sent


class ProcessReader:
    """`read(now)` gives `process/*` values of this process."""

    def __init__(self, stat: Path = Path("/proc/self/stat")) -> None:
        self._stat = stat
        self._cpu: tuple[float, float] | None = None

    def read(self, now: float) -> dict[str, float]:
        values: dict[str, float] = {}
        text = _read(self._stat)
        if text is None:
            cpu = time.process_time()
        else:
            words = text.rpartition(b")")[2].split()
            cpu = (int(words[11]) + int(words[12])) / _TICKS
            values["process/threads"] = int(words[17])
            values["process/rss_bytes"] = int(words[21]) * _PAGE
        if self._cpu is not None and now > self._cpu[0]:
            values["process/cpu_pct"] = max(0.0, 100.0 * (cpu - self._cpu[1]) / (now - self._cpu[0]))
        self._cpu = now, cpu
        return values


def _read(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(fd)


def _kib(text: bytes, key: bytes) -> int | None:
    start = text.find(key)
    if start < 0:
        return None
    return 1024 * int(text[start + len(key) : text.index(b"kB", start)])


def _rate(values: dict[str, float], name: str, difference: int, seconds: float) -> None:
    if difference >= 0 and seconds > 0:  # a counter goes back when a disk or an interface disappears
        values[name] = difference / seconds
