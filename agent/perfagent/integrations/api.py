"""All that an adapter of a library may ask of the run: its steps, passes, losses, norms, and its end.

Each function is for the training thread, and does nothing where no run is active.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from perfagent.boundary.call_watch import Watch, after, before
from perfagent.boundary.dynamo import Function, ignore_backends
from perfagent.boundary.gc_instances import instances_of
from perfagent.boundary.guard import guarded
from perfagent.device import Value, read_number_later
from perfagent.hooks.backward import begin_pass, remember
from perfagent.hooks.checkpoint_saves import watch_save
from perfagent.hooks.evaluation import watch_environment, watch_generation
from perfagent.hooks.forward import WatchedModel
from perfagent.hooks.grad_clipping import Clip, about_to_clip
from perfagent.hooks.optimizer_step import finish_step, watch_clear, watch_whole_step
from perfagent.hooks.phases import watch_phase
from perfagent.hooks.selection.models import numbers_trained, own_count
from perfagent.measure.sharding import world_size
from perfagent.step.state import StepState, now, state, unwatched
from perfagent.step.stop import claim as stop_due
from perfagent.step.trace import BACKWARD, BACKWARD_END, FIELDS, OPTIMIZER, Trace, backward_passes

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from perfagent.device.backends import Event

__all__ = [
    "Function", "OpenPass", "OpenStep", "Watch", "WatchedModel", "add_norm", "after", "are_gradients_due", "backward",
    "before", "begin_clipping", "begin_step", "discard_step", "divide_losses", "divides_later", "end_clipping", "end_step",
    "ignore_backends", "instances_of", "loss", "measure_shards", "number",
    "numbers_trained", "own_count", "primary_optimizer", "resumed_after", "scaled_loss", "silent_hooks", "stop_due",
    "trains", "unwatched", "watch_clear", "watch_environment", "watch_generation", "watch_phase", "watch_save",
    "watch_whole_step", "world_size",
]  # fmt: skip


def _here() -> StepState | None:
    """The state of the run on its training thread, and None elsewhere."""
    p = state.current
    return p if p is not None and p.thread == get_ident() else None


def number(value: torch.Tensor | float | None) -> Value | None:
    """A number of the library's, which may be on its way from a device."""
    if value is None:
        return None
    return read_number_later(value) if isinstance(value, sys.modules["torch"].Tensor) else float(value)


# ---- steps of a library that steps torch's optimizers in a way of its own


class OpenStep(NamedTuple):
    """A step of the library that has begun. trace, at: the trace of the step in progress, and how many items it had."""

    progress: StepState
    trace: Trace
    at: int
    began: int
    event: Event | None
    lr: object


def begin_step(optimizer: Optimizer) -> OpenStep | None:
    """None where a step of another optimizer is running, and on another thread. The first thread to step is the training
    thread."""
    p = state.current
    if p is None or p.entered or p.scaler_depth:
        return None
    if p.thread != get_ident():
        if p.completed or p.selection.primary is not None:
            return None
        p.thread = get_ident()
    groups = optimizer.param_groups
    lr = groups[0].get("lr") if groups else None  # now: a library may advance its scheduler within the step
    return OpenStep(p, p.trace, len(p.trace), now(), None if p.clock is None else p.clock.mark(), lr)


@contextlib.contextmanager
def silent_hooks(optimizer: object) -> Iterator[None]:
    """Within, the hooks of the optimizers inside do nothing."""
    p = state.current
    if p is None:
        yield
        return
    p.entered, p.scaler_depth, p.whole = id(optimizer), 1, True
    try:
        yield
    finally:
        p.whole = False
        p.entered = p.scaler_depth = 0


def discard_step(step: OpenStep) -> None:
    """It was none, as within an accumulation window."""
    if step.event is not None and step.progress.clock is not None:
        step.progress.clock.release([step.event])


def end_step(
    step: OpenStep, optimizer: Optimizer, *, skipped: bool | None, norm: Value | None, scale: Value | None
) -> None:
    """skipped: the gradients overflowed; None in a precision in which they cannot. norm: of all gradients. scale: that of
    the loss, in this step."""
    p = step.progress
    # before what it waited for inside (its clipping, the exchange of the new weights), which is not optimizer time
    at = step.at if p.trace is step.trace else len(p.trace)
    p.trace[at:at] = step.began, step.event, OPTIMIZER
    p.plain = False
    add_norm(norm)
    if scale is not None:
        p.amp.scaler_scale, p.unusual = scale, True
    finish_step(p, optimizer, skipped, None if p.clock is None else p.clock.mark(), step.lr)


