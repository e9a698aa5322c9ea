"""Samples the training thread's line while no phase is timed: it shows where `phase/other_s` goes.

The sender thread takes one sample a tick, in 6 µs. A sample reads the training thread's frames, but no variables, and
takes no lock. Once a minute it reports the most frequent lines, if 15 % of the samples were outside every phase. A line is
one of the script, the one that called into a library.
"""

from __future__ import annotations

import site
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from perfagent.measure.source_lines import is_ours, short
from perfagent.step.trace import BACKWARD_END, CLEARED, DATA, EVALUATED, FIELDS, OPTIMIZER_END, PHASE, Trace

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff
    from perfagent.step.state import StepState

__all__ = ["UnmeasuredLines", "is_unmeasured"]

FIRST_LOOKS = 30
EVERY_S = 60.0
LEAST_SHARE = 0.15
"""Share of the samples outside every phase; the server's rule asks for twice as much."""
_MOST_LINES = 8
_MOST_FRAMES = 100
_NEWEST_ITEMS = 64
_BESIDE = (DATA, PHASE, CLEARED, EVALUATED)


class UnmeasuredLines:
    """`UnmeasuredLines(handoff, progress, model).install()`. model: returns the root module or None."""

    def __init__(
        self,
        handoff: Handoff,
        progress: StepState,
        model: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handoff, self._progress, self._model, self._clock = handoff, progress, model, clock
        self._looks = 0
        self._lines: Counter[tuple[str, int, str]] = Counter()
        self._due = 0.0
        self._libraries: tuple[str, ...] = ()

    def install(self) -> None:
        self._handoff.add_source(self.poll)

    def poll(self) -> None:
        """Takes one sample. On the sender's thread."""
        p = self._progress
        if p.last is None or p.links.ended:
            return
        self._looks += 1
        if is_unmeasured(p) and not self._evaluates():
            frames = sys._current_frames()
            line = self._line(next((frame for thread, frame in frames.items() if thread == p.thread), None))
            del frames  # else the thread's variables live as long as this function
            if line is not None:
                self._lines[line] += 1
        if self._looks >= FIRST_LOOKS and self._clock() >= self._due:
            self._tell()

    def _evaluates(self) -> bool:
        return not getattr(self._model(), "training", True)

    def _line(self, frame: FrameType | None) -> tuple[str, int, str] | None:
        if not self._libraries:
            self._libraries = _libraries()
        inner = None  # where the whole script is installed
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            name = frame.f_code.co_filename
            if not is_ours(name):
                line = name, frame.f_lineno or 0, frame.f_code.co_qualname
                if not name.startswith(self._libraries):
                    return line
                inner = inner or line
            frame = frame.f_back
        return inner

    def _tell(self) -> None:
        met, looks = self._lines, self._looks
        self._due = self._clock() + EVERY_S
        self._looks, self._lines = 0, Counter()
        if sum(met.values()) < LEAST_SHARE * looks:
            return
        lines = [
            {"line": f"{short(name)}:{number}", "in": function, "count": count}
            for (name, number, function), count in met.most_common(_MOST_LINES)
        ]
        self._handoff.event("lines", {"looks": looks, "lines": lines}, step=self._progress.completed)


def is_unmeasured(p: StepState) -> bool:
    """Whether the training thread is in no phase now, as far as its trace tells."""
    if p.data_depth or p.phase_depth or p.backward_depth:
        return False
    tail: Trace = p.trace[-_NEWEST_ITEMS:]  # a copy: the other thread goes on meanwhile
    while tail:
        kind = tail[-1]
        if not isinstance(kind, int) or kind not in _BESIDE:
            return kind in (BACKWARD_END, OPTIMIZER_END)
        del tail[-FIELDS[kind] :]
    return len(p.trace) < _NEWEST_ITEMS


def _libraries() -> tuple[str, ...]:
    """Path prefixes of installed libraries."""
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()}
    return ("<", *(folder for folder in folders if folder))
