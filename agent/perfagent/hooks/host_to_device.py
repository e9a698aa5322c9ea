"""Times copies from the host to a device, `phase/h2d_s`: `Tensor.to` and `Tensor.cuda`, after the first step.

A process that uses no device with events is left alone. The time is that of the copy on the computing stream, between two
events. A copy on another stream (a prefetcher) overlaps, and moving a module before the first step belongs to no step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.boundary.dynamo import Function, keep_out_of_frames
from perfagent.boundary.guard import guarded
from perfagent.device import accelerator
from perfagent.hooks.phases import device_mark, note_phase
from perfagent.step.state import now, state

__all__ = ["install"]

Patch = Callable[[Any, str, Callable[[Function], Function]], None]


def install(patch: Patch) -> None:
    """Watches the copies of a process that uses a device with events; does nothing in any other."""
    backend, tensor = accelerator(), sys.modules["torch"].Tensor
    if backend.has_events and backend.in_use():
        for name in ("to", backend.kind):
            if hasattr(tensor, name):
                patch(tensor, name, watch_copy)
        keep_out_of_frames()


def watch_copy(original: Function) -> Function:
    """Wraps a method of Tensor that may copy it to a device."""

    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.clock is None or not self.is_cpu or p.thread != get_ident():
            return original(self, *args, **kwargs)
        if p.phase_depth or p.data_depth:  # already timed as part of something else
            return original(self, *args, **kwargs)
        began, event = now(), _mark(p)
        copied = original(self, *args, **kwargs)
        if event is not None and copied.is_cpu:
            p.clock.release([event])
        elif event is not None:
            _note(p, "h2d", began, event)
        return copied

    return copy


_mark, _note = guarded(device_mark), guarded(note_phase)
