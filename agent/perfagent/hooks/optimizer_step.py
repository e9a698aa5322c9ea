"""Finds the step boundaries, by torch's global optimizer hooks and a wrapper around whole steps.

Step n is the n-th step of the optimizer that owns most parameters; steps of smaller ones (a discriminator, a second
group) belong to the step in progress. Once a step, the row goes to the sender: one append.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.boundary.dynamo import Function, keep_out_of_frames, not_traced, untraced
from perfagent.boundary.guard import failed, failures, guarded
from perfagent.device import devices_of, read_number_later
from perfagent.hooks.backward import check_arrived
from perfagent.hooks.selection.joint_step import has_gradients
from perfagent.step import trace as kinds
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import BACKWARD_END, CLEARED, OPTIMIZER, OPTIMIZER_END, backward_since, only_backward_since

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from perfagent.device import Event, Value

__all__ = ["after_step", "before_step", "finish_step", "watch_clear", "watch_optimizer", "watch_whole_step"]

_IN_FORWARD = (kinds.FORWARD, kinds.RETURNED)
_CLEARED_AFTER = (*_IN_FORWARD, BACKWARD_END)


@untraced
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Global pre-hook of every optimizer. If it returns arguments, the step gets them in place of its own."""
    p = state.current
    return None if p is None or p.whole else _before(p, optimizer, args, kwargs)


