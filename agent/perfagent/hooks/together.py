"""Optimizers that step on one backward pass: Muon for the matrices and AdamW for the rest, one for each part of a model.

The gradient norm of such a step is that of all that they take together. What each takes is looked at just before its own step: a
scaler unscales for one optimizer at a time, and a loop may clear what one has taken before the next one steps. Those that step
before the primary one wait here for it; those that step after it add to the step that it has ended, of which nothing is read
before the next one begins (row.py). An optimizer with a backward pass of its own, as a GAN's critic has, belongs to none of this.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.device import Value, ready, take, value_of
from perfagent.hooks.account import backward_since
from perfagent.hooks.guard import guarded
from perfagent.signals.gradients import joint_report

if TYPE_CHECKING:
    from perfagent.hooks.clipping import Clip, Clips
    from perfagent.hooks.progress import Progress
    from perfagent.signals.gradients import GradientNorms, Report

__all__ = ["Taken", "Together", "clipped_norm", "report_of"]

_MOST = 64
"""Optimizers of a step. One for each parameter, stepping inside of the backward pass, would cost a pass each."""


class Taken(NamedTuple):
    """The gradients that one optimizer took. norms: measured; None where they were not. clips: the norms that clipping told of
    them; empty where not all of them were clipped. scale: a factor that they still carried when they were measured."""

    norms: GradientNorms | None
    clips: Sequence[Value]
    scale: Value | None = None

    def ready(self) -> bool:
        """Never blocks."""
        return (self.norms is None or self.norms.ready()) and all(map(ready, (self.scale, *self.clips)))


class Together:
    """Who steps on the backward pass of the primary optimizer, in the step in progress and in the one before.

    clips: what was clipped in the step that was ended last.
    """

    __slots__ = ("_apart", "_at", "_early", "_measured", "_members", "_step", "clips")

    def __init__(self) -> None:
        self.clips: Clips | None = None
        self._members: dict[int, weakref.ref[Any]] = {}  # of the steps so far, by id
        self._apart: set[int] = set()  # ids of those that step on a pass of their own
        self._early: dict[int, Taken] = {}  # that stepped before the primary one, by id
        self._step = self._at = 0  # of those: the step, and the length of its trace when the first of them stepped
        self._measured: dict[int, tuple[int, int, GradientNorms | None]] = {}
        """What clipping was about to change, by id of the optimizer: step, round of clipping, norms."""

    def forget(self) -> None:
        """Another optimizer is the primary one."""
        self._members.clear()
        self._apart.clear()
        self._early = {}

    @guarded
    def steps(self, p: Progress, optimizer: Any) -> None:
        """Another optimizer than the primary one is about to step."""
        me = id(optimizer)
        if me in self._apart:
            return
        if p.last is not None and not p.opened:
            rare = p.last.rare
            if rare is not None and rare.has_norm:
                clips = p.clips or self.clips  # it may have been clipped after the primary one has stepped
                self._join(rare.others, p, optimizer, clips, p.completed, due=rare.measured)
        elif p.clips is not None or p.completed >= p.measure_at:
            self._part(p, p.completed + 1)
            if not self._early:
                self._step, self._at = p.completed + 1, len(p.trace)
            taken: list[Taken] = []
            self._join(taken, p, optimizer, p.clips, self._step, due=p.completed >= p.measure_at)
            if taken:
                self._early[me] = taken[0]

    def of_step(self, p: Progress) -> list[Taken]:
        """The primary optimizer has ended the step that is completed now: what others took before it. More may be added."""
        self._part(p, p.completed)
        early, self._early = self._early, {}
        return [*early.values()]

    def measure_clipped(self, p: Progress, clips: Clips, clip: Clip) -> None:
        """Clipping is about to change gradients: those of the others are to be measured now, too."""
        step = p.completed + p.opened
        for me, one in [*self._members.items()]:
            optimizer = one()
            if optimizer is None:
                del self._members[me]
                continue
            when, number, _ = self._measured.get(me, (-1, 0, None))
            if (when != step or number < clip.round) and clips.touches(clip, optimizer):
                self._measured[me] = step, clip.round, p.health.measure_other(p, optimizer)

    def _part(self, p: Progress, step: int) -> None:
        """Lets go of those that stepped before, where they were not the primary one's: a backward pass has begun since."""
        if self._early and (step != self._step or backward_since(p.trace, self._at)):
            if step == self._step:
                self._apart |= self._early.keys()
            for me in self._early:
                self._members.pop(me, None)
            self._early = {}

    def _join(self, others: list[Taken], p: Progress, optimizer: Any, clips: Clips | None, step: int, *, due: bool) -> None:
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            return
        held = clips.holding(optimizer) if clips is not None else {None}
        told = [clip.norm for clip in held if clip is not None and clip.norm is not None]
        known = told if len(told) == len(held) else []
        when, _, norms = self._measured.pop(id(optimizer), (-1, 0, None))
        scale = None
        if when != step:
            norms = None
            if due and held == {None} and len(others) < _MOST:
                scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its kernel
                norms = p.health.measure_other(p, optimizer)
        others.append(Taken(norms, known, None if scale is None else take(scale)))
        self._members[id(optimizer)] = weakref.ref(optimizer)


def report_of(all_taken: Sequence[Taken]) -> Report | None:
    """What was measured of the gradients of a step; once, when ready. On the sender's thread."""
    measured = [(one.norms, 1.0 if one.scale is None else value_of(one.scale)) for one in all_taken if one.norms is not None]
    if len(measured) < 2:
        return measured[0][0].report(measured[0][1]) if measured else None
    return joint_report(measured)


def clipped_norm(all_taken: Iterable[Taken]) -> float | None:
    """The norm of all gradients of a step as clipping told it; None where it did not of all."""
    norms: dict[int, Value] = {}  # one call may have held what several optimizers take
    for one in all_taken:
        if not one.clips:
            return None
        norms.update({id(norm): norm for norm in one.clips})
    values = [value_of(norm) for norm in norms.values()]
    return values[0] if len(values) == 1 else math.sqrt(math.fsum(value * value for value in values))
