"""Names the line of a script that a call came from, as people write it, and counts such lines in a step."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from perfagent.measure.step_task import StepTask
from perfagent.step.state import StepState

__all__ = ["LinesOfStep", "is_ours", "short"]

_MOST_LINES = 20

_WARN = (f"{os.sep}warnings.py", f"{os.sep}_py_warnings.py")  # the latter: from Python 3.14 on
_OWN = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("perfagent", "perfagent_loop"))


def is_ours(name: str) -> bool:
    """Whether a file is the agent's own or the loop's."""
    return name.startswith(_OWN)


def short(name: str) -> str:
    """Returns a path as people write it: below the working directory, or its last three parts."""
    path = Path(name)
    with contextlib.suppress(OSError, ValueError):  # the directory was removed, or does not hold the file
        return str(path.relative_to(Path.cwd()))
    return str(Path(*path.parts[-3:]))


class LinesOfStep(StepTask):
    """Counts lines of the script in a step. lines: (file, line) -> number."""

    def __init__(self, progress: StepState) -> None:
        super().__init__(progress)
        self.lines: Counter[tuple[str, int]] = Counter()
        self._torch = f"{Path(sys.modules['torch'].__file__ or '').parent}{os.sep}"
        self._undo: list[Callable[[], None]] = []

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.over = True

    def _count(self, frame: FrameType) -> None:
        """Counts the innermost line outside of torch and the agent."""
        line, outer = (frame.f_code.co_filename, frame.f_lineno), frame.f_back
        while _is_inner(line[0], self._torch) and outer is not None:
            line, outer = (outer.f_code.co_filename, outer.f_lineno), outer.f_back
        self.lines[line] += 1

    def most_frequent(self) -> list[dict[str, str | int]]:
        """Returns the lines as in an event, most frequent first: [{"line": "train.py:42", "count": 3}]."""
        most = self.lines.most_common(_MOST_LINES)
        return [{"line": f"{short(name)}:{number}", "count": times} for (name, number), times in most]


def _is_inner(name: str, torch: str) -> bool:
    return is_ours(name) or name.startswith((torch, "<frozen")) or name.endswith(_WARN)
