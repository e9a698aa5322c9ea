"""Locks of torch's extension builder that nobody holds any more.

torch compiles C++ extensions (DeepSpeed's cpu_adam, its shared-memory communication) on first use and keeps a file
named `lock` beside them for as long. A build that was killed leaves it behind, and every later load then waits for it
without a word and without end (huggingface/transformers issue 26015; torch.utils.file_baton).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["extensions_folder", "stale_locks"]

QUIET_S = 60.0
"""While its folder still changes, a lock that no process here holds may be of another container or machine."""


def extensions_folder() -> Path:
    """Where torch keeps the extensions that it compiled for this Python and this torch."""
    import torch

    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"rocm{hip}" if hip is not None else "cpu" if cuda is None else f"cu{cuda}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (
        cache
        / "torch_extensions"
        / f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}_{build.replace('.', '')}"
    )


def stale_locks(folder: Path | None = None) -> list[Path]:
    """The locks below `folder` that no process here has open, and beside which nothing changed for a minute."""
    folder = extensions_folder() if folder is None else folder
    return [lock for lock in sorted(folder.glob("*/lock")) if _quiet(lock.parent) and not _held(lock)]


def _quiet(folder: Path) -> bool:
    return time.time() - max((found.st_mtime for found in _stats(folder.iterdir())), default=0.0) > QUIET_S


def _held(lock: Path) -> bool:
    """Whether a process has it open: a builder does, from beginning to end. Or it was released in this moment."""
    wanted = next(_stats([lock]), None)
    return wanted is None or any(os.path.samestat(wanted, found) for found in _stats(Path("/proc").glob("[0-9]*/fd/*")))


def _stats(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Of those that are there, and not another user's."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.stat()
