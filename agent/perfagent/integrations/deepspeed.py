"""DeepSpeed: the engine's `step` is the step, its `backward` the backward pass, its gradient norm the norm.

ZeRO-1 and 2 step the optimizer inside once per parameter group, ZeRO-3 once per sub-group, and not at all when the
gradients overflow, so the optimizer hooks would count wrong: they are silent inside `engine.step`, and a step is over
when `engine.global_steps` moves on, which it does at the end of an accumulation window only. Gradients are partitioned
and partly gone by then, but DeepSpeed has computed their global norm for itself. What `engine.backward` returns is the
loss divided by the accumulation steps and not yet multiplied by the loss scale. No collective is issued here, and
nothing waits for the device.

An engine that steps a plain torch optimizer (stage 0 in full precision) needs the usual hooks, and its clipping
watched.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.boundary.gc_instances import living
from perfagent.boundary.guard import guarded
from perfagent.device import Value, take
from perfagent.hooks.backward import begin_pass, remember
from perfagent.hooks.model_discovery import owned
from perfagent.hooks.optimizer_step import finish_step, make_primary
from perfagent.signals.sharding import zero_pieces
from perfagent.step.state import Progress, now, state
from perfagent.step.trace import BACKWARD, BACKWARD_END, FIELDS, OPTIMIZER, Trace, begins_entry

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: deepspeed.runtime.engine."""
    engine = framework.DeepSpeedEngine
    patch(engine, "step", watch_step)
    if hasattr(engine, "_take_model_step"):  # what the pipeline engine calls, which has no step()
        patch(engine, "_take_model_step", watch_step)
    patch(engine, "backward", watch_backward)
    if hasattr(engine, "scale"):
        patch(engine, "scale", watch_scale)
    if hasattr(framework, "clip_grad_norm_"):
        patch(framework, "clip_grad_norm_", watch_clip)


class _Before(NamedTuple):
    """How the engine stood when its step was called. trace, at: that of the step in progress, and how many items it had."""

    trace: Trace
    at: int
    began: int
    event: Any
    steps: int
    skipped: int
    lr: Any
    scale: Value | None


