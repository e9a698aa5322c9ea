"""Step boundaries: the global optimizer hooks, and GradScaler.step, which may skip the optimizer.

Step n is the n-th step of the optimizer that owns most parameters; steps of smaller ones (a discriminator, a second group)
belong to the step in progress. Here, once a step, the row goes to the sender: one append.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.device import take
from perfagent.hooks.guard import guarded
from perfagent.hooks.model import owned, parameters_of, search
from perfagent.hooks.progress import Progress, active, now
from perfagent.signals.gradients import gradients_of, norms

__all__ = ["after_step", "before_step", "watch_norm", "watch_scaler_step", "watch_unscale"]

_PATIENCE = 64
"""Steps without one of the primary optimizer after which a smaller one takes its place (a second stage of training)."""


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - the signature torch calls
    """Global pre-hook of every optimizer."""
    p = active()
    if p is not None:
        _before(p, optimizer)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    """Global post-hook of every optimizer."""
    p = active()
    if p is not None:
        _after(p, optimizer)


@guarded
def _before(p: Progress, optimizer: Any) -> None:
    if p.thread != get_ident():
        if p.completed or p.steppers:
            return
        p.thread = get_ident()  # the first to step says which thread it is
    me = id(optimizer)
    if p.entered not in (0, me):  # an optimizer inside an optimizer: the outermost counts
        p.blocked += 1
        if p.blocked < _PATIENCE:
            return  # ... unless that one raised in its step and will never be heard of again
    p.entered, p.blocked = me, 0
    if p.primary is None:
        _choose(p, optimizer)
    if p.scaler_depth == 0:
        _start_clock(p)
    if p.primary() is optimizer and p.roots and p.gradients is None and _due(p, optimizer):
        divisor = getattr(optimizer, "grad_scale", None)
        if divisor is not None:  # a fused optimizer unscales inside its kernel
            p.grad_scale = take(divisor)
        _measure(p, gradients_of(optimizer))


def _due(p: Progress, optimizer: Any) -> bool:
    """Whether the gradients are to be measured before this step."""
    if p.clip_norm:
        if not p.grad_count:
            p.grad_count = len(gradients_of(optimizer))
        if p.clip_count >= p.grad_count:
            return False  # clipping looked at all of them
        p.clip_norm, p.grad_count = [], 0
    if p.completed % p.every == 0:
        return True
    loss = p.roots[-1].value
    return type(loss) is float and loss - loss != 0.0  # NaN or infinite: say at once how many gradients are


def _start_clock(p: Progress) -> None:
    p.optimizer_start = now()
    p.inside_ns = 0
    if p.clock is not None:
        p.mark = p.clock.mark()


def _stop_clock(p: Progress) -> int:
    ended = now()
    if p.optimizer_start:
        p.optimizer_ns += ended - p.optimizer_start - p.inside_ns
        p.optimizer_start = 0
        if p.clock is not None and p.mark is not None:
            mark = p.clock.mark()
            if mark is not None:
                p.device_optimizer.append((p.mark, mark))
            p.mark = None
    return ended


@guarded
def _after(p: Progress, optimizer: Any) -> None:
    if p.entered != id(optimizer) or p.thread != get_ident():
        return
    p.entered = 0
    if p.scaler_depth:
        p.scaler_depth = 2  # GradScaler.step ends the step: it did not skip
        return
    _finish(p, optimizer, _stop_clock(p), skipped=None)


def _finish(p: Progress, optimizer: Any, ended: int, skipped: Any) -> None:
    primary = p.primary() if p.primary is not None else None
    if primary is not optimizer and not _takes_over(p, optimizer, primary):
        p.previous_roots, p.roots = p.roots or p.previous_roots, []
        return
    if p.inside_roots and p.gradients is None and not p.clip_norm and p.completed % p.every == 0:
        _measure(p, gradients_of(optimizer))  # through a closure the gradients exist only now
    if skipped is True:
        p.skipped += 1
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if type(lr) is not float and lr is not None:
        lr = take(lr) if isinstance(lr, sys.modules["torch"].Tensor) else float(lr)
    first = p.last is None
    spent = ended - p.step_end if p.step_end else p.data_ns + p.backward_ns + p.optimizer_ns
    if p.gradients is not None:
        p.every = p.governor.period(p.grad_cost_ns, spent)
    p.complete(ended, lr, skipped)
    p.previous_roots = []
    if first and p.on_first_step is not None:
        p.on_first_step(optimizer)
        p.step_end = now()  # what finding the model took is ours, not the second step's
    p.own_ns += now() - ended


def _choose(p: Progress, optimizer: Any) -> None:
    """The first optimizer steps: is there one that owns more, and none of the same parameters?"""
    mine, size = parameters_of(optimizer), owned(optimizer)
    best = optimizer
    others: list[Any] = []
    if not p.model_size or size < p.model_size:  # else it owns all of the model that the user named
        model, others = search(optimizer, model=not p.model_size)
        p.found = None if model is None else weakref.ref(model)
    for other in others:
        if other is not optimizer and owned(other) > size and not mine.keys() & parameters_of(other).keys():
            best, size = other, owned(other)
    p.primary = weakref.ref(best)


def _takes_over(p: Progress, optimizer: Any, primary: Any) -> bool:
    """Whether an optimizer that is not the primary becomes it: the old one is gone, smaller, or has not stepped for long."""
    if primary is not None:
        steps = p.steppers[id(optimizer)] = p.steppers.get(id(optimizer), 0) + 1
        larger = steps == 1 and owned(optimizer) > owned(primary)
        if not larger and steps < _PATIENCE:
            return False
    p.primary = weakref.ref(optimizer)
    p.steppers.clear()
    return True


def _measure(p: Progress, gradients: list[Any]) -> None:
    started = now()
    p.gradients = norms(gradients)
    cost = now() - started
    p.own_ns += cost
    p.pass_ns += cost
    p.grad_cost_ns = min(cost, 2 * p.grad_cost_ns) if p.grad_cost_ns else cost  # one preempted pass is not the rule


# mixed precision ---------------------------------------------------------------------------------------------------------


def watch_scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """GradScaler.step, watched: a step that it skips is a step all the same."""

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        p = active()
        if p is None or not self._enabled or p.scaler_depth or p.thread != get_ident():
            return original(self, optimizer, *args, **kwargs)
        p.scaler_depth = 1
        _begin_scaled(p, self, optimizer)
        done = False
        try:
            result = original(self, optimizer, *args, **kwargs)
            done = True
            return result
        finally:
            stepped, p.scaler_depth = p.scaler_depth == 2, 0
            if done:
                _end_scaled(p, optimizer, stepped)

    return step


@guarded
def _begin_scaled(p: Progress, scaler: Any, optimizer: Any) -> None:
    if p.primary is None:
        _choose(p, optimizer)
    _start_clock(p)
    if scaler._scale is not None:
        p.scaler_scale = take(scaler._scale)


@guarded
def _end_scaled(p: Progress, optimizer: Any, stepped: bool) -> None:
    ended = _stop_clock(p)
    skipped: Any = not stepped
    found = getattr(optimizer, "found_inf", None)
    if stepped and found is not None:  # a fused optimizer decides on the device
        skipped = take(found)
    _finish(p, optimizer, ended, skipped)


def watch_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    """GradScaler.unscale_, watched: from here on the gradients are true ones."""

    @functools.wraps(original)
    def unscale_(self: Any, optimizer: Any) -> Any:
        result = original(self, optimizer)
        p = active()
        if p is not None and p.thread == get_ident():
            p.unscaled = True
        return result

    return unscale_


# clipping ----------------------------------------------------------------------------------------------------------------


def watch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """clip_grad._get_total_norm, watched: the norm that clipping computes anyway is ours for nothing."""

    @functools.wraps(original)
    def _get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        total = original(tensors, norm_type, *args, **kwargs)
        p = active()
        if p is not None and p.thread == get_ident():
            _clipped(p, tensors, norm_type, total)
        return total

    return _get_total_norm


@guarded
def _clipped(p: Progress, tensors: Any, norm_type: float, total: Any) -> None:
    if not isinstance(tensors, (list, tuple)) or not tensors or not p.roots or (p.scaling and not p.unscaled):
        return
    if float(norm_type) == 2.0 and not hasattr(total, "_local_tensor"):
        value = take(total)
        if value is None:
            return
        p.clip_norm.append(value)
        p.clip_count += len(tensors)
        finite = isinstance(value, float) and value - value == 0.0
        if finite or (not isinstance(value, float) and p.completed % p.every):
            return
    if p.gradients is None:  # clipping is about to change the gradients: what we want to know of them is to be had now
        _measure(p, list(tensors))
