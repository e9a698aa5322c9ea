"""Finds loops that read single values of tensors on the CPU (.item(), float(), a tensor in an `if`), in a few steps now and
then: how many reads, what their loops take, and in which lines.

Only without a CUDA device, where nothing is waited for, but a loop over values takes microseconds for each (the rule
sync_bound). With one, synchronization.py finds what the host waits for. Reads that torch itself makes (an optimizer its
step count) are left out, and so is what evaluations, saves and the loader read: their time has names already.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from perfagent.boundary.dynamo import not_traced
from perfagent.measure.compiled import compiled
from perfagent.measure.source_lines import is_ours, most_often, outside
from perfagent.step.state import StepState, now

__all__ = ["ValueReads"]

READS = ("item", "__bool__", "__float__", "__int__", "__index__")
STEPS = 3
"""Measured steps; the one with the median of reads counts, so that what a loop logs every ten steps is no habit."""
_GAP_NS = 50_000
"""Reads of one function that follow each other so closely are one loop, and the time between them is its time."""


class ValueReads:
    """Listens for some steps; a task between two steps (causes/investigator.py). lines: (file, line) -> number of
    reads; step: the measured step; 0 if nothing was measured. clock: nanoseconds."""

    def __init__(self, progress: StepState, clock: Callable[[], int] = now) -> None:
        self._progress, self._clock = progress, clock
        self.step = 0
        self.over = False
        self.cost_ns = 0
        self.lines: Counter[tuple[str, int]] = Counter()
        self.reading_ns = 0
        self._measured: list[tuple[int, Counter[tuple[str, int]], int]] = []
        self._undo: list[Callable[[], None]] = []
        self._torch = ""
        self._counts: dict[CodeType, bool] = {}
        self._newest: tuple[CodeType | None, int, int] = None, 0, 0
        """Of the newest read: the function, how much of the step was over (a pass, a batch), and when it ended."""

    def at_boundary(self) -> bool:
        """Begins at the end of one step and ends STEPS later."""
        began = now()
        try:
            if not self._undo:
                if self.over or compiled():  # the compiler must see the methods as they are
                    self.over = True
                    return False
                self._listen()
            else:
                self._measured.append((self._progress.completed, self.lines, self.reading_ns))
            self.lines, self.reading_ns, self._newest = Counter(), 0, (None, 0, 0)
            if len(self._measured) < STEPS:
                return True
            self._measured.sort(key=lambda one: sum(one[1].values()))
            self.step, self.lines, self.reading_ns = self._measured[STEPS // 2]
            self.close()
            return False
        finally:
            self.cost_ns += now() - began

    def close(self) -> None:
        """Restores everything. On the training thread."""
        while self._undo:
            self._undo.pop()()
        self.over = True

    def values(self) -> dict[str, float]:
        return {"sync/reads_per_step": float(sum(self.lines.values())), "sync/reading_s": self.reading_ns / 1e9}

    def told(self) -> list[dict[str, Any]]:
        return most_often(self.lines)

    def _listen(self) -> None:
        tensor = sys.modules["torch"].Tensor
        self._torch = f"{Path(sys.modules['torch'].__file__ or '').parent}{os.sep}"
        for name in READS:
            patch, own = self._watching(getattr(tensor, name)), vars(tensor).get(name)
            setattr(tensor, name, patch)
            self._undo.append(partial(_put_back, tensor, name, patch, own))

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        p, getframe, now = self._progress, sys._getframe, self._clock

        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            began = now()
            if self.over or p.phase_depth or p.data_depth or get_ident() != p.thread or not tensor.is_cpu:
                return original(tensor, *args, **kwargs)
            frame = getframe(1)
            if not self._is_counted(frame.f_code):
                return original(tensor, *args, **kwargs)
            called = now()
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._note(frame, began, called, now())

        return not_traced(read)

    def _is_counted(self, code: CodeType) -> bool:
        """Whether that function's reads are the script's: those of torch are not, but for tensors in an f-string."""
        counted = self._counts.get(code)
        if counted is None:
            name = code.co_filename
            counted = not (is_ours(name) or name.startswith(self._torch)) or name.endswith("_tensor.py")
            self._counts[code] = counted
        return counted

    def _note(self, frame: FrameType, began: int, called: int, returned: int) -> None:
        function, passed, left = self._newest
        now_passed = len(self._progress.trace)
        self.reading_ns += returned - called
        if function is frame.f_code and passed == now_passed and began - left < _GAP_NS:
            self.reading_ns += began - left
        self.lines[outside(frame, self._torch) or (frame.f_code.co_filename, frame.f_lineno)] += 1
        left = self._clock()
        self._newest = frame.f_code, now_passed, left
        self.cost_ns += called - began + left - returned


def _put_back(tensor: type, name: str, patch: Callable[..., Any], own: Callable[..., Any] | None) -> None:
    """own: None where the class inherits the method. Does nothing if somebody else has patched it by then."""
    if vars(tensor).get(name) is patch:
        delattr(tensor, name) if own is None else setattr(tensor, name, own)
