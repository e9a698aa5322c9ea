"""Finds lines of source that make the host wait for the device, in one step now and then on CUDA.

Torch itself reports which calls wait: for one step its synchronization debug mode is set to "warn", and these
warnings are caught before anybody sees them. Other warnings pass. A script that has set that mode itself is left
alone. If the script turns warnings into errors, or records them, during the step, it would meet ours: the measurement
is then abandoned.

The reported line is the script's: the innermost frame outside of torch and perfagent.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

from perfagent.boundary.call_watch import replace
from perfagent.boundary.dynamo import not_traced
from perfagent.measure.source_lines import most_often, outside
from perfagent.step.state import StepState, now

__all__ = ["SynchronizingLines"]

_SAID = re.compile(r"called a synchronizing CUDA operation")
_SAID_ONCE = re.compile(r"Synchronization debug mode is a prototype feature")


class SynchronizingLines:
    """Listens for one step; a task between two steps (causes/investigator.py). lines: (file, line) -> number of
    waits; step: the measured step; 0 if the measurement failed."""

    def __init__(self, progress: StepState) -> None:
        self._progress = progress
        self.step = 0
        self.over = self._given_up = False
        self.cost_ns = 0
        self.lines: Counter[tuple[str, int]] = Counter()
        self._entries: list[Any] = []
        self._filters: Any = []
        self._replaced: Any = None
        self._listener: Any = None
        self._mode: Any = None
        self._undo: list[Callable[[], None]] = []

    def at_boundary(self) -> bool:
        """Begins at the end of one step and ends at the end of the next."""
        began = now()
        try:
            if self.step or self._given_up:
                self.close()
                return False
            self._mode = sys.modules["torch"].cuda
            if self._mode.get_sync_debug_mode() != 0:
                self.over = True
                return False
            self.step = self._progress.completed + 1
            self._listen()
            self._mode.set_sync_debug_mode("warn")
            return True
        finally:
            self.cost_ns += now() - began

    def close(self) -> None:
        """Restores everything. On the training thread."""
        if self._listener is not None:
            while self._undo:
                self._undo.pop()()
            self._fall_silent()
            if warnings.showwarning is self._listener:
                warnings.showwarning = self._replaced
            now_used: Any = warnings.filters
            for filters in (self._filters, now_used):  # the list may have been replaced by a copy meanwhile
                for entry in self._entries:
                    if entry in filters:
                        filters.remove(entry)
            self._listener = None
        self.over = True

    def _fall_silent(self) -> None:
        if self._mode.get_sync_debug_mode() == 1:
            self._mode.set_sync_debug_mode("default")

    def _stand_back(self, wanted: bool) -> None:
        """Abandons the measurement, since its counts are not complete. wanted: the script is about to raise or
        record all warnings."""
        if wanted and self.step and not self.over:
            self._fall_silent()
            self.step = 0
            self._given_up = True

    def _listen(self) -> None:
        """Adds filters in front for these warnings alone, and replaces the function that shows warnings.

        The list of filters is changed in place: `warnings.filterwarnings` would make Python forget which of the
        script's warnings it has shown, and show them again.
        """
        self._replaced = replaced = warnings.showwarning

        def showwarning(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **options: Any
        ) -> None:
            text = str(message)
            if _SAID.search(text):
                if get_ident() == self._progress.thread:  # the mode is that of the whole process
                    torch = f"{Path(sys.modules['torch'].__file__ or '').parent}{os.sep}"
                    self.lines[outside(sys._getframe(1), torch) or (filename, lineno)] += 1
            elif not _SAID_ONCE.search(text):
                replaced(message, category, filename, lineno, *more, **options)

        self._listener = warnings.showwarning = not_traced(showwarning)
        self._filters = warnings.filters
        self._entries = [("always", pattern, Warning, None, 0) for pattern in (_SAID, _SAID_ONCE)]
        self._filters[:0] = self._entries
        for name in ("simplefilter", "filterwarnings"):
            self._undo.append(replace(warnings, name, lambda action="", *_, **__: self._stand_back(action == "error")))
        entered = warnings.catch_warnings, "__enter__"
        self._undo.append(replace(*entered, lambda block: self._stand_back(getattr(block, "_record", False))))

    def values(self) -> dict[str, float]:
        return {"sync/calls_per_step": float(sum(self.lines.values()))}

    def told(self) -> list[dict[str, Any]]:
        return most_often(self.lines)
