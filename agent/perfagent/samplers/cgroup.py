"""Reads the limits and the use of the control group that this process lives in (version 2, or the memory and cpu
controllers of version 1).

The limit that kills may be that of a group further up (SLURM limits the job, and each task has a group below it): then that
group's use counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from perfagent.samplers.kernel_file import KernelFile
from perfagent.samplers.rates import Rates

__all__ = ["RESOURCES", "ControlGroup", "GroupReader", "find", "oom_kills_of_host"]

RESOURCES = ("cpu", "memory", "io")
"""Resources with pressure stall information."""
UNLIMITED = 2**60
_CACHE_S = 5.0
"""How long the size of the reclaimable cache is good for: memory.stat is dear to read on hosts with many cores."""
_NEAR = 0.7

Limit = TypeVar("Limit", int, float)


class ControlGroup(NamedTuple):
    """The files of the groups whose limits hold for a process; a path is None where there is no such file."""

    usage: Path | None = None
    """Memory in use by the group with the smallest limit; by the innermost where nothing is limited."""
    limit_bytes: int | None = None
    """Smallest memory limit on the way to the root; None when there is none."""
    inactive: Path | None = None
    """memory.stat: the page cache, which is given up before anyone is killed, is not counted as used."""
    events: Path | None = None
    """Where the kernel counts its OOM kills: memory.events (2), or memory.oom_control (1) of the innermost group."""
    cores: float | None = None
    """Smallest CPU quota on the way to the root, in cores; None when there is none."""
    cpu: Path | None = None
    """cpu.stat: how often the group with that quota had used it up."""
    pressure: Mapping[str, Path] = MappingProxyType({})
    """One of RESOURCES -> file of the group with that limit; version 2 alone has it."""

    def used_bytes(self) -> int | None:
        """Memory in use without reclaimable page cache; None when it cannot be read."""
        return GroupReader(self).used_bytes(math.inf)

    def oom_kills(self) -> int | None:
        """How many processes of the group the kernel has killed for want of memory."""
        return _count(KernelFile(self.events).read(), b"oom_kill")


class GroupReader:
    """Reads a group again and again, with its files kept open."""

    def __init__(self, group: ControlGroup) -> None:
        self.limit_bytes, self.cores = group.limit_bytes, group.cores
        self._usage, self._stat = KernelFile(group.usage), KernelFile(group.inactive)
        self._events, self._cpu = KernelFile(group.events), KernelFile(group.cpu)
        self._cache, self._cache_at = 0, -_CACHE_S
        self._first_kills: int | None = None
        self._rates = Rates()

    def used_bytes(self, now: float) -> int | None:
        """Memory in use without reclaimable page cache; None when it cannot be read. now: monotonic seconds."""
        used = self._usage.number()
        if used is None:
            return None
        if now >= self._cache_at + _CACHE_S or used - self._cache > _NEAR * (self.limit_bytes or UNLIMITED):
            self._cache_at = now
            self._cache = _reclaimable(self._stat.read())
        return max(0, used - self._cache)

    def events(self, values: dict[str, float]) -> None:
        """Processes that the kernel killed here since the first call; share of the CPU periods in which the quota was
        used up."""
        kills = _count(self._events.read(), b"oom_kill")
        if kills is not None:
            self._first_kills = kills if self._first_kills is None else self._first_kills
            values["host/oom_kills"] = max(0, kills - self._first_kills)
        text = self._cpu.read() if self.cores is not None else None
        periods, throttled = _count(text, b"nr_periods"), _count(text, b"nr_throttled")
        if periods is not None and throttled is not None:
            self._rates.add(values, "host/cpu_throttled_pct", throttled, periods, 100.0)


def oom_kills_of_host() -> int | None:
    """How many processes the kernel has killed for want of memory, in whatever group; None before Linux 4.13."""
    return _count(KernelFile(Path("/proc/vmstat"), 65536).read(), b"oom_kill")


def find(
    pid: int | str = "self", root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> ControlGroup | None:
    """The control group of a process; None where there is none (macOS, no /sys)."""
    paths: dict[str, str] = {}
    for line in (KernelFile(proc / str(pid) / "cgroup").read() or b"").decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    is_version_2 = "" in paths and (root / "cgroup.controllers").exists()
    # of version 1 either alone: memory's may be off (cgroup_disable=memory), as it is on some boards
    if not is_version_2 and not paths.keys() & {"memory", "cpu"}:
        return None
    memory, cpu = ("", "") if is_version_2 else ("memory", "cpu")
    inner = _existing(root / memory, paths.get(memory, ""))
    limit, limited = _smallest(inner, root / memory, _memory_limit)
    cores, held = _smallest(_existing(root / cpu, paths.get(cpu, "")), root / cpu, _cpu_quota)
    pressures = {name: (held if name == "cpu" else limited) / f"{name}.pressure" for name in RESOURCES}
    usage = (folder / f"memory.{name}" for folder in (limited, inner) for name in ("current", "usage_in_bytes"))
    return ControlGroup(
        usage=_first(usage),
        limit_bytes=limit,
        inactive=_first(folder / "memory.stat" for folder in (limited, inner)),
        events=_first((limited / "memory.events", inner / "memory.events", inner / "memory.oom_control")),
        cores=cores,
        cpu=_first((held / "cpu.stat",)),
        pressure={name: path for name, path in pressures.items() if path.exists()},
    )


def _existing(root: Path, inside: str) -> Path:
    """The group's folder; in a container the path may be that of the host, and the group is the mounted root itself."""
    folder = root / inside
    return folder if folder.is_dir() else root


def _first(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)


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


def _memory_limit(folder: Path) -> int | None:
    """Limit of version 2, else of version 1, where 2**63 - 4096 stands for none."""
    limits = (KernelFile(folder / f"memory.{name}").number() for name in ("max", "limit_in_bytes"))
    return next((limit for limit in limits if limit is not None and limit < UNLIMITED), None)


def _cpu_quota(folder: Path) -> float | None:
    """In cores, likewise. The word "max" or -1 stands for none."""
    words = (KernelFile(folder / "cpu.max").read() or b"").split()
    files = (KernelFile(folder / f"cpu.cfs_{name}_us").read() for name in ("quota", "period"))
    numbers = [int(word) for word in words or [text or b"" for text in files] if word.strip().isdigit()]
    return numbers[0] / numbers[1] if len(numbers) == 2 and all(numbers) else None


def _count(text: bytes | None, name: bytes) -> int | None:
    """The number behind a name at the start of a line."""
    _, _, rest = (b"\n" + (text or b"")).partition(b"\n" + name + b" ")
    number = rest.partition(b"\n")[0]
    return int(number) if number.isdigit() else None


def _reclaimable(text: bytes | None) -> int:
    """Page cache that would be given up, as MemAvailable of the host counts it. Version 1 has the sum over the groups in it under
    another name."""
    return sum(_count(text, b"total_" + kind) or _count(text, kind) or 0 for kind in (b"inactive_file", b"active_file"))
