"""Records operators on one thread during one call of the training, by torch's light profiler; stops where
that would do harm.

The recording can be read during the call, wherever Python runs on a thread that takes part in it. What waits for the
call's end is one array of native memory, 8 MB for the backward pass of a model with 300 tensors; after it is freed,
glibc keeps that much and more at the heap's end for good.

Torch supports one profiler per thread: a script that starts its own during the call would get an error. And torch asks
every operator's tensors for their shapes, which nested tensors lack: it then prints a page for each operator.

Ranges that a script names (`record_function`; DistributedDataParallel's forward pass is one) are not recorded: at its
end, a range would write into a profiler that the script has started within it, or since, and end or hang the process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from itertools import chain, islice
from threading import get_ident
from typing import Any

from perfagent.boundary.call_watch import replace
from perfagent.boundary.dynamo import untraced
from perfagent.signals.flops.op_callbacks import are_on_here, can_clear_here, clear_here, turn_here
from perfagent.signals.other_profilers import ends, starts

__all__ = ["Recording", "holds_nested"]

_MAKE_NESTED = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow", "masked_select")
_MOST_ITEMS = 64
_MARK = "__stop_profile"


class Recording:
    """A running recording. broken_off: a profiler of the script started, or the script made a nested tensor."""

    def __init__(self, *, compiled: bool) -> None:
        """compiled: leave functions that torch.compile may trace as they are."""
        torch = sys.modules["torch"]
        self.broken_off = False
        self._leaves_callback = False
        self._thread = get_ident()
        self._passes: set[int] = set()
        self._theirs = 0  # the thread on which the script runs a profiler of the same kind as ours
        self._entering: set[int] = set()  # threads that are entering a range
        makers = () if compiled else [(torch.nested, name) for name in _MAKE_NESTED if hasattr(torch.nested, name)]
        self._undo = [replace(module, name, self._break_off) for module, name in makers]
        ways = ((starts(), self._break_off, self._before_start), (ends(), self._make_way, self._before_end))
        for places, of_kineto, of_legacy in ways:
            self._undo += [
                replace(module, name, of_legacy if name.endswith("_legacy") else of_kineto) for module, name in places
            ]
        self._undo.append(replace(torch.autograd.profiler.record_function, "__enter__", self._leave_out, self._go_on))
        profiler = torch._C._profiler
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, True, False, False, False, False, profiler._ExperimentalConfig()
        )
        try:
            torch._C._autograd._enable_profiler_legacy(config)
        except BaseException:
            self._put_back()
            raise

    def is_of_this_thread(self) -> bool:
        """True if this thread began the recording."""
        return self._thread == get_ident()

    def joins(self) -> None:
        """Called by a thread that runs a part of the recorded call's graph."""
        self._passes.add(sys.modules["torch"]._C._current_graph_task_id())

    @untraced
    def so_far(self) -> list[list[Any]]:
        """Returns what each thread has recorded since the last call of this method; the recording goes on."""
        autograd = sys.modules["torch"]._C._autograd
        if self.broken_off or not can_clear_here() or autograd._profiler_type().name != "LEGACY":  # somebody ended it
            return []
        self._leaves_callback = True
        return _without_marks(autograd._disable_profiler_legacy(autograd._ProfilerDisableOptions(False, True)))

    @untraced
    def end(self) -> list[list[Any]]:
        """Returns the rest of what each thread recorded; empty if the recording was stopped early."""
        self._put_back()
        if self.broken_off:
            self._take_out()
            return []
        try:
            return _without_marks(sys.modules["torch"]._C._autograd._disable_profiler_legacy())
        finally:
            if self._leaves_callback:
                clear_here()

    def _put_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _takes_part(self) -> bool:
        return self.is_of_this_thread() or sys.modules["torch"]._C._current_graph_task_id() in self._passes

    def _break_off(self, *_: Any, **__: Any) -> None:
        if self._takes_part():
            self._take_out()
            self.broken_off = True

    def _leave_out(self, *_: Any) -> None:
        """Turns callbacks off while a range begins."""
        if not self.broken_off and self._takes_part() and are_on_here():
            self._entering.add(get_ident())
            turn_here(on=False)

    def _go_on(self) -> None:
        if get_ident() in self._entering:
            self._entering.discard(get_ident())
            turn_here(on=True)

    def _before_start(self, *_: Any, **__: Any) -> None:
        """A profiler of the script's of the same kind starts: until its end, such a profiler on this thread is the
        script's and not ours."""
        self._break_off()
        if self._takes_part():
            self._theirs = get_ident()

    def _before_end(self, *_: Any, **__: Any) -> None:
        if self._theirs == get_ident():
            self._theirs = 0

    def _make_way(self, *_: Any, **__: Any) -> None:
        """Removes our recorder before a profiler ends that began in another node of a backward pass."""
        if self.broken_off and self._takes_part():
            self._take_out()

    def _take_out(self) -> None:
        """Removes the recorder and its callback on this thread. A backward pass gives each of its nodes, and the thread
        after it, the recorder and callback that were there when it began, but torch removes the callback only once.
        (When we removed it only once, torch restored it in the next node, and it wrote into the script's profiler: a
        hang in one of some ten runs. One case is left: if a profiler begins inside an operator written in Python, or in
        a node's hook, of the recorded step, our callback writes into it when that operator or hook ends.)"""
        if self._theirs == get_ident():
            return
        autograd = sys.modules["torch"]._C._autograd
        with contextlib.suppress(Exception):
            if autograd._profiler_type().name == "LEGACY":
                autograd._disable_profiler_legacy()
                if self.broken_off or self._leaves_callback:
                    clear_here()


def _without_marks(threads: list[list[Any]]) -> list[list[Any]]:
    """Removes the mark that torch adds to a recording when it is read: it would look like an operator that
    never ends."""
    for events in threads:
        if events and events[-1].name() == _MARK:
            events.pop()
    return threads


def holds_nested(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """True if a call gets nested tensors, or if the process has jagged ones: torch numbers their lengths, and has one
    such number of its own."""
    own: Any = sys.modules.get("torch.nested._internal.nested_tensor")
    if len(getattr(own, "_tensor_symint_registry", ())) > 1:
        return True
    for given in chain(args, kwargs.values()):
        items = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else (given,)
        if any(getattr(item, "is_nested", False) is True for item in islice(items, _MOST_ITEMS)):
            return True
    return False
