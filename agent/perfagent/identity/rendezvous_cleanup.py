"""Deletes what earlier jobs left in the folder where ranks meet."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

__all__ = ["sweep"]

_WEEK_S = 7 * 86400.0


def sweep(folder: Path) -> None:
    """Jobs end without a word; what they left a week ago goes when the next one starts. The links that count a step's
    trainings stay for eight: that step may still be running."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                age_s = time.time() - path.lstat().st_mtime
                if age_s > _WEEK_S and (age_s > 8 * _WEEK_S or not path.is_symlink()):
                    path.unlink()
