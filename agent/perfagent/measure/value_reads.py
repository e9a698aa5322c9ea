"""Finds loops that read single values of tensors on the CPU (.item(), float(), a tensor in an `if`), in a few steps now and
then: how many reads, what their loops take, and in which lines.

Only without a CUDA device, where nothing is waited for, but a loop over values takes microseconds for each (the rule
sync_bound). With one, synchronization.py finds what the host waits for. Reads that torch itself makes (an optimizer its
step count) are left out, and so is what evaluations, saves and the loader read: their time has names already.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from perfagent.boundary.call_watch import replace
from perfagent.boundary.dynamo import compiled
from perfagent.measure.source_lines import LinesOfStep, is_ours
from perfagent.step.state import StepState, now

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ValueReads"]

READS = ("item", "__bool__", "__float__", "__int__", "__index__")
STEPS = 3
"""Measured steps; the one with the median of reads counts, so that what a loop logs every ten steps is no habit."""
_GAP_NS = 50_000
"""Reads of one function that follow each other so closely are one loop, and the time between them is its time."""


class ValueReads(LinesOfStep):
    """Counts the reads of some steps. clock: nanoseconds."""

    def __init__(self, progress: StepState, clock: Callable[[], int] = now) -> None:
        super().__init__(progress)
        self._clock = clock
        self.reading_ns = 0
        self._measured: list[tuple[int, Counter[tuple[str, int]], int]] = []
        self._counts: dict[CodeType, bool] = {}
        self._running: tuple[FrameType, int, int] | None = None
        """The read in progress: who reads, when it was called and when the tensor's method was."""
        self._newest: tuple[CodeType | None, int, int] = None, 0, 0
        """The newest read: its function, how much of the step was over (a pass, a batch), and when it ended."""

    def _goes_on(self) -> bool:
        if self._undo:
            self._measured.append((self._progress.completed, self.lines, self.reading_ns))
        elif compiled():  # the compiler must see the methods as they are
            return False
        else:
            tensor = sys.modules["torch"].Tensor
            self._undo += [replace(tensor, name, self._begins, self._ends) for name in READS]
        self.lines, self.reading_ns, self._newest = Counter(), 0, (None, 0, 0)
        if len(self._measured) < STEPS:
            return True
        self._measured.sort(key=lambda one: sum(one[1].values()))
        self.step, self.lines, self.reading_ns = self._measured[STEPS // 2]
        return False

    def values(self) -> dict[str, float]:
        return {"sync/reads_per_step": float(sum(self.lines.values())), "sync/reading_s": self.reading_ns / 1e9}

    def _begins(self, tensor: Tensor, *_: object, **__: object) -> None:
        began, p = self._clock(), self._progress
        if get_ident() == p.thread:
            frame = sys._getframe(2)
            counts = not (p.phase_depth or p.data_depth) and tensor.is_cpu and self._is_counted(frame.f_code)
            self._running = (frame, began, self._clock()) if counts else None

    def _ends(self) -> None:
        returned = self._clock()
        if get_ident() != self._progress.thread or self._running is None:
            return
        (frame, began, called), self._running = self._running, None
        function, passed, left = self._newest
        now_passed = len(self._progress.trace)
        self.reading_ns += returned - called
        if function is frame.f_code and passed == now_passed and began - left < _GAP_NS:
            self.reading_ns += began - left
        self._count(frame)
        left = self._clock()
        self._newest = frame.f_code, now_passed, left
        self.cost_ns += called - began + left - returned

    def _is_counted(self, code: CodeType) -> bool:
        """Whether that function's reads are the script's: those of torch are not, but for tensors in an f-string."""
        counted = self._counts.get(code)
        if counted is None:
            name = code.co_filename
            counted = not (is_ours(name) or name.startswith(self._torch)) or name.endswith("_tensor.py")
            self._counts[code] = counted
        return counted
