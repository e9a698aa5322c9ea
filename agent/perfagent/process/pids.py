"""Names a process for good: by its pid, which is used again, and its start time."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["boot_id", "machine", "owner_line", "process_start"]


def boot_id(proc: Path = Path("/proc")) -> str:
    """Names this start of the machine's kernel, which its containers share. Empty where the kernel does not say."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def machine(proc: Path = Path("/proc")) -> str:
    """Names the kernel and the namespace in which a pid is valid: another host, or a container beside this one, has others.
    Empty where that is not known."""
    boot = boot_id(proc)
    try:
        return f"{boot} {(proc / 'self/ns/pid').readlink()}" if boot and (proc / "self/stat").exists() else ""
    except OSError:
        return ""


def process_start(pid: int, proc: Path = Path("/proc")) -> int:
    """Start of a process in clock ticks after boot, 0 when it is gone: with the pid, a name that is never reused.

    Where there is no /proc: 1 for a process that is there.
    """
    try:
        return int((proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0 if (proc / "self").exists() else int(_exists(pid))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # that of another user
        return True
    except OSError:
        return False
    return True


def owner_line(pid: int) -> str:
    """What the lock file of a source holds: by it, the watcher finds the folder of the process that it watches."""
    return f"{pid} {process_start(pid)}"