def watch_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeedEngine.step, watched: the optimizer phase where it ends an accumulation window, nothing where it does
    not."""

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.entered or p.scaler_depth:
            return original(self, *args, **kwargs)
        before = _before(p, self)
        if before is None:
            return original(self, *args, **kwargs)
        p.entered, p.scaler_depth = id(self.optimizer), 1
        p.whole = True  # the hooks of the optimizers inside have nothing to do
        try:
            result = original(self, *args, **kwargs)
        finally:
            p.whole = False
            p.entered = p.blocked = p.scaler_depth = 0
        _after(p, self, before)
        return result

    return step


@guarded
def _before(p: Progress, engine: Any) -> _Before | None:
    optimizer = engine.optimizer
    if p.thread != get_ident():
        if p.completed or p.primary is not None:
            return None
        p.thread = get_ident()  # the first to step says which thread it is
    if optimizer is None or isinstance(optimizer, sys.modules["torch"].optim.Optimizer):
        return None
    groups = optimizer.param_groups
    lr = groups[0].get("lr") if groups else None  # now: the engine moves its scheduler on inside the step
    event = None if p.clock is None else p.clock.mark()
    before = _Before(p.trace, len(p.trace), now(), event, engine.global_steps, engine.skipped_steps, lr, _scale(engine))
    if p.completed >= p.measure_at and p.gradients is None and engine.is_gradient_accumulation_boundary():
        pieces = zero_pieces(optimizer)
        if pieces:
            p.health.measure_pieces(p, pieces, engine.module, before.scale)
    return before


@guarded
def _after(p: Progress, engine: Any, before: _Before) -> None:
    if engine.global_steps == before.steps:  # within an accumulation window
        if before.event is not None and p.clock is not None:
            p.clock.release([before.event])
        return
    # Before what it waited for inside (its clipping, the exchange of the new weights), which is not optimizer time.
    at = before.at if p.trace is before.trace and begins_entry(p.trace, before.at) else len(p.trace)
    p.trace[at:at] = before.began, before.event, OPTIMIZER
    optimizer = engine.optimizer
    if p.primary is None or p.primary() is getattr(engine, "basic_optimizer", None):
        _choose(p, engine)
    p.plain = False
    skipped = engine.skipped_steps > before.skipped
    norm = None if skipped else _taken(engine._global_grad_norm)
    if norm is not None:
        p.clip_norm, p.unusual = [norm], True
    if before.scale is not None:
        p.amp.scaler_scale, p.unusual = before.scale, True
    event = None if p.clock is None else p.clock.mark()
    finish_step(p, optimizer, skipped or (None if before.scale is None else False), event, before.lr)


def _scale(engine: Any) -> Value | None:
    """The loss scale of this step; None in a precision that needs none."""
    scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        return _taken(scaler._scale)
    return _taken(engine.optimizer.cur_scale) if engine.fp16_enabled() else None


def _taken(number: Any) -> Value | None:
    if number is None:
        return None
    return take(number) if isinstance(number, sys.modules["torch"].Tensor) else float(number)


def _choose(p: Progress, engine: Any) -> None:
    """Of several engines (a generator and its discriminator), the one that trains most says what a step is. One that
    has made more steps than this is left over from an earlier training."""
    kind = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    best, size = engine, owned(engine.optimizer)
    for other in living(kind):
        if other.__dict__.get("global_steps", sys.maxsize) <= engine.global_steps:
            optimizer = other.__dict__.get("optimizer")
            if hasattr(optimizer, "param_groups") and owned(optimizer) > size:
                best, size = other, owned(optimizer)
    make_primary(p, best.optimizer)
    p.found = weakref.ref(best)


def watch_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeedEngine.backward, watched: the reduction of gradients at its end is part of the backward pass."""

    @functools.wraps(original)
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.backward_depth or p.thread != get_ident():
            return original(self, loss, *args, **kwargs)
        began, trace = now(), p.trace
        p.backward_depth = 1
        at = _begin(p, loss, began)
        try:
            result = original(self, loss, *args, **kwargs)
            _note_loss(p, trace, at, result)
        finally:
            p.backward_depth = 0
            p.trace.extend((now(), None if p.clock is None else p.clock.mark(), BACKWARD_END))
        return result

    return backward


@guarded
def _begin(p: Progress, loss: Any, began: int) -> int:
    event = begin_pass(p, loss)
    p.trace.extend((began, event, None, False, BACKWARD))
    return len(p.trace) - FIELDS[BACKWARD]


@guarded
def _note_loss(p: Progress, trace: Trace, at: int | None, result: Any) -> None:
    """result: the loss as a part of its window, unscaled: such parts add up. at: where the pass begins in the trace."""
    value = _taken(result)
    if value is None or at is None or trace is not p.trace:
        return
    trace[at + 2 : at + 4] = value, True
    p.roots += 1


def watch_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeedEngine.scale, watched: for loops that call `engine.scale(loss).backward()`."""

    @functools.wraps(original)
    def scale(self: Any, loss: Any) -> Any:
        scaled = original(self, loss)
        p = state.current
        if p is not None and scaled is not loss and p.thread == get_ident():
            remember(p, loss, scaled)
        return scaled

    return scale


def watch_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's own clipping, which it uses without ZeRO: when the optimizer steps, the gradients are clipped
    ones."""

    @functools.wraps(original)
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        total = original(*args, **kwargs)
        p = state.current
        if p is not None and p.thread == get_ident():
            _clipped(p, total)
        return total

    return clip_grad_norm_


@guarded
def _clipped(p: Progress, total: Any) -> None:
    value = _taken(total)
    if value is not None:
        p.clip_norm, p.unusual = [value], True  # of all the engine's parameters
