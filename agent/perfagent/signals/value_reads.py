"""Finds loops that read single values of tensors on the CPU (.item(), float(), a tensor in an `if`), in a few steps now and
then: how many reads, what their loops take, and in which lines.

Where there is a CUDA device, synchronization.py finds what the host waits for. Without one nothing is waited for, but a
loop over values takes microseconds for each. Reads that torch itself makes (an optimizer its step count) are left out, and
so is what evaluations, saves and the loader read: their time has names already.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from perfagent.boundary.dynamo import not_traced
from perfagent.signals.compiled import compiled
from perfagent.signals.source_lines import is_ours, most_often, outside
from perfagent.step.state import StepState, now

__all__ = ["ValueReads"]

READS = ("item", "__bool__", "__float__", "__int__", "__index__")
STEPS = 3
"""Measured steps; the one with the median of reads counts, so that what a loop logs every ten steps is no habit."""
_GAP_NS = 50_000
"""Reads of one function that follow each other so closely are one loop, and the time between them is its time."""
_LONG_GAP_NS = 20_000_000
_FEW = 0.1
"""So few gaps of a loop may be longer, up to _LONG_GAP_NS, and are its time as well: another process had the core."""


class _Loop:
    """Reads of one function in a row, with no part of the step (a pass, a batch) between them. Times in ns."""

    __slots__ = ("code", "gaps_ns", "left", "long", "long_ns", "passed", "short", "took_ns")

    def __init__(self, code: CodeType, passed: int) -> None:
        self.code, self.passed = code, passed
        self.took_ns = self.gaps_ns = self.long_ns = self.left = 0
        self.short = self.long = 0

    def wait(self, gap: int) -> None:
        """The time since the read before."""
        if gap < _GAP_NS:
            self.short += 1
            self.gaps_ns += gap
        elif gap < _LONG_GAP_NS:
            self.long += 1
            self.long_ns += gap

    def spent_ns(self) -> int:
        with_long = self.long <= _FEW * (self.short + self.long)
        return self.took_ns + self.gaps_ns + (self.long_ns if with_long else 0)


class ValueReads:
    """Listens for some steps; a task between two steps (rootcause/investigator.py). lines: (file, line) -> number of
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
        self._loop: _Loop | None = None

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
                self._end_loop()
                self._measured.append((self._progress.completed, self.lines, self.reading_ns))
            self.lines, self.reading_ns, self._loop = Counter(), 0, None
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
            self._undo.append(_replaced(tensor, name, self._watching(getattr(tensor, name))))

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
        loop, passed = self._loop, len(self._progress.trace)
        if loop is None or loop.code is not frame.f_code or loop.passed != passed:
            self._end_loop()
            loop = self._loop = _Loop(frame.f_code, passed)
        else:
            loop.wait(began - loop.left)
        loop.took_ns += returned - called
        self.lines[outside(frame, self._torch) or (frame.f_code.co_filename, frame.f_lineno)] += 1
        loop.left = self._clock()
        self.cost_ns += called - began + loop.left - returned

    def _end_loop(self) -> None:
        if self._loop is not None:
            self.reading_ns += self._loop.spent_ns()
            self._loop = None


def _replaced(owner: Any, name: str, patch: Callable[..., Any]) -> Callable[[], None]:
    """Patches a method that the class inherits or has, and returns a function that takes the patch away again, unless
    somebody else has patched it by then."""
    own = vars(owner).get(name)
    setattr(owner, name, patch)

    def undo() -> None:
        if vars(owner).get(name) is not patch:
            return
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo
