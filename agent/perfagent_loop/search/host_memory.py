"""Measures how much memory this process took at its worst, and how much the host has left.

On a CPU nothing is raised when memory ends: the kernel swaps, then kills. A search must stop before that.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from perfagent.samplers import cgroup

__all__ = ["HostMemory", "available_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class HostMemory:
    """Notes the peak of each trial. Where the system does not say (no Linux), it knows nothing and forbids nothing."""

    def __init__(self) -> None:
        self._before = 0
        self._took: dict[int, int] = {}

    def begin(self) -> None:
        """A trial begins: the kernel's mark of the peak goes down to what is resident now."""
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        self._before = _kilobytes(_STATUS, "VmRSS") or 0

    def end(self, size: int) -> int | None:
        """The trial of a batch of this size fitted; the peak of the process in bytes."""
        peak = _kilobytes(_STATUS, "VmHWM")
        if peak is not None:
            self._took[size] = max(0, peak - self._before)
        return peak

    def would_not_hold(self, size: int, share: float) -> bool:
        """Whether a batch of this size would take more than this share, by the two largest that fitted."""
        room = available_bytes()
        if room is None or not self._took:
            return False
        known = sorted(self._took)[-2:]
        largest = self._took[known[-1]]
        each = largest / known[-1]
        if len(known) == 2:
            each = max(0.0, (largest - self._took[known[0]]) / (known[1] - known[0]))
        return largest + each * (size - known[-1]) > share * room


def available_bytes() -> int | None:
    """What the host and this process's control group have left without swapping; None where neither says."""
    found: list[int] = []
    if (of_host := _kilobytes(Path("/proc/meminfo"), "MemAvailable")) is not None:
        found.append(of_host)
    group = cgroup.find()
    if group is not None and group.limit_bytes is not None and group.limit_bytes < cgroup.UNLIMITED:
        used = group.used_bytes()
        if used is not None:
            found.append(max(0, group.limit_bytes - used))
    return min(found) if found else None


def _kilobytes(path: Path, name: str) -> int | None:
    """A line `name: 12 kB`, in bytes."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match is not None else None
