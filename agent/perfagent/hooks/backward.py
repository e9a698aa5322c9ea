"""Backward time and the loss: one patch of `torch.autograd.backward`, which `Tensor.backward` calls by its module attribute.

Only the outermost call counts (activation checkpointing calls it again inside). The tensor it starts from is what the
optimizer minimizes. `GradScaler.scale` is watched so that the unscaled tensor is what we keep: dividing again would turn a
loss of 3.0 in half precision, scaled by 65536, into infinity.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.device import DeviceClock, take
from perfagent.hooks.guard import guarded
from perfagent.hooks.progress import Progress, active, now
from perfagent.hooks.row import Root

__all__ = ["watch_backward", "watch_scale"]


def watch_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.backward, watched."""

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        p = active()
        if p is None or p.backward_depth or p.thread != get_ident():
            return original(tensors, *args, **kwargs)
        p.backward_depth = 1
        try:
            _begin(p, tensors)
            return original(tensors, *args, **kwargs)
        finally:
            p.backward_depth = 0
            _end(p)

    return backward


@guarded
def _begin(p: Progress, tensors: Any) -> None:
    p.backward_start = started = now()
    p.opened = p.seen_backward = True
    if p.early:
        p.settle_early(p.completed + 1)
    single = tensors if hasattr(tensors, "requires_grad") else None
    if p.clock is None and single is not None and single.is_cuda:
        p.clock = DeviceClock()
    if p.clock is not None:
        mark = p.clock.mark()
        if p.forward_start and p.mark is not None and mark is not None:
            p.device_forward.append((p.mark, mark))
        p.mark = mark
    if p.forward_starts:
        if p.forward_start:  # the loss is computed outside the model: the forward pass ends here
            p.forward_pending += started - p.forward_start
            p.forward_start = 0
        p.forward_ns = (p.forward_ns or 0) + p.forward_pending
        if p.entered:
            p.inside_ns += p.forward_pending
        p.forwards += p.forward_starts
        p.forward_pending = p.forward_starts = p.forward_depth = 0
    p.take_batch()
    if p.entered:  # called by the optimizer's own step, through a closure
        if p.inside_roots:
            return  # LBFGS evaluates several times; the first is the loss at the current weights
        p.inside_roots = True
    root = _root(p, single) if single is not None else _sum(p, tensors)
    if root is not None:
        p.roots.append(root)
    p.own_ns += now() - started


@guarded
def _end(p: Progress) -> None:
    if not p.backward_start:
        return
    spent = now() - p.backward_start
    p.backward_start = 0
    p.backward_ns += spent
    if p.clock is not None and p.mark is not None:
        mark = p.clock.mark()
        if mark is not None:
            p.device_backward.append((p.mark, mark))
        p.mark = None
    if p.entered:
        p.inside_ns += spent


def _root(p: Progress, tensor: Any) -> Root | None:
    if p.scaled:
        unscaled = p.scaled.pop(id(tensor), None)
        if unscaled is not None:
            return unscaled
    if tensor.numel() != 1:
        return None  # a pipeline stage passes gradients on: it has no loss
    local = getattr(tensor, "_local_tensor", None)
    value = take(tensor if local is None else local)
    return None if value is None else Root(value, _divided(tensor))


def _sum(p: Progress, tensors: Any) -> Root | None:
    """Several roots in one call: their gradients add up, so their values do."""
    if not isinstance(tensors, (list, tuple)):
        return None
    roots = [_root(p, tensor) for tensor in tensors if hasattr(tensor, "requires_grad")]
    values = [root.value for root in roots if root is not None]
    if not values or not all(isinstance(value, float) for value in values):
        return None if len(values) != 1 else roots[0]
    return Root(float(sum(value for value in values if isinstance(value, float))), divided=True)


def _divided(tensor: Any) -> bool:
    return type(tensor.grad_fn).__name__ in ("DivBackward0", "MulBackward0")


def watch_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """GradScaler.scale, watched: remembers what each scaled tensor was before."""

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        p = active()
        if p is not None and scaled is not outputs and p.thread == get_ident():
            _remember(p, outputs, scaled)
        return scaled

    return scale


@guarded
def _remember(p: Progress, outputs: Any, scaled: Any) -> None:
    if isinstance(outputs, (list, tuple)):
        for one, other in zip(outputs, scaled, strict=True):
            _remember(p, one, other)
        return
    if not isinstance(outputs, sys.modules["torch"].Tensor) or outputs.numel() != 1:
        return
    p.scaling = True
    value = take(outputs)
    if value is not None:
        if len(p.scaled) > 64:  # scaled and never used for a backward pass
            p.scaled.clear()
        p.scaled[id(scaled)] = Root(value, _divided(outputs))
