"""Combines optimizers that step on one backward pass, such as Muon for the matrices and AdamW for the rest.

The gradient norm of such a step covers the gradients of all of them. Each optimizer's gradients are measured just
before its own step: a scaler unscales for one at a time, and a loop may clear those of one before the next one steps.
What steps before the primary one is kept here; what steps after it adds to the step that it has ended, until that is
read (decode/finished_steps.py). An optimizer with its own backward pass, such as a GAN's critic, is excluded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from perfagent.boundary.guard import guarded
from perfagent.device import read_number_later
from perfagent.step.row import OptimizerGradients
from perfagent.step.trace import backward_since

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from perfagent.hooks.grad_clipping import Clip, Clips
    from perfagent.measure.gradient_schedule import GradientSchedule
    from perfagent.measure.updates import Weights
    from perfagent.step.gradients import GradientNorms
    from perfagent.step.state import StepState

__all__ = ["JointStep", "has_gradients"]

_MOST = 64
"""Most optimizers to measure together. One per parameter, stepping inside backward, would cost a pass each."""
Records = dict[int, OptimizerGradients]
"""By id of the optimizer."""


class JointStep:
    """The optimizers that step on the backward pass of the primary one, in the step in progress and in the one before.

    clipped: the last ended step in which something was clipped, and its clipping calls.
    kept: where weights are compared, the id of the stepping optimizer, a copy of its weights, and where the result
        goes.
    """

    __slots__ = (
        "_at", "_early", "_in_vain", "_measured", "_members", "_progress", "_schedule", "_step", "clipped", "kept",
    )  # fmt: skip

    def __init__(self, progress: StepState, schedule: GradientSchedule) -> None:
        self._progress, self._schedule = progress, schedule
        self.clipped: tuple[int, Clips | None] = 0, None
        self.kept: tuple[int, Weights, Records] | None = None
        self._members: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()  # by id, so far
        self._early: Records = {}  # those that stepped before the primary one
        self._in_vain = False  # others were measured, but then the primary one was not
        self._step = self._at = 0  # of the early ones: the step, and the trace's length when the first of them stepped
        self._measured: dict[int, tuple[int, int, GradientNorms | None]] = {}
        """id of an optimizer -> step and length of the trace, and the norms measured then, just before clipping."""

    def forget(self) -> None:
        """Called when another optimizer becomes the primary one."""
        self._members.clear()
        self._early = {}
        self.kept = None

    @guarded
    def steps(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """Called when another optimizer than the primary one is about to step. skipped: a GradScaler skips that step, and
        the joint norm covers only a part of the gradients."""
        p, me, clips = self._progress, id(optimizer), self._progress.clips
        if p.last is not None and not p.opened:
            rare = p.last.rare
            if rare is None or (rare.gradients.norms is None and not rare.gradients.clips):
                return
            step, records = p.completed, rare.others
            is_due, compares = rare.gradients.norms is not None, rare.gradients.moved is not None
            if clips is None and self.clipped[0] == step:
                clips = self.clipped[1]  # its gradients may have been clipped before the primary one's step
        else:
            is_due = self._is_due()
            if clips is None and not is_due:
                return
            self._drop_early(p.completed + 1)
            if not self._early:
                self._step, self._at = p.completed + 1, len(p.trace)
            step, records = self._step, self._early
            compares = is_due and self._schedule.compares()
        if not has_gradients(optimizer):
            return
        self._members[me] = optimizer
        records[me] = self._gradients_of(optimizer, clips, step, is_due=is_due, skipped=skipped)
        self.kept = None  # an optimizer that raised in its step left its copy here
        if compares and not skipped and len(self._members) <= _MOST:
            self.kept = me, self._schedule.keep_other(optimizer), records

    def _gradients_of(
        self, optimizer: Optimizer, clips: Clips | None, step: int, *, is_due: bool, skipped: bool
    ) -> OptimizerGradients:
        when, _, norms = self._measured.pop(id(optimizer), (-1, 0, None))
        if skipped:
            return OptimizerGradients(None, (), None, 1.0)
        held: set[Clip | None] = clips.holding(optimizer) if clips is not None else {None}
        known = clips.norms(held, optimizer) if clips is not None else []
        scale = read_number_later(self._progress.amp.scale) if clips is not None and clips.scaled(held) else None
        if when != step:
            norms = None
            if is_due and held == {None} and len(self._members) <= _MOST:
                scale = read_number_later(
                    getattr(optimizer, "grad_scale", None)
                )  # a fused optimizer unscales in its kernel
                norms = self._schedule.measure_other(optimizer)
        on_device = read_number_later(getattr(optimizer, "found_inf", None))  # ... and skips there
        return OptimizerGradients(norms, known, scale, 0.0 if on_device is None else on_device)

    @guarded
    def moved(self, optimizer: Optimizer) -> None:
        """Compares the kept weights of another optimizer than the primary one, which has stepped."""
        kept, self.kept = self.kept, None
        if kept is not None and kept[0] == id(optimizer):
            me, weights, records = kept
            changes = self._schedule.compare_other(optimizer, weights)
            records[me] = records[me]._replace(moved=changes)

    def of_step(self) -> Records:
        """Returns, when the primary optimizer's step ends, the gradients of those that stepped before.
        More may be added."""
        self._drop_early(self._progress.completed)
        early, self._early = self._early, {}
        asked = any(one.norms is not None for one in early.values())
        self._in_vain = self._progress.gradients is None and (self._in_vain or asked)
        return early

    def measure_clipped(self, clips: Clips, clip: Clip) -> None:
        """Measures the gradients of the other optimizers before clipping changes them."""
        p = self._progress
        step = p.completed + p.opened
        for me, optimizer in [*self._members.items()]:
            when, at, _ = self._measured.get(me, (-1, 0, None))
            if (when != step or backward_since(p.trace, at)) and clip in clips.holding(optimizer):
                self._measured[me] = step, len(p.trace), self._schedule.measure_other(optimizer)

    def _drop_early(self, step: int) -> None:
        """Drops the early optimizers that stepped on an earlier backward pass than the primary one."""
        if self._early and (step != self._step or backward_since(self._progress.trace, self._at)):
            for me in self._early:
                self._members.pop(me, None)
            self._early, self._in_vain = {}, step != self._step

    def _is_due(self) -> bool:
        """True if the primary one's gradients will be measured at its step. If it has none (frozen parameters), they
        stay due in every step, but are never measured."""
        p = self._progress
        if p.completed < p.measure_at or not self._in_vain:
            return p.completed >= p.measure_at
        primary = p.selection.primary
        return primary is not None and has_gradients(primary)


def has_gradients(optimizer: Optimizer) -> bool:
    """True if any parameter has a gradient. (Its backward pass may be unknown: `autograd.grad`, a pipeline stage.)"""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
