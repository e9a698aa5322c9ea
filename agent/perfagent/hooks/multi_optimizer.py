"""Optimizers that step on one backward pass: Muon for the matrices and AdamW for the rest, one for each part of a model.

The gradient norm of such a step is that of all that they take together. What each takes is looked at just before its own step: a
scaler unscales for one optimizer at a time, and a loop may clear what one has taken before the next one steps. Those that step
before the primary one wait here for it; those that step after it add to the step that it has ended, which is read when the next
one begins, or when nothing has happened for a while (row.py): what comes later still is left out. An optimizer with a backward
pass of its own, as a GAN's critic has, belongs to none of this.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.device import take_if_any
from perfagent.step.row import Taken
from perfagent.step.trace import backward_since

if TYPE_CHECKING:
    from perfagent.hooks.grad_clipping import Clip, Clips
    from perfagent.signals.gradients import GradientNorms
    from perfagent.signals.updates import Weights
    from perfagent.step.state import Progress

__all__ = ["Together", "has_gradients"]

_MOST = 64
"""Optimizers that are measured together. One for each parameter, stepping inside of the backward pass, would cost a pass each."""


class Together:
    """Who steps on the backward pass of the primary optimizer, in the step in progress and in the one before.

    clipped: the step that was ended last of those in which something was clipped, and what that was. kept: the weights that the
    one that is stepping is about to move, where they are to be compared, and where to tell of them.
    """

    __slots__ = ("_apart", "_at", "_early", "_in_vain", "_measured", "_members", "_step", "clipped", "kept")

    def __init__(self) -> None:
        self.clipped: tuple[int, Clips | None] = 0, None
        self.kept: tuple[int, Weights, Any, int] | None = None
        self._members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # of the steps so far, by id
        self._apart: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # that step on a pass of their own
        self._early: dict[int, Taken] = {}  # that stepped before the primary one, by id
        self._in_vain = False  # others were measured, and then the primary one was not
        self._step = self._at = 0  # of those: the step, and the length of its trace when the first of them stepped
        self._measured: dict[int, tuple[int, int, GradientNorms | None]] = {}
        """What clipping was about to change, by id of the optimizer: step, round of clipping, norms."""

    def forget(self) -> None:
        """Another optimizer is the primary one."""
        self._members.clear()
        self._apart.clear()
        self._early = {}
        self.kept = None

    @guarded
    def steps(self, p: Progress, optimizer: Any) -> None:
        """Another optimizer than the primary one is about to step."""
        self._note(p, optimizer, skipped=False)

    @guarded
    def skips(self, p: Progress, optimizer: Any) -> None:
        """A scaler has seen to it that it does not: the norm of what the others take is of a part."""
        self._note(p, optimizer, skipped=True)

    def _note(self, p: Progress, optimizer: Any, *, skipped: bool) -> None:
        me = id(optimizer)
        if self._apart.get(me) is optimizer:
            return
        if p.last is not None and not p.opened:
            rare = p.last.rare
            if rare is not None and rare.has_norm:
                step, clips = self.clipped
                if p.clips is not None or step != p.completed:
                    clips = p.clips  # it may have been clipped after the primary one has stepped
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
                self._keep(p, optimizer, self._early, me, due=self._is_due(p) and p.health.compares(p) and not skipped)

    def _keep(self, p: Progress, optimizer: Any, told: Any, place: int, *, due: bool) -> None:
        """told, place: where it stands what the optimizer has taken."""
        self.kept = None  # one that raised in its step has not moved what it kept
        if due and len(self._members) <= _MOST:
            self.kept = id(optimizer), p.health.keep_other(p, optimizer), told, place

    @guarded
    def moved(self, p: Progress, optimizer: Any) -> None:
        """Another optimizer than the primary one has stepped, and its weights were kept."""
        assert self.kept is not None
        (me, weights, told, place), self.kept = self.kept, None
        if me == id(optimizer):
            told[place] = told[place]._replace(moved=p.health.compare_other(p, optimizer, weights))

    def of_step(self, p: Progress) -> list[Taken]:
        """The primary optimizer has ended the step that is completed now: what others took before it. More may be added."""
        self._part(p, p.completed)
        early, self._early = self._early, {}
        asked = any(one.norms is not None for one in early.values())
        self._in_vain = p.gradients is None and (self._in_vain or asked)
        return [*early.values()]

    def measure_clipped(self, p: Progress, clips: Clips, clip: Clip) -> None:
        """Clipping is about to change gradients: those of the others are to be measured now, too."""
        step = p.completed + p.opened
        for me, optimizer in [*self._members.items()]:
            when, number, _ = self._measured.get(me, (-1, 0, None))
            if (when != step or number < clip.round) and clips.touches(clip, optimizer):
                self._measured[me] = step, clip.round, p.health.measure_other(p, optimizer)

    def _part(self, p: Progress, step: int) -> None:
        """Lets go of those that stepped before, where they were not the primary one's: a backward pass has begun since."""
        if self._early and (step != self._step or backward_since(p.trace, self._at)):
            for me in self._early:
                one = self._members.pop(me, None)
                if step == self._step and one is not None:
                    self._apart[me] = one
            self._early, self._in_vain = {}, step != self._step

    def _is_due(self, p: Progress) -> bool:
        """Whether the primary one's gradients will be measured when it steps. Where it has none (what it trains is frozen) they
        are due in vain, step after step."""
        if p.completed < p.measure_at or not self._in_vain:
            return p.completed >= p.measure_at
        primary = p.primary()
        return primary is not None and has_gradients(primary)

    def _taken(
        self, p: Progress, optimizer: Any, clips: Clips | None, step: int, *, due: bool, skipped: bool
    ) -> Taken | None:
        if not has_gradients(optimizer):
            return None
        self._members[id(optimizer)] = optimizer
        when, _, norms = self._measured.pop(id(optimizer), (-1, 0, None))
        if skipped:
            return Taken(None, (), None, 1.0)
        held: set[Clip | None] = clips.holding(optimizer) if clips is not None else {None}
        known = clips.norms(held, optimizer) if clips is not None else []
        scale = None
        if when != step:
            norms = None
            if due and held == {None} and len(self._members) <= _MOST:
                scale = take_if_any(getattr(optimizer, "grad_scale", None))  # a fused optimizer unscales inside its kernel
                norms = p.health.measure_other(p, optimizer)
        on_device = take_if_any(getattr(optimizer, "found_inf", None))  # ... and skips there
        return Taken(norms, known, scale, 0.0 if on_device is None else on_device)


def has_gradients(optimizer: Any) -> bool:
    """Whether it has anything to go by. (Which backward pass they are of may be unknown: `autograd.grad`, a pipeline's stage.)"""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