def primary_optimizer() -> object:
    """The optimizer whose steps are counted; None before there is one."""
    p = state.current
    return None if p is None else p.selection.primary


def trains(optimizer: Optimizer, model: torch.nn.Module) -> None:
    """The steps of this optimizer count from now on, and it trains this model."""
    p = state.current
    if p is not None:
        p.selection.make_primary(optimizer)
        p.selection.trains(model)


# ---- gradients


def are_gradients_due() -> bool:
    """Whether the gradients of this step are to be measured, and are not yet."""
    p = state.current
    return p is not None and p.completed >= p.measure_at and p.gradients is None


def measure_shards(
    shards: list[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module, scale: Value | None
) -> None:
    """shards: (parameter, this rank's part of its gradient). scale: of the loss, which they still contain."""
    p = state.current
    if p is not None:
        p.links.gradient_schedule.measure_pieces(shards, model, scale)


def add_norm(norm: Value | None) -> None:
    """The norm of all gradients, before they were clipped."""
    p = _here()
    if p is not None and norm is not None:
        p.measured.clip_norm, p.unusual = [norm], True


@guarded
def begin_clipping(parameters: Iterable[torch.Tensor]) -> Clip | None:
    """The library is about to change the gradients of these parameters. Returns what `end_clipping` takes."""
    p = _here()
    if p is None:
        return None
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return about_to_clip(p, gradients) if gradients else None


@guarded
def end_clipping(clip: Clip | None, total: torch.Tensor) -> None:
    """total: the 2-norm of the gradients of all ranks before they were clipped."""
    if clip is not None:
        clip.norm, clip.whole = read_number_later(total), True


# ---- backward passes and losses


class OpenPass(NamedTuple):
    """A backward pass that has begun, and its place in the trace of its step."""

    trace: Trace
    at: int


@contextlib.contextmanager
def backward(tensor: torch.Tensor) -> Iterator[OpenPass | None]:
    """Times a backward pass that begins with this tensor. Yields what `loss` takes."""
    p = _here()
    if p is None or p.backward_depth:
        yield None
        return
    p.backward_depth = 1
    begun = _begin_backward(p, tensor, now())
    try:
        yield begun
    finally:
        p.backward_depth = 0
        p.trace.extend((now(), None if p.clock is None else p.clock.mark(), BACKWARD_END))


@guarded
def _begin_backward(p: StepState, tensor: torch.Tensor, began: int) -> OpenPass:
    event = begin_pass(p, tensor)
    p.trace.extend((began, event, None, False, BACKWARD))
    return OpenPass(p.trace, len(p.trace) - FIELDS[BACKWARD])


@guarded
def loss(begun: OpenPass | None, value: torch.Tensor | float | None) -> None:
    """The loss of a backward pass: a part of its accumulation window, unscaled, so that such parts add up."""
    p, known = state.current, number(value)
    if p is not None and known is not None and begun is not None and begun.trace is p.trace:
        p.trace[begun.at + 2 : begun.at + 4] = known, True
        p.loss_count += 1


def scaled_loss(unscaled: torch.Tensor, scaled: torch.Tensor) -> None:
    """A backward pass from `scaled` is one of the loss `unscaled`."""
    p = _here()
    if p is not None and scaled is not unscaled:
        remember(p, unscaled, scaled)


@guarded
def divide_losses(parts: int) -> None:
    """What the optimizer minimizes is the losses of this step divided by a number. One that is still on a device cannot be
    divided, and is left out."""
    p = _here()
    if p is None:
        return
    for at in backward_passes(p.trace):
        value = p.trace[at + 2]
        p.trace[at + 2 : at + 4] = value / parts if isinstance(value, float) else None, True


def divides_later() -> None:
    """The gradients of all losses of a step are divided by their number after the last backward pass."""
    p = state.current
    if p is not None:
        p.links.facts.divided_later = True


# ---- begin and end of a training


@guarded
def resumed_after(steps: int) -> None:
    """The checkpoint has made so many steps: the next one is the one after. A run that has steps continues to count, and a
    `start_step` of the script's is kept.

    Counted from 1 again, the steps would not be the trainer's own, and in a run that has an id by hand they would hide
    those that were made before the checkpoint.
    """
    p = state.current
    if p is not None and p.last is None and steps > 0:
        p.links.on_resumed(steps + 1)
