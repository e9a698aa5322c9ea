"""The spool and the disks: how much is there, what of it has not arrived, how much room is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from perfagent.delivery.records import numbered
from perfagent.delivery.spool import folders, owner
from perfagent.wire.quantities import size, some
from perfagent_client.doctor.checks import Check

__all__ = ["disk", "spool"]

MIN_FREE_BYTES, LOW_FREE_BYTES = 100 * 2**20, 2 * 2**30


def spool(root: Path, server: str) -> Check:
    """root: the spool's folder; server: where this environment sends."""
    place = _existing(root)
    if not (place.is_dir() and os.access(place, os.W_OK)):
        step = f"make {place} a folder that this user may write to, or set XDG_STATE_HOME to one"
        return Check("spool", "problem", f"{root} cannot be used", step)
    left = list(_left_in(root))
    dead = [(other, kept) for other, kept, is_running in left if not is_running]
    running = len(left) - len(dead)
    at_work = f"; {some(running, 'running job')} left out" if running else ""
    if not dead:
        return Check("spool", "ok", f"{root}: nothing undelivered{at_work}")
    text = f"{root}: {size(sum(kept for _, kept in dead))} undelivered, of {some(len(dead), 'source')} whose process has ended"
    elsewhere = sorted({other for other, _ in dead if other is not None and other != server})
    here = any(other in (None, server) for other, _ in dead)
    steps = ["`perfagent sync` sends what belongs to this server"] if here else []
    if elsewhere:
        more = f" and {len(elsewhere) - 2} more" if len(elsewhere) > 2 else ""
        others = f"{', '.join(elsewhere[:2])}{more}"
        steps.append(f"`perfagent sync` asks before it sends what was recorded for {others} to {server}")
    return Check("spool", "warning", text + at_work, "; ".join(steps))


def _left_in(root: Path) -> Iterator[tuple[str | None, int, bool]]:
    """(server, bytes, whether its process lives and delivers it itself) of every source in the spool. Takes none over."""
    for folder in folders(root):
        with contextlib.suppress(FileNotFoundError):  # delivered at this moment
            if numbered(folder, "ticks", "frames"):
                header = owner(folder)
                kept = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
                yield header.server if header is not None else None, kept, _is_running(folder)


def disk(name: str, folder: Path) -> Check:
    """Free space where the folder is, or will be. name: which of the folders it is, for the reader."""
    try:
        free = shutil.disk_usage(_existing(folder)).free
    except OSError as error:
        step = "choose another folder, or change its rights"
        return Check(name, "problem", f"{folder} cannot be read ({error.strerror or error})", step)
    text = f"{size(free)} free for {folder}"
    if free >= LOW_FREE_BYTES:
        return Check(name, "ok", text)
    step = "make room: samples that no disk takes are kept in 8 MiB of memory, and the rest is lost"
    return Check(name, "problem" if free < MIN_FREE_BYTES else "warning", text, step)


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


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
