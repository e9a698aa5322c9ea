"""Locks of torch's extension builder that nobody holds any more.

torch compiles C++ extensions (DeepSpeed's cpu_adam, its shared-memory communication) on first use and keeps a file
named `lock` beside them for as long. A build that was killed leaves it behind, and every later load then waits for it
without a word and without end (huggingface/transformers issue 26015; torch.utils.file_baton).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

__all__ = ["extensions_folder", "stale_locks"]

QUIET_S = 60.0
"""A lock that no process here holds may be that of another container or machine, while something in its folder still
changes."""


def extensions_folder() -> Path:
    """Where torch keeps the extensions that it compiled for this Python and this torch."""
    import torch

    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cuda, hip = torch.version.cuda, torch.version.hip
    build = (
        f"rocm{hip.replace('.', '')}" if hip is not None else "cpu" if cuda is None else f"cu{cuda.replace('.', '')}"
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "torch_extensions" / f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}_{build}"


def stale_locks(folder: Path | None = None) -> list[Path]:
    """The locks below `folder` that no process of this machine has open, and beside which nothing has changed for a
    minute."""
    folder = extensions_folder() if folder is None else folder
    return [lock for lock in sorted(folder.glob("*/lock")) if _quiet(lock.parent) and not _held(lock)]


def _quiet(folder: Path) -> bool:
    newest = 0.0
    for path in folder.iterdir():
        try:
            newest = max(newest, path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return time.time() - newest > QUIET_S


def _held(lock: Path) -> bool:
    """Whether a process has it open: a builder does, from beginning to end."""
    try:
        wanted = lock.stat()
    except FileNotFoundError:
        return True  # released in this moment
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = descriptor.stat()
        except OSError:  # of another user, or gone
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
