"""Finds lines of source that make the host wait for the device, in one step now and then on CUDA.

Torch itself reports which calls wait: for one step its synchronization debug mode is set to "warn", and these
warnings are caught before anybody sees them. Other warnings pass. A script that has set that mode itself is left
alone. If the script turns warnings into errors, or records them, during the step, it would meet ours: the measurement
is then abandoned.
"""

from __future__ import annotations

import re
import sys
import warnings
from threading import get_ident
from typing import Any

from perfagent.boundary.call_watch import replace
from perfagent.boundary.dynamo import not_traced
from perfagent.measure.source_lines import LinesOfStep

__all__ = ["SynchronizingLines"]

_SAID = re.compile(r"called a synchronizing CUDA operation")
_SAID_ONCE = re.compile(r"Synchronization debug mode is a prototype feature")
_FILTERS = [("always", pattern, Warning, None, 0) for pattern in (_SAID, _SAID_ONCE)]


class SynchronizingLines(LinesOfStep):
    """Counts the waits of one step."""

    def _goes_on(self) -> bool:
        cuda = sys.modules["torch"].cuda
        if self._undo or cuda.get_sync_debug_mode() != 0:
            return False
        self.step = self._progress.completed + 1
        self._listen()
        cuda.set_sync_debug_mode("warn")
        return True

    def _stand_back(self, wanted: bool) -> None:
        """Abandons the measurement, since its counts are not complete. wanted: the script is about to raise or
        record all warnings."""
        if wanted and self._undo:
            _fall_silent()
            self.step = 0

    def _listen(self) -> None:
        """Adds filters in front for these warnings alone, and replaces the function that shows warnings.

        The list of filters is changed in place: `warnings.filterwarnings` would make Python forget which of the
        script's warnings it has shown, and show them again.
        """
        replaced, filters = warnings.showwarning, warnings.filters

        def showwarning(message: Warning | str, *args: Any, **options: Any) -> None:
            if _SAID.search(str(message)):
                if get_ident() == self._progress.thread:  # the mode is that of the whole process
                    self._count(sys._getframe(1))
            elif not _SAID_ONCE.search(str(message)):
                replaced(message, *args, **options)

        def undo() -> None:
            _fall_silent()
            if warnings.showwarning is showwarning:
                warnings.showwarning = replaced
            for used in (filters, warnings.filters):  # the list may have been replaced by a copy meanwhile
                for entry in _FILTERS:
                    if entry in used:
                        used.remove(entry)  # type: ignore[attr-defined] # a list, which typeshed does not say

        warnings.showwarning = not_traced(showwarning)
        filters[:0] = _FILTERS  # type: ignore[index]
        self._undo.append(undo)
        for name in ("simplefilter", "filterwarnings"):
            self._undo.append(replace(warnings, name, lambda action="", *_, **__: self._stand_back(action == "error")))
        entered = warnings.catch_warnings, "__enter__"
        self._undo.append(replace(*entered, lambda block: self._stand_back(getattr(block, "_record", False))))

    def values(self) -> dict[str, float]:
        return {"sync/calls_per_step": float(sum(self.lines.values()))}


def _fall_silent() -> None:
    cuda = sys.modules["torch"].cuda
    if cuda.get_sync_debug_mode() == 1:
        cuda.set_sync_debug_mode("default")
