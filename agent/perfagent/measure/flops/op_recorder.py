"""Records operators on one thread during one call of the training, by torch's light profiler.

Torch supports one profiler per thread: a script that starts its own during the call would get an error, so ours ends.
Torch removes a recorder's callback once, by a number, and forgets that number when the recorder ends inside a backward
pass. A callback that stays takes the next profiler of this thread for its recorder and writes into it: training hangs,
or its memory is corrupted (torch 2.13). So would a range that the script names (`record_function`;
DistributedDataParallel's forward pass is one), at its end: callbacks are off where it begins.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from perfagent.boundary.call_watch import replace
from perfagent.measure.other_profilers import starts

if TYPE_CHECKING:
    from torch._C._autograd import ProfilerEvent

__all__ = ["Recording"]


class Recording:
    """A running recording. broken_off: a profiler of the script started meanwhile."""

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self.broken_off = False
        self._undo = [replace(module, name, self._break_off) for module, name in starts()]
        enter = torch.autograd.profiler.record_function, "__enter__"
        self._undo.append(replace(*enter, _leave_out, lambda: torch.autograd._enable_record_function(True)))
        profiler = torch._C._profiler
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, True, False, False, False, False, profiler._ExperimentalConfig()
        )
        try:
            torch._C._autograd._enable_profiler_legacy(config)
        except (RuntimeError, TypeError):  # another profiler runs, or torch is of another version
            self._put_back()
            raise

    def end(self) -> list[list[ProfilerEvent]]:
        """Returns what each thread recorded; empty if the recording was stopped early."""
        self._put_back()
        if self.broken_off:
            self._take_out()
            return []
        return sys.modules["torch"]._C._autograd._disable_profiler_legacy()  # type: ignore[no-any-return]

    def _put_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _break_off(self, *_: object, **__: object) -> None:
        if _records_here():
            self.broken_off = True
            self._take_out()

    def _take_out(self) -> None:
        """Removes the recorder and all callbacks of this thread. A backward pass gives each of its nodes, and the thread
        after it, the recorder and callback that were there when it began, but torch removes the callback only once.
        (When we removed it only once, torch restored it in the next node, and it wrote into the script's profiler: a
        hang in one of some ten runs.)"""
        if _records_here():
            autograd = sys.modules["torch"]._C._autograd
            with contextlib.suppress(RuntimeError):
                autograd._disable_profiler_legacy()
            autograd._clear_callbacks()


def _records_here() -> bool:
    """True if a profiler of the kind of ours runs on this thread. (The script's own of that kind would refuse to start.)"""
    return bool(sys.modules["torch"]._C._autograd._profiler_type().name == "LEGACY")


def _leave_out(*_: object) -> None:
    if _records_here():
        sys.modules["torch"].autograd._enable_record_function(False)
