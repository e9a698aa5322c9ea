"""Names the line of a script that a call came from, as people write it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["is_ours", "most_often", "outside", "short"]

_MOST_LINES = 20

_WARN = (f"{os.sep}warnings.py", f"{os.sep}_py_warnings.py")  # the latter: from Python 3.14 on
_OWN = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("perfagent", "perfagent_loop"))


def is_ours(name: str) -> bool:
    """Whether a file is the agent's own or the loop's."""
    return name.startswith(_OWN)


def outside(frame: FrameType | None, torch: str) -> tuple[str, int] | None:
    """Returns the innermost line outside of torch and the agent; None if there is none. torch: its folder."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not (is_ours(name) or name.startswith((torch, "<frozen")) or name.endswith(_WARN)):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def most_often(lines: Counter[tuple[str, int]]) -> list[dict[str, Any]]:
    """Returns (file, line) -> number as an event tells it, most frequent first: [{"line": "train.py:42", "count": 3}]."""
    return [
        {"line": f"{short(name)}:{number}", "count": times} for (name, number), times in lines.most_common(_MOST_LINES)
    ]


def short(name: str) -> str:
    """Returns a path as people write it: below the working directory, or its last three parts."""
    path = Path(name)
    with contextlib.suppress(OSError, ValueError):  # the directory was removed, or does not hold the file
        return str(path.relative_to(Path.cwd()))
    return str(Path(*path.parts[-3:]))
