"""Free space where this job writes: its working directory, our spool, and the folders that checkpoints went to.

Runs on the courier's thread: asking a file system that hangs (NFS without its server) hangs, too.
"""

from __future__ import annotations

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
        asked: dict[int, tuple[float, float] | None] = {}  # by file system: roles on the same one say the same
        for role, path in (
            ("work", "."),
            ("spool", str(self._spool)),
            ("checkpoint", saved_to[-1] if saved_to else ""),
        ):
            space = _space(path, asked) if path else None
            if space is not None:
                values[f"disk/{role}_free_bytes"], values[f"disk/{role}_used_pct"] = space
        if values:
            self._emit(values)


def _space(path: str, asked: dict[int, tuple[float, float] | None]) -> tuple[float, float] | None:
    """Bytes that an ordinary user may still write, and the share in use as df counts it; None where it cannot be asked.

    A path that is not there (yet, or any more) stands for the nearest folder above it; an address (s3://...) is on no
    disk.
    """
    if "://" in path:
        return None
    for folder in (Path(path), *Path(path).absolute().parents):
        try:
            device = os.stat(folder).st_dev  # noqa: PTH116 - beside statvfs, which pathlib does not have
            if device not in asked:
                asked[device] = _of(os.statvfs(folder))
            return asked[device]
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _of(found: os.statvfs_result) -> tuple[float, float] | None:
    used = found.f_blocks - found.f_bfree
    if used + found.f_bavail <= 0:  # a file system without a size (proc, some network drives)
        return None
    return float(found.f_bavail * found.f_frsize), 100.0 * used / (used + found.f_bavail)
