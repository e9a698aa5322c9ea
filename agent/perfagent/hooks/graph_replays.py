"""Counts training steps that a script has captured in a graph, as whole ones: each replay is one.

A replay runs no Python, so no hook sees its step: steps would end with the warm-up, like those of a training that hangs. The
step that is captured computes nothing, and is none. Of a replayed step its end is known, on the host and the device, and what
the script logs; not its loss, nor its phases.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.boundary.call_watch import after, before
from perfagent.hooks.optimizer_step import finish_step
from perfagent.step.state import state

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["install"]

_steps: weakref.WeakKeyDictionary[object, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
"""Graph -> the optimizer whose step is in it."""


def install(patch: Callable[..., None]) -> None:
    torch: Any = sys.modules["torch"]
    for graph in (torch.cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None)):
        if graph is not None and hasattr(graph, "replay"):
            patch(graph, "capture_begin", after(_capture_began))
            patch(graph, "capture_end", before(_capture_ends))
            patch(graph, "replay", after(_replayed))


def _capture_began(*_: object, **__: object) -> None:
    p = state.current
    if p is not None and p.thread == get_ident():
        p.links.captured = []


def _capture_ends(graph: object, *_: object, **__: object) -> None:
    p = state.current
    if p is None or p.links.captured is None or p.thread != get_ident():
        return
    captured, p.links.captured = p.links.captured, None
    if captured:
        counts = next((one for one in captured if id(one) == p.primary_id), captured[-1])
        _steps[graph] = weakref.ref(counts)
        p.trace, p.loss_count, p.opened = [], 0, False


def _replayed(_result: object, graph: object, *_: object, **__: object) -> None:
    p = state.current
    optimizer = _steps[graph]() if graph in _steps else None
    if p is not None and p.thread == get_ident() and not p.entered and optimizer is not None:
        finish_step(p, optimizer, None, None if p.clock is None else p.clock.mark())
