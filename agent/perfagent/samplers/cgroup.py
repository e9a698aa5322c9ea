"""Reads the limits and the use of the control group that this process lives in (version 2, or the memory and cpu
controllers of version 1).

In a container the host's /proc/meminfo shows memory that the container may never use; the limit that kills is the
group's. It may be that of a group further up (SLURM limits the job, and each task has a group below it): then it is
that group's use that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from perfagent.samplers.kernel_file import KernelFile

__all__ = ["ControlGroup", "GroupReader", "find", "oom_kills_of_host"]

UNLIMITED = 2**60
_CACHE_S = 5.0
"""How long the size of the reclaimable cache is good for: memory.stat is dear to read on hosts with many cores."""
_NEAR = 0.7

Limit = TypeVar("Limit", int, float)


class ControlGroup(NamedTuple):
    """The files of the groups whose limits hold for a process; a path is None where there is no such file."""

    usage: Path | None
    """Of the group with the smallest memory limit; of the innermost where nothing is limited."""
    limit_bytes: int | None
    """Smallest memory limit on the way to the root; None when there is none."""
    inactive: Path | None
    """memory.stat: the page cache, which is given up before anyone is killed, is not counted as used."""
    events: Path | None
    """Where the kernel counts its OOM kills: memory.events (2), or memory.oom_control (1), which does not count for the
    groups in its own and is that of the innermost."""
    cores: float | None
    """Smallest CPU quota on the way to the root, in cores; None when there is none."""
    cpu: Path | None = None
    """cpu.stat: how often the group with that quota had used it up."""
    pressure: Mapping[str, Path] = MappingProxyType({})
    """cpu, memory, io -> where its pressure is told: by the group with that limit, all of whose tasks wait for the
    same."""

    def used_bytes(self) -> int | None:
        """Memory in use without reclaimable page cache; None when it cannot be read."""
        if self.usage is None:
            return None
        used = _number(self.usage)
        if used is None:
            return None
        return max(0, used - _reclaimable(_text(self.inactive)))

    def oom_kills(self) -> int | None:
        """How many processes of the group the kernel has killed for want of memory."""
        return _count(_text(self.events), b"oom_kill")


class GroupReader:
    """Reads a group again and again, with its files kept open. group: None where there is none."""

    def __init__(self, group: ControlGroup | None) -> None:
        self.limit_bytes = group.limit_bytes if group is not None else None
        self.cores = group.cores if group is not None else None
        self._usage, self._stat, self._events, self._cpu = (
            KernelFile(path) if path is not None else None
            for path in ((group.usage, group.inactive, group.events, group.cpu) if group is not None else (None,) * 4)
        )
        self._cache = 0
        self._cache_at = -_CACHE_S
        self._kills: int | None = None
        self._periods: tuple[int, int] | None = None

    def used_bytes(self, now: float) -> int | None:
        """Memory in use without reclaimable page cache; None when it cannot be read. now: monotonic seconds."""
        used = self._usage.number() if self._usage is not None else None
        if used is None:
            return None
        if now >= self._cache_at + _CACHE_S or used - self._cache > _NEAR * (self.limit_bytes or UNLIMITED):
            self._cache_at = now
            self._cache = _reclaimable(self._stat.read() if self._stat is not None else None)
        return max(0, used - self._cache)

    def events(self, values: dict[str, float], now: float) -> None:  # noqa: ARG002 - as the other parts of a host's sample
        """Processes that the kernel killed here since the first call; share of the CPU periods in which the quota was
        used up."""
        kills = _count(self._events.read() if self._events is not None else None, b"oom_kill")
        if kills is not None:
            self._kills = kills if self._kills is None else self._kills
            values["host/oom_kills"] = max(0, kills - self._kills)
        if self.cores is None or self._cpu is None:
            return
        text = self._cpu.read()
        periods, throttled = _count(text, b"nr_periods"), _count(text, b"nr_throttled")
        if periods is None or throttled is None:
            return
        before, self._periods = self._periods, (periods, throttled)
        if before is not None and periods > before[0] and throttled >= before[1]:
            values["host/cpu_throttled_pct"] = 100.0 * (throttled - before[1]) / (periods - before[0])

    def close(self) -> None:
        for file in (self._usage, self._stat, self._events, self._cpu):
            if file is not None:
                file.close()


def oom_kills_of_host() -> int | None:
    """How many processes the kernel has killed for want of memory, in whatever group; None before Linux 4.13."""
    return _count(_text(Path("/proc/vmstat")), b"oom_kill")


def find(
    pid: int | str = "self", *, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> ControlGroup | None:
    """The control group of a process; None where there is none (macOS, no /sys)."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else [""]:
            paths[controller] = path.lstrip("/")
    if (root / "cgroup.controllers").exists() and "" in paths:
        inner = _existing(root, paths[""])
        limit, limited = _smallest(inner, root, _memory)
        cores, held = _smallest(inner, root, _quota)
        return ControlGroup(
            usage=_file("memory.current", limited, inner),
            limit_bytes=limit,
            inactive=_file("memory.stat", limited, inner),
            events=_file("memory.events", limited, inner),
            cores=cores,
            cpu=_file("cpu.stat", held),
            pressure=_pressure({"cpu": held, "memory": limited, "io": limited}),
        )
    # either alone: memory's may be off (cgroup_disable=memory), as it is on some boards
    if "memory" in paths or "cpu" in paths:
        inner = _existing(root / "memory", paths.get("memory", ""))
        limit, limited = _smallest(inner, root / "memory", _memory_v1)
        cores, held = _smallest(_existing(root / "cpu", paths.get("cpu", "")), root / "cpu", _quota_v1)
        return ControlGroup(
            usage=_file("memory.usage_in_bytes", limited, inner),
            limit_bytes=limit,
            inactive=_file("memory.stat", limited, inner),
            events=_file("memory.oom_control", inner),
            cores=cores,
            cpu=_file("cpu.stat", held),
            pressure=_pressure_beside(root / "unified", paths),
        )
    return None


