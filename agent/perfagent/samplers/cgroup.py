"""Limits and use of the control group that this process lives in (version 2, or the memory and cpu controllers of version 1).

In a container the host's /proc/meminfo shows memory that the container may never use; the limit that kills is the group's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ControlGroup", "find"]

UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The files of one group; a path is None where the group has no such file."""

    usage: Path | None
    limit_bytes: int | None
    """Smallest memory limit on the way to the root; None when there is none."""
    inactive: Path | None
    """memory.stat: the page cache that would be given up before anyone is killed is not counted as used."""
    events: Path | None
    """Where the kernel counts its OOM kills: memory.events (2) or memory.oom_control (1)."""
    cores: float | None
    """CPU quota in cores; None when there is none."""

    def used_bytes(self) -> int | None:
        """Memory in use without reclaimable page cache; None when it cannot be read."""
        if self.usage is None:
            return None
        used = _number(self.usage)
        if used is None:
            return None
        return max(0, used - (_field(self.inactive, ("inactive_file", "total_inactive_file")) or 0))

    def oom_kills(self) -> int | None:
        """How many processes of the group the kernel has killed for want of memory."""
        return _field(self.events, ("oom_kill",))


def find(pid: int | str = "self", *, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> ControlGroup | None:
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
        folder = _existing(root, paths[""])
        return ControlGroup(
            usage=_file(folder / "memory.current"),
            limit_bytes=_smallest(folder, root, "memory.max"),
            inactive=_file(folder / "memory.stat"),
            events=_file(folder / "memory.events"),
            cores=_quota(folder / "cpu.max"),
        )
    if "memory" in paths:
        folder = _existing(root / "memory", paths["memory"])
        cpu = _existing(root / "cpu", paths.get("cpu", ""))
        return ControlGroup(
            usage=_file(folder / "memory.usage_in_bytes"),
            limit_bytes=_smallest(folder, root / "memory", "memory.limit_in_bytes"),
            inactive=_file(folder / "memory.stat"),
            events=_file(folder / "memory.oom_control"),
            cores=_quota_v1(cpu),
        )
    return None


def _existing(root: Path, inside: str) -> Path:
    """The group's folder; in a container the path may be that of the host, and the group is the mounted root itself."""
    folder = root / inside
    return folder if folder.is_dir() else root


def _file(path: Path) -> Path | None:
    return path if path.exists() else None


def _smallest(folder: Path, root: Path, name: str) -> int | None:
    limits = []
    while True:
        limit = _number(folder / name)
        if limit is not None and limit < UNLIMITED:
            limits.append(limit)
        if folder == root or root not in folder.parents:
            return min(limits, default=None)
        folder = folder.parent


def _quota(path: Path) -> float | None:
    try:
        quota, period = path.read_text(encoding="ascii").split()
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


def _field(path: Path | None, names: tuple[str, ...]) -> int | None:
    if path is None:
        return None
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key in names:
                return int(value)
    except (OSError, ValueError):
        return None
    return None
