"""The spool and the disks: how much is there, what of it has not arrived, how much room is left."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfagent.delivery.records import numbered
from perfagent.delivery.spool import folders, owner
from perfagent.doctor.checks import Check, ok, problem, warning
from perfagent.wire.quantities import size, some

__all__ = ["Left", "disk", "free_bytes", "left_in", "spool"]

MIN_FREE_BYTES, LOW_FREE_BYTES = 100 * 2**20, 2 * 2**30


@dataclass(frozen=True, slots=True)
class Left:
    """One source in the spool. server: for which it was recorded; running: its process lives and delivers it itself."""

    folder: Path
    size: int
    server: str | None
    running: bool


def left_in(root: Path) -> list[Left]:
    """Every source of the spool, without taking one over. Raises OSError where the spool cannot be looked into."""
    found = []
    for folder in folders(root):
        try:
            if not numbered(folder, "ticks", "frames"):
                continue
            header = owner(folder)
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            found.append(Left(folder, size, header.server if header is not None else None, _is_running(folder)))
        except FileNotFoundError:  # delivered at this moment
            continue
    return found


def spool(root: Path, left: Sequence[Left] | OSError, server: str) -> Check:
    """root: the spool's folder; server: where this environment sends."""
    if isinstance(left, OSError):
        step = f"make {root} writable for this user, or set XDG_STATE_HOME to a folder that is"
        return problem("spool", f"{root} cannot be used ({left.strerror or left})", step)
    dead = [source for source in left if not source.running]
    running = len(left) - len(dead)
    at_work = f"; {some(running, 'running job')} left out" if running else ""
    if not dead:
        return ok("spool", f"{root}: nothing undelivered{at_work}")
    kept = size(sum(source.size for source in dead))
    text = f"{root}: {kept} undelivered, of {some(len(dead), 'source')} whose process has ended"
    elsewhere = sorted({source.server for source in dead if source.server is not None and source.server != server})
    here = any(source.server in (None, server) for source in dead)
    steps = ["`perfagent sync` sends what belongs to this server"] if here else []
    if elsewhere:
        more = f" and {len(elsewhere) - 2} more" if len(elsewhere) > 2 else ""
        steps.append(
            f"`perfagent sync` asks before it sends what was recorded for {', '.join(elsewhere[:2])}{more} to {server}"
        )
    return warning("spool", text + at_work, "; ".join(steps))


def free_bytes(folder: Path) -> int | OSError:
    """Free space where the folder is, or will be."""
    try:
        place = next(one for one in (folder, *folder.parents) if one.exists())
        return shutil.disk_usage(place).free
    except OSError as error:
        return error


def disk(name: str, folder: Path, free: int | OSError) -> Check:
    """name: which of the folders it is, for the reader."""
    if isinstance(free, OSError):
        return problem(
            name, f"{folder} cannot be read ({free.strerror or free})", "choose another folder, or change its rights"
        )
    text = f"{size(free)} free for {folder}"
    if free < MIN_FREE_BYTES:
        return problem(
            name, text, "make room: samples that no disk takes are kept in 8 MiB of memory, and the rest is lost"
        )
    if free < LOW_FREE_BYTES:
        return warning(name, text, "make room before a long run: a spool may take 512 MiB, and a database grows")
    return ok(name, text)


def _is_running(folder: Path) -> bool:
    """Whether a process holds the source's lock. Ours is let go of at once; who wants it in that moment tries again by
    itself."""
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