def _existing(root: Path, inside: str) -> Path:
    """The group's folder; in a container the path may be that of the host, and the group is the mounted root itself."""
    folder = root / inside
    return folder if folder.is_dir() else root


def _file(name: str, *folders: Path) -> Path | None:
    """In the first of the groups that has it."""
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _pressure(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Of each resource the file of its group; absent where the kernel does not give it by group."""
    return {name: path for name, folder in folders.items() if (path := _file(f"{name}.pressure", folder)) is not None}


def _pressure_beside(unified: Path, paths: Mapping[str, str]) -> dict[str, Path]:
    """Version 1 has none. Where version 2 is mounted as well, without controllers (systemd's hybrid layout), that one
    has it."""
    if "" not in paths or not unified.is_dir():
        return {}
    return _pressure(dict.fromkeys(("cpu", "memory", "io"), _existing(unified, paths[""])))


def _smallest(folder: Path, root: Path, limit_of: Callable[[Path], Limit | None]) -> tuple[Limit | None, Path]:
    """The smallest limit on the way to the root and the group that has it, of equal ones the outermost, which holds the
    others; the innermost group where nothing is limited."""
    smallest, holder = None, folder
    while True:
        limit = limit_of(folder)
        if limit is not None and (smallest is None or limit <= smallest):
            smallest, holder = limit, folder
        if folder == root or root not in folder.parents:
            return smallest, holder
        folder = folder.parent


def _memory(folder: Path) -> int | None:
    return _limit(_number(folder / "memory.max"))


def _memory_v1(folder: Path) -> int | None:
    return _limit(_number(folder / "memory.limit_in_bytes"))


def _limit(number: int | None) -> int | None:
    return number if number is not None and number < UNLIMITED else None


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):  # absent, or the word "max"
        return None


def _count(text: bytes | None, name: bytes) -> int | None:
    """The number behind a name at the start of a line."""
    _, _, rest = (b"\n" + (text or b"")).partition(b"\n" + name + b" ")
    number = rest.partition(b"\n")[0]
    return int(number) if number.isdigit() else None


def _reclaimable(text: bytes | None) -> int:
    """Page cache that would be given up, as MemAvailable of the host counts it: a file that is read again and again is
    active, and no less cache. Version 1 counts the group alone as well, which leaves out the groups in it."""
    return sum(_count(text, b"total_" + kind) or _count(text, kind) or 0 for kind in (b"inactive_file", b"active_file"))


def _text(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError:
        return None
