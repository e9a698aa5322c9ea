"""Free space where this job writes: its working directory, our spool, and the folders that checkpoints went to.

Runs on the courier's thread: asking a file system that hangs (NFS without its server) hangs, too.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["FolderSampler", "saved_to"]

EVERY_S = 10.0

saved_to: deque[str] = deque(maxlen=8)
"""Paths that checkpoints were written to, the newest last: whoever sees one being written appends it. An append, no
lock."""


class FolderSampler:
    """`poll()` emits `disk/<role>_free_bytes` and `disk/<role>_used_pct` for the roles work, spool and checkpoint."""

    def __init__(self, emit: Callable[[dict[str, float]], None], spool: Path) -> None:
        self._emit, self._spool = emit, spool

    def poll(self) -> None:
        """Every EVERY_S seconds."""
        values: dict[str, float] = {}
        folders = {"work": Path(), "spool": self._spool}
        if saved_to and "://" not in saved_to[-1]:  # an address (s3://...) is on no disk
            folders["checkpoint"] = Path(saved_to[-1])
        for role, folder in folders.items():
            with contextlib.suppress(OSError):
                space = os.statvfs(_existing(folder))
                used = space.f_blocks - space.f_bfree
                if used + space.f_bavail > 0:  # else a file system without a size (proc, some network drives)
                    values[f"disk/{role}_free_bytes"] = float(space.f_bavail * space.f_frsize)
                    values[f"disk/{role}_used_pct"] = 100.0 * used / (used + space.f_bavail)  # as df counts it
        if values:
            self._emit(values)


def _existing(path: Path) -> Path:
    """The path or, where it is not there (yet, or any more), the nearest folder above it. Raises OSError."""
    for folder in (path, *path.absolute().parents):
        with contextlib.suppress(FileNotFoundError):
            folder.stat()
            return folder
    raise FileNotFoundError(path)
