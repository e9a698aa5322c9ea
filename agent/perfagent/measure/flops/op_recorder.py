"""Records operators on one thread during one call of the training, by torch's light profiler.

The recording can be read during the call, wherever Python runs on a thread that takes part in it. What waits for the
call's end is one array of native memory, 8 MB for the backward pass of a model with 300 tensors; after it is freed,
glibc keeps that much and more at the heap's end for good.

Torch supports one profiler per thread: a script that starts its own during the call would get an error, so ours ends.
Torch removes a recorder's callback, once, by a number. It forgets that number when it returns what was recorded so far,
or when the recorder ends inside a backward pass. A callback that stays takes the next profiler of this thread for its
recorder and writes into it: training hangs, or its memory is corrupted (torch 2.13). So would a range that the script
names (`record_function`; DistributedDataParallel's forward pass is one), at its end: callbacks are off where it begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING

from perfagent.boundary.call_watch import replace
from perfagent.measure.other_profilers import starts

if TYPE_CHECKING:
    from torch._C._autograd import ProfilerEvent

__all__ = ["Recording"]

_CLEAR = "_ZN2at25clearThreadLocalCallbacksEv"
_MARK = "__stop_profile"


@cache
def _clear_here() -> Callable[[], object] | None:
    """Removes this thread's callbacks. Python has a function that removes those of all threads and libraries; only C++
    has one for this thread, under its mangled name. None with another system, or a custom build."""
    library = Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libtorch_cpu.so"
    try:
        return getattr(ctypes.CDLL(str(library)), _CLEAR)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return None


class Recording:
    """A running recording. broken_off: a profiler of the script started meanwhile."""

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self.broken_off = self._leaves_callback = False
        self.thread = get_ident()
        self._undo = [replace(module, name, self._break_off) for module, name in starts()]
        enter = torch.autograd.profiler.record_function, "__enter__"
        self._undo.append(replace(*enter, _leave_out, lambda: torch.autograd._enable_record_function(True)))
        profiler = torch._C._profiler
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, True, False, False, False, False, profiler._ExperimentalConfig()
        )
        try:
            torch._C._autograd._enable_profiler_legacy(config)
        except BaseException:
            self._put_back()
            raise

    def so_far(self) -> list[list[ProfilerEvent]]:
        """Returns what each thread has recorded since the last call of this method; the recording goes on."""
        autograd = sys.modules["torch"]._C._autograd
        if self.broken_off or _clear_here() is None or not _records_here():
            return []
        self._leaves_callback = True
        return _without_marks(autograd._disable_profiler_legacy(autograd._ProfilerDisableOptions(False, True)))

    def end(self) -> list[list[ProfilerEvent]]:
        """Returns the rest of what each thread recorded; empty if the recording was stopped early."""
        self._put_back()
        if self.broken_off:
            self._take_out()
            return []
        try:
            return _without_marks(sys.modules["torch"]._C._autograd._disable_profiler_legacy())
        finally:
            if self._leaves_callback:
                _clear()

    def _put_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _break_off(self, *_: object, **__: object) -> None:
        if _records_here():
            self.broken_off = True
            self._take_out()

    def _take_out(self) -> None:
        """Removes the recorder and its callback on this thread. A backward pass gives each of its nodes, and the thread
        after it, the recorder and callback that were there when it began, but torch removes the callback only once.
        (When we removed it only once, torch restored it in the next node, and it wrote into the script's profiler: a
        hang in one of some ten runs.)"""
        if _records_here():
            with contextlib.suppress(RuntimeError):
                sys.modules["torch"]._C._autograd._disable_profiler_legacy()
            _clear()


def _records_here() -> bool:
    """True if a profiler of the kind of ours runs on this thread. (The script's own of that kind would refuse to start.)"""
    return bool(sys.modules["torch"]._C._autograd._profiler_type().name == "LEGACY")


def _leave_out(*_: object) -> None:
    if _records_here():
        sys.modules["torch"].autograd._enable_record_function(False)


def _clear() -> None:
    (_clear_here() or sys.modules["torch"]._C._autograd._clear_callbacks)()


def _without_marks(threads: list[list[ProfilerEvent]]) -> list[list[ProfilerEvent]]:
    """Removes the mark that torch adds to a recording when it is read: it would look like an operator that
    never ends."""
    for events in threads:
        if events and events[-1].name() == _MARK:
            events.pop()
    return threads
