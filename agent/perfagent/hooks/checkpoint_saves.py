"""Times checkpoints where they are written: by torch, by its distributed checkpointing, and by the frameworks.

Each of these functions is wrapped when its module is imported, and restored when the run ends. A save on another thread
(an asynchronous one, after its staging) blocks nobody and is not counted; only its path is recorded.
"""

from __future__ import annotations

import io
import os
import stat
import time
from typing import Any

from perfagent.boundary.guard import guarded
from perfagent.hooks.phases import watch_phase
from perfagent.samplers.folders import saved_to
from perfagent.step.state import StepState

__all__ = ["watch_save"]

_FILE_BYTES = ("checkpoint/file_bytes",)
_PATHS = ("f", "checkpoint_id", "filename", "filepath", "save_directory", "save_dir", "output_dir", "path")


@guarded
def _note_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Gives the path of the checkpoint to the disk sampler, and returns it."""
    for value in (*args[:3], *(kwargs.get(name) for name in _PATHS)):
        if isinstance(value, (str, os.PathLike, io.IOBase)):
            path = getattr(value, "name", "") if isinstance(value, io.IOBase) else os.fspath(value)
            if isinstance(path, str) and path:
                if "://" not in path:
                    path = os.path.abspath(path)  # noqa: PTH100 - twice as fast; absolute, as a chdir may follow
                if not saved_to or saved_to[-1] != path:
                    saved_to.append(path)
                return path
            return None
    return None


@guarded
def _tell_size(p: StepState, path: str | None) -> None:
    """Reports the size of a saved file, as `checkpoint/file_bytes` of the step in progress. The last kilobytes of one that
    the script holds open may be missing; the size of a folder says nothing."""
    try:
        found = os.stat(path) if path else None  # noqa: PTH116 - half as long
    except (OSError, ValueError):  # of another machine, or no path at all
        return
    if found is not None and stat.S_ISREG(found.st_mode):
        p.rows.append((p.logged_at(), time.time(), time.monotonic(), _FILE_BYTES, (float(found.st_size),)))


watch_save = watch_phase("checkpoint", _note_path, _tell_size)
"""Wraps a function that writes a checkpoint."""