def _with_closure_watched(p: StepState, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """None if the step gets no function that backpropagates: then the gradients are complete."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _watched(p, optimizer, kwargs["closure"])}
    for at, arg in enumerate(args):
        if callable(arg):
            return (*args[:at], _watched(p, optimizer, arg), *args[at + 1 :]), kwargs
    return None


def _watched(p: StepState, optimizer: Optimizer, closure: Function) -> Function:
    """Wraps the closure of a step. The step's gradients are those of its loss: of the closure's first call, if it is
    called several times. (Lightning also passes closures that do nothing.)"""
    me, at, first = id(optimizer), len(p.trace), True
    if p.primary_id == me:
        p.measured.in_closure = False

    @functools.wraps(closure)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        began, here = now(), len(p.trace)
        loss = closure(*args, **kwargs)
        if first and p.entered == me:
            first = False
            if p.primary_id == me:
                p.measured.in_closure = True
                measure_gradients(p, optimizer)
            elif not backward_since(p.trace, at):  # otherwise its gradients are from a backward pass of its own
                p.links.joint_step.steps(optimizer)
        if p.entered == me and only_backward_since(p.trace, here):
            # its forward pass is not optimizer time, even if no model is known (yet)
            p.trace.extend((began, now(), kinds.UNNAMED, None, None, kinds.PHASE))
        return loss

    return watched


@guarded
def _before(p: StepState, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if p.thread != get_ident() and not p.move_to_thread(optimizer):
        return None
    me = id(optimizer)
    if p.entered and p.entered != me:  # an optimizer inside an optimizer: the outermost counts
        return None
    p.entered = me
    p.plain = False
    if not p.primary_id:
        p.selection.ensure_primary(optimizer)  # the time of a search is not the optimizer's
    if not p.scaler_depth:
        p.trace.extend((now(), None if p.clock is None else p.clock.mark(), OPTIMIZER))
    return _begun(p, optimizer, args, kwargs)


@guarded
def _begun(p: StepState, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Before the step changes a weight. Returns arguments if the step is to have them in place of its own."""
    if p.losses.arriving is not None:
        check_arrived(p)
    if not p.primary_id:
        p.selection.ensure_primary(optimizer)
    with_closure = _with_closure_watched(p, optimizer, args, kwargs)
    if with_closure is not None:
        return with_closure
    if p.primary_id != id(optimizer):
        p.links.joint_step.steps(optimizer)
    elif p.clips is not None or p.completed >= p.measure_at:
        measure_gradients(p, optimizer)
    return None


@guarded
def measure_gradients(p: StepState, optimizer: Optimizer) -> None:
    """Measures the gradients, unless they were clipped: then it is too late."""
    is_due = p.completed >= p.measure_at and p.gradients is None
    if is_due:
        any_gradient = has_gradients(optimizer)
        p.measured.without_gradient = 0 if any_gradient else p.measured.without_gradient + 1
    if p.clips is not None and p.clips.settle(optimizer):
        return
    if is_due and any_gradient and not p.measured.clip_norm:
        p.amp.grad_scale = read_number_later(getattr(optimizer, "grad_scale", None))  # a fused kernel unscales by it
        p.links.gradient_schedule.measure(optimizer)


@guarded
def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG001
    """Global post-hook of every optimizer."""
    p = state.current
    if p is None or p.whole or p.entered != id(optimizer) or p.thread != get_ident():
        return
    p.entered = 0
    if p.scaler_depth:
        p.scaler_depth = 2  # GradScaler.step did not skip, and ends the step
        p.amp.found_inf = getattr(optimizer, "found_inf", None)  # ... but a fused optimizer may have; it is reset later
        return
    finish_step(p, optimizer, None, None if p.clock is None else p.clock.mark())
    if p.last is not None:
        p.links.on_next_optimizer(optimizer)  # from the next step on, it is timed from outside


_AFTER = f"{__name__}.after_step"


@untraced
def finish_step(
    p: StepState, optimizer: Optimizer, skipped: Value | bool | None, event: Event | None, lr: Any = None
) -> None:
    """Ends a step. event: of the device clock, at the end of the optimizer's step. lr: of this step, if the optimizer
    no longer has it."""
    if p.links.captured is not None:
        if event is None:  # captured in a graph, in which nothing is computed yet (graph_replays.py)
            p.links.captured.append(optimizer)
            return
        p.links.captured = None  # the device takes marks: the capture was given up, and nobody ended it
    if p.primary_id != id(optimizer) and (not p.selection.maybe_replace_primary(optimizer) or _belongs_to_last(p)):
        p.loss_count = 0
        p.trace.extend((now(), event, OPTIMIZER_END))
        if p.clips is not None:
            p.clips.forget(optimizer)
        if p.links.joint_step.kept is not None:
            p.links.joint_step.moved(optimizer)
        return
    clipped = p.measured.in_closure
    if p.clips is not None:
        clipped = clipped or p.clips.settle(optimizer)
        p.links.joint_step.clipped = p.completed + 1, p.clips
        p.clips = None
    is_due = p.completed >= p.measure_at and p.gradients is None and skipped is not True
    if is_due and not (clipped or p.measured.clip_norm) and has_gradients(optimizer):
        # the closure computed them during the step
        p.links.gradient_schedule.measure(optimizer, after=True)
    if skipped is True:
        p.amp.skipped += 1
    if lr is None and optimizer.param_groups:
        lr = optimizer.param_groups[0].get("lr")
    if type(lr) is not float and lr is not None:
        try:
            is_tensor = isinstance(lr, sys.modules["torch"].Tensor) and lr.numel() == 1
            lr = read_number_later(lr) if is_tensor else float(lr)
        except (TypeError, ValueError, RuntimeError):  # a list or a function, of the script's own optimizer
            lr = None
    if p.gradients is not None:
        p.links.gradient_schedule.finish(optimizer, now() - (p.step_end or p.trace[0]))
    first, began = p.last is None, p.selection.began
    p.losses.arriving = None
    p.losses.seen_backward = True  # with torch.func.grad or autograd.grad no backward call is seen, but it trains
    p.complete(lr, skipped, event)
    if clipped:
        p.measured.in_closure = False
    if first or began == p.completed - 1:  # the first step that this optimizer counts
        p.links.pausing = True
        try:
            if p.clock is not None:
                p.clock.span(devices_of(optimizer))
            if not first:
                p.selection.find_model(optimizer)
            else:
                p.links.on_first_step(optimizer)
        finally:
            p.links.pausing = False
            p.step_end = now()  # the next step does not include the search for the model


def _belongs_to_last(p: StepState) -> bool:
    """True if this optimizer used gradients of the backward pass of the last step, which a smaller optimizer has ended:
    some libraries create an optimizer for each parameter when it steps for the first time."""
    return p.last is not None and p.last.loss_count > 0 and not p.opened and kinds.only_optimizers(p.trace)


# ---- the whole call


def watch_whole_step(original: Function, kept: weakref.ref[Optimizer] | None = None) -> Function:
    """Wraps the `step` of a class of optimizers, or that in one object, `kept`: where a scheduler put one there.

    The global hooks run inside torch's own wrapper: with cold caches, 0.1 ms of the call passes before the first of them
    and 0.04 ms after the last, a fifth of a small optimizer's step. They do nothing meanwhile: noting both would take 2 µs
    a step more. Classes that are not torch's (fastai's) have no such hooks at all.
    """
    hooked = hasattr(original, "hooked")  # by torch, whose hooks learn of another thread first
    alone = 1 if kept is None else 0  # number of arguments of a step that is called without any

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        p = state.current
        me: Any = args[0] if kept is None else kept()
        if p is None or p.entered or p.scaler_depth or _AFTER in failures:
            return original(*args, **kwargs)
        if p.thread != get_ident() and (hooked or not p.move_to_thread(me)):
            return original(*args, **kwargs)
        p.trace.extend((now(), None if p.clock is None else p.clock.mark(), OPTIMIZER))
        p.entered = id(me)
        p.plain = False
        p.whole = True  # the hooks inside of torch's wrapper have nothing to do
        unusual = kwargs or len(args) > alone or p.primary_id != p.entered or p.losses.arriving is not None
        try:
            if unusual or p.clips is not None or p.completed >= p.measure_at:
                args, kwargs = _begun(p, me, args, kwargs) or (args, kwargs)
            result = original(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            p.links.investigator.passing(error)
            raise
        finally:
            p.whole = False
            p.entered = 0
        try:
            finish_step(p, me, None, None if p.clock is None else p.clock.mark())
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_AFTER, error)
        return result

    return not_traced(step)


def watch_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    """Times the steps of an optimizer, and of others of its class, as whole calls. Returns a function that undoes this."""
    kept = weakref.ref(optimizer) if "step" in optimizer.__dict__ else None
    owner: Any = type(optimizer) if kept is None else optimizer
    inherited = "step" not in owner.__dict__
    owner.step = step = watch_whole_step(owner.step, kept)
    keep_out_of_frames()
    where, ours = weakref.ref(owner), weakref.ref(step)  # a run must not keep an optimizer that its loop dropped

    def undo() -> None:
        patched: Any = where()
        patch: Any = ours()
        if patched is None or patch is None or patched.__dict__.get("step") is not patch:
            return  # the owner is gone, or somebody patched over our patch, which then passes through
        if inherited:
            del patched.step
        else:
            patched.step = patch.__wrapped__

    return undo


def watch_clear(original: Function) -> Function:
    """Wraps zero_grad. Records calls between the model's call and backward, and calls that discard the gradients of
    backward passes: at once, or when the next epoch begins with a new accumulation window."""

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or not p.trace or not (p.loss_count or p.trace[-1] in _CLEARED_AFTER) or p.thread != get_ident():
            return original(self, *args, **kwargs)
        trace, began, after = p.trace, now(), p.trace[-1]
        held = (p.loss_count or after == BACKWARD_END) and after not in _IN_FORWARD and _holds_gradients(p, self)
        try:
            return original(self, *args, **kwargs)
        finally:
            in_forward, own = after in _IN_FORWARD, after == BACKWARD_END and p.primary_id == id(self)
            if trace[-1] == after and (in_forward or own or (held and not _holds_gradients(p, self))):
                trace.extend((began, now(), CLEARED))

    return zero_grad


@guarded
def _holds_gradients(p: StepState, cleared: Any) -> bool:
    """True if any trained parameter has a gradient. cleared: checked if those are not known, before the first step."""
    known: Any = next(one for one in (p.selection.primary, p.selection.model, cleared) if one is not None)
    if hasattr(known, "param_groups"):
        return has_gradients(known)
    return any(parameter.grad is not None for parameter in known.parameters())
