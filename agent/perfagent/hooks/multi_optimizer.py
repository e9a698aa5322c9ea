"""Combines optimizers that step on one backward pass, such as Muon for the matrices and AdamW for the rest.

The gradient norm of such a step covers the gradients of all of them. Each optimizer's gradients are measured just
before its own step: a scaler unscales for one optimizer at a time, and a loop may clear the gradients of one before the
next one steps. Gradients of optimizers that step before the primary one are kept here. Those that step after it add to
the step that it has ended. That step is read when the next one begins, or when nothing has happened for a while
(step/row.py); anything later is left out. An optimizer with its own backward pass, such as a GAN's critic, is excluded.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.device import take, take_if_any
from perfagent.step.row import Taken
from perfagent.step.trace import backward_since

if TYPE_CHECKING:
    from perfagent.hooks.grad_clipping import Clip, Clips
    from perfagent.signals.updates import Weights
    from perfagent.step.roles import Measured
    from perfagent.step.state import StepState

__all__ = ["Together", "has_gradients"]

_MOST = 64
"""Most optimizers to measure together. One per parameter, stepping inside backward, would cost a pass each."""


class Together:
    """The optimizers that step on the backward pass of the primary one, in the step in progress and in the one before.

    clipped: the last ended step in which something was clipped, and its clipping calls.
    kept: where weights are compared, the id of the stepping optimizer, a copy of its weights, and where the result
        goes.
    """

    __slots__ = ("_apart", "_at", "_early", "_in_vain", "_measured", "_members", "_step", "clipped", "kept")

    def __init__(self) -> None:
        self.clipped: tuple[int, Clips | None] = 0, None
        self.kept: tuple[int, Weights, Any, int] | None = None
        self._members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id, so far
        self._apart: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # with their own pass
        self._early: dict[int, Taken] = {}  # by id, those that stepped before the primary one
        self._in_vain = False  # others were measured, but then the primary one was not
        self._step = self._at = 0  # of the early ones: the step, and the trace's length when the first of them stepped
        self._measured: dict[int, tuple[int, int, Measured | None]] = {}
        """id of an optimizer -> step, round of clipping, and norms measured just before that clipping."""

    def forget(self) -> None:
        """Called when another optimizer becomes the primary one."""
        self._members.clear()
        self._apart.clear()
        self._early = {}
        self.kept = None

    @guarded
    def steps(self, p: StepState, optimizer: Any) -> None:
        """Called when another optimizer than the primary one is about to step."""
        self._note(p, optimizer, skipped=False)

    @guarded
    def skips(self, p: StepState, optimizer: Any) -> None:
        """A GradScaler skips the step of another optimizer: the joint norm then covers only a part of the gradients."""
        self._note(p, optimizer, skipped=True)

    def _note(self, p: StepState, optimizer: Any, *, skipped: bool) -> None:
        me = id(optimizer)
        if self._apart.get(me) is optimizer:
            return
        if p.last is not None and not p.opened:
            rare = p.last.rare
            if rare is not None and rare.has_norm:
                step, clips = self.clipped
                if p.clips is not None or step != p.completed:
                    clips = p.clips  # its gradients may have been clipped after the primary one's step
                taken = self._taken(p, optimizer, clips, p.completed, due=rare.measured, skipped=skipped)
                if taken is not None:
                    rare.others.append(taken)
                    self._keep(p, optimizer, rare.others, len(rare.others) - 1, due=rare.compared and not skipped)
        elif p.clips is not None or self._is_due(p):
            self._part(p, p.completed + 1)
            if not self._early:
                self._step, self._at = p.completed + 1, len(p.trace)
            taken = self._taken(p, optimizer, p.clips, self._step, due=self._is_due(p), skipped=skipped)
            if taken is not None:
                self._early[me] = taken
                self._keep(
                    p, optimizer, self._early, me, due=self._is_due(p) and p.links.health.compares(p) and not skipped
                )

    def _keep(self, p: StepState, optimizer: Any, told: Any, place: int, *, due: bool) -> None:
        """Keeps the weights that an optimizer is about to change. told, place: where the record of its gradients is."""
        self.kept = None  # an optimizer that raised in its step left its copy here
        if due and len(self._members) <= _MOST:
            self.kept = id(optimizer), p.links.health.keep_other(p, optimizer), told, place

    @guarded
    def moved(self, p: StepState, optimizer: Any) -> None:
        """Compares the kept weights of another optimizer than the primary one, which has stepped."""
        assert self.kept is not None
        (me, weights, told, place), self.kept = self.kept, None
        if me == id(optimizer):
            told[place] = told[place]._replace(moved=p.links.health.compare_other(p, optimizer, weights))

    def of_step(self, p: StepState) -> list[Taken]:
        """Returns, when the primary optimizer's step ends, the gradients of those that stepped before.
        More may be added."""
        self._part(p, p.completed)
        early, self._early = self._early, {}
        asked = any(one.norms is not None for one in early.values())
        self._in_vain = p.gradients is None and (self._in_vain or asked)
        return [*early.values()]

    def measure_clipped(self, p: StepState, clips: Clips, clip: Clip) -> None:
        """Measures the gradients of the other optimizers before clipping changes them."""
        step = p.completed + p.opened
        for me, optimizer in [*self._members.items()]:
            when, number, _ = self._measured.get(me, (-1, 0, None))
            if (when != step or number < clip.round) and clips.touches(clip, optimizer):
                self._measured[me] = step, clip.round, p.links.health.measure_other(p, optimizer)

    def _part(self, p: StepState, step: int) -> None:
        """Drops the early optimizers that stepped on an earlier backward pass than the primary one."""
        if self._early and (step != self._step or backward_since(p.trace, self._at)):
            for me in self._early:
                one = self._members.pop(me, None)
                if step == self._step and one is not None:
                    self._apart[me] = one
            self._early, self._in_vain = {}, step != self._step

    def _is_due(self, p: StepState) -> bool:
        """True if the primary one's gradients will be measured at its step. If it has none (frozen parameters), they
        stay due in every step, but are never measured."""
        if p.completed < p.measure_at or not self._in_vain:
            return p.completed >= p.measure_at
        primary = p.selection.primary()
        return primary is not None and has_gradients(primary)

    def _taken(
        self, p: StepState, optimizer: Any, clips: Clips | None, step: int, *, due: bool, skipped: bool
    ) -> Taken | None:
        if not has_gradients(optimizer):
            return None
        self._members[id(optimizer)] = optimizer
        when, _, norms = self._measured.pop(id(optimizer), (-1, 0, None))
        if skipped:
            return Taken(None, (), None, 1.0)
        held: set[Clip | None] = clips.holding(optimizer) if clips is not None else {None}
        known = clips.norms(held, optimizer) if clips is not None else []
        scale = take(p.amp.scale) if clips is not None and clips.scaled(held, p) else None
        if when != step:
            norms = None
            if due and held == {None} and len(self._members) <= _MOST:
                scale = take_if_any(getattr(optimizer, "grad_scale", None))  # a fused optimizer unscales in its kernel
                norms = p.links.health.measure_other(p, optimizer)
        on_device = take_if_any(getattr(optimizer, "found_inf", None))  # ... and skips there
        return Taken(norms, known, scale, 0.0 if on_device is None else on_device)


def has_gradients(optimizer: Any) -> bool:
    """True if any parameter has a gradient. (Its backward pass may be unknown: `autograd.grad`, a pipeline stage.)"""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
