"""Watches torch.amp.GradScaler: its scaling, its unscaling, and its step, which may skip the optimizer's step."""

from __future__ import annotations

import functools
from threading import get_ident
from typing import Any

from perfagent.boundary.call_watch import after
from perfagent.boundary.dynamo import Function
from perfagent.boundary.guard import guarded
from perfagent.device import read_number_later
from perfagent.hooks.backward import check_arrived, remember
from perfagent.hooks.optimizer_step import finish_step
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import OPTIMIZER

__all__ = ["watch_scale", "watch_scaler_step", "watch_unscale"]


def _note_scaled(scaled: object, _scaler: object, outputs: object) -> None:
    p = state.current
    if p is not None and scaled is not outputs and (p.thread == get_ident() or p.claim_thread()):
        remember(p, outputs, scaled)


def _note_unscaled(*_: object, **__: object) -> None:
    p = state.current
    if p is not None and p.thread == get_ident():
        p.amp.unscaled = True


watch_scale, watch_unscale = after(_note_scaled), after(_note_unscaled)
"""Wrap GradScaler.scale and unscale_: the loss is that before scaling, and from unscale_ on the gradients are unscaled."""


def watch_scaler_step(original: Function) -> Function:
    """Wraps GradScaler.step: a step that it skips still counts as a step."""

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or not self._enabled or p.scaler_depth or (p.thread != get_ident() and not p.claim_thread()):
            return original(self, optimizer, *args, **kwargs)
        p.scaler_depth = 1
        _begin_scaled(p, self, optimizer)
        done = False
        try:
            result = original(self, optimizer, *args, **kwargs)
            done = True
            return result
        finally:
            stepped, p.scaler_depth, p.amp.scale = p.scaler_depth == 2, 0, None
            if done:
                _end_scaled(p, optimizer, stepped)

    return step


@guarded
def _begin_scaled(p: StepState, scaler: Any, optimizer: Any) -> None:
    if not p.primary_id:
        p.selection.ensure_primary(optimizer)
    if p.losses.arriving is not None:
        check_arrived(p)
    p.trace.extend((now(), None if p.clock is None else p.clock.mark(), OPTIMIZER))
    if scaler._scale is not None:
        p.amp.scale, p.amp.scaler_scale = scaler._scale, read_number_later(scaler._scale)
        p.unusual = True


@guarded
def _end_scaled(p: StepState, optimizer: Any, stepped: bool) -> None:
    event = None if p.clock is None else p.clock.mark()
    skipped: Any = not stepped
    found, p.amp.found_inf = p.amp.found_inf, None
    if stepped and found is not None:  # a fused optimizer decides on the device
        skipped = read_number_later(found)
    if not stepped and p.losses.arriving is not None:  # a scaler waits for its device, and has changed nothing
        check_arrived(p)
    if not stepped and p.primary_id != id(optimizer):
        p.links.joint_step.steps(optimizer, skipped=True)
    finish_step(p, optimizer, skipped, event)
