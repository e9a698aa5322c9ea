"""Times parts of the loop that are not a training step's own work, named by the user or recognized by the agent.

A span becomes an entry of the trace, so that its time is `phase/NAME_s` and neither `other` nor the phase that contains
it. It also becomes an event, so that it is shown although not every step has it. Only the outermost span counts: a
framework's save that calls torch.save is one checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any

from perfagent.boundary.dynamo import Function
from perfagent.device import Event
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import PHASE

__all__ = ["COUNTED", "Span", "device_mark", "note_phase", "watch_phase"]

COUNTED = ("checkpoint", "eval", "comm", "h2d")
"""Phases that include their data waits and forward passes, which are then not part of the training step."""


class Span:
    """One timed part of the loop, entered and left on one thread. always: as of `StepState.report_phase`."""

    __slots__ = ("_always", "_begin_step", "_counts", "_name", "_on_training_thread", "_outer", "_progress", "_started")

    def __init__(self, progress: StepState, name: str, *, always: bool = True) -> None:
        self._progress, self._name, self._always = progress, name, always

    def __enter__(self) -> None:
        p = self._progress
        self._on_training_thread = p.thread == get_ident()
        self._counts = self._on_training_thread and self._name in COUNTED
        self._begin_step = p.in_progress()
        self._started = now()
        self._outer, p.phases.inside = p.phases.inside, self._name
        if self._counts:
            p.phase_depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        p, ended = self._progress, now()
        p.phases.inside = self._outer
        if self._counts:
            p.phase_depth -= 1
        is_within_one_step = self._begin_step >= p.completed  # then it is part of the step's breakdown
        if self._on_training_thread and not p.phase_depth and is_within_one_step and not p.off:
            p.trace.extend((self._started, ended, self._name, None, None, PHASE))
        duration_s = (ended - self._started) / 1e9
        p.report_phase(self._name, self._begin_step, duration_s, p.in_progress(), always=self._always)


def device_mark(p: StepState) -> Event | None:
    """Returns a mark of the device clock if the current stream is the one that computes; else None."""
    return None if p.clock is None else p.clock.mark_if_computing()


def note_phase(p: StepState, name: str, began: int, event: Event | None) -> None:
    """Adds what has run since `began`, at which the device's mark was `event`. Where a device clock runs and an end has no
    mark, the time is not known."""
    ended = None if event is None else device_mark(p)
    if p.clock is None or ended is not None:
        p.trace.extend((began, now(), name, event, ended, PHASE))
    elif event is not None:
        p.clock.release([event])


def watch_phase(
    name: str,
    look: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
    done: Callable[[StepState, Any], None] | None = None,
) -> Any:
    """Returns a wrapper for a function whose calls on the training thread are a phase of that name.

    look: gets the arguments of every call, even within another one and on other threads; done: what that returned, after
    a call that is a phase.
    """

    def watch(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            p = state.current
            if p is None:
                return original(*args, **kwargs)
            seen = look(args, kwargs) if look is not None else None
            if p.phase_depth or p.thread != get_ident():
                return original(*args, **kwargs)
            with Span(p, name, always=False):
                result = original(*args, **kwargs)
            if done is not None:
                done(p, seen)
            return result

        return call

    return watch
