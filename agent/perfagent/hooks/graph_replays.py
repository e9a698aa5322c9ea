"""Counts training steps that a script has captured in a graph, as whole ones: each replay is one.

A replay runs no Python, so no hook sees its step: steps would end with the warm-up, like those of a training that hangs. The
step that is captured computes nothing, and is none. Of a replayed step its end is known, on the host and the device, and what
the script logs; not its loss, nor its phases.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.boundary.dynamo import Function
from perfagent.boundary.guard import guarded
from perfagent.hooks.optimizer_step import finish_step
from perfagent.step.state import StepState, state

__all__ = ["install"]

_steps: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Graph -> the optimizer whose step is in it."""


def install(patch: Callable[..., None]) -> None:
    torch: Any = sys.modules["torch"]
    for graph in (torch.cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None)):
        if graph is not None and hasattr(graph, "replay"):
            patch(graph, "capture_begin", _watch_begin)
            patch(graph, "capture_end", _watch_end)
            patch(graph, "replay", _watch_replay)


def _watch_begin(original: Function) -> Function:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        p = state.current
        if p is not None and p.thread == get_ident():
            p.links.captured = []
        return result

    return capture_begin


def _watch_end(original: Function) -> Function:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        _end(self)
        return original(self, *args, **kwargs)

    return capture_end


@guarded
def _end(graph: Any) -> None:
    p = state.current
    if p is None or p.links.captured is None or p.thread != get_ident():
        return
    captured, p.links.captured = p.links.captured, None
    if captured:
        counts = next((one for one in captured if id(one) == p.primary_id), captured[-1])
        _steps[graph] = weakref.ref(counts)
        p.trace, p.loss_count, p.opened = [], 0, False


def _watch_replay(original: Function) -> Function:
    @functools.wraps(original)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        p = state.current
        if p is not None and p.thread == get_ident() and not p.entered and self in _steps:
            _stepped(p, _steps[self]())
        return result

    return replay


@guarded
def _stepped(p: StepState, optimizer: Any) -> None:
    if optimizer is not None:
        finish_step(p, optimizer, None, None if p.clock is None else p.clock.mark())
