"""Names a process for good: by its pid, which is used again, and its start time."""

from __future__ import annotations

from pathlib import Path

__all__ = ["owner_line", "process_start"]


def process_start(pid: int) -> int:
    """Start of a process in clock ticks after boot, 0 when it is gone: with the pid, a name that is never reused."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def owner_line(pid: int) -> str:
    """What the lock file of a source holds: by it, the watcher finds the folder of the process that it watches."""
    return f"{pid} {process_start(pid)}"
