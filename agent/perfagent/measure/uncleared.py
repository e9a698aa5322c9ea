"""Finds out whether the gradients of a step are still there when the backward pass of the next one begins, so that each
step is taken with the sum of all gradients so far.

It looks at one parameter, in a few steps of one backward pass each: where there are several, two models may train in
turn, or micro-batches are added up.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

from perfagent.boundary.guard import guarded
from perfagent.device import Reading, is_captured, read_later
from perfagent.measure.step_task import StepTask

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["LOOKS", "Uncleared"]

LOOKS = 3
_MOST_STEPS = 20
_MOST_NUMBERS = 2**20
"""Largest gradient to check: the check allocates one byte a number."""


class Uncleared(StepTask):
    """Over after a gradient that was cleared, or LOOKS that were not. step: that of the newest look. looks: at gradients that
    the optimizer used with the sum; readings: whether each was other than zero. fruitless: no gradient could be looked
    at, nor will be."""

    def __init__(self, p: StepState) -> None:
        super().__init__(p)
        self._steps, self.step = 0, p.completed
        # weakly a parameter and its gradient, and the versions of both
        self._kept: tuple[weakref.ref[Tensor], weakref.ref[Tensor], int, int] | None = None
        self._seen = False  # the gradient was there as it had been, when backward began
        self._passes = 0
        self.readings: list[Reading] = []
        self.looks = 0
        self.fruitless = False

    @guarded  # here, since an error in the investigator would end every other task as well
    def _goes_on(self) -> bool:
        p, kept = self._progress, self._kept
        if kept is not None and self._seen and self._passes == 1:
            fed, gradient = kept[0](), kept[1]()
            # backward added to it, and the optimizer used the sum
            if fed is not None and gradient is not None:
                self.looks += fed._version > kept[2] and gradient._version > kept[3]
        self._steps += 1
        self.step = p.completed
        self.over = self.over or self.looks >= LOOKS or self._steps > _MOST_STEPS
        self._kept, self._seen, self._passes = None, False, 0
        if p.losses.proof == self._backward_begins:
            p.losses.proof = None
        primary = p.selection.primary
        if not self.over and p.losses.proof is None and primary is not None:
            self._keep(primary)
        return not self.over

    def _keep(self, optimizer: Optimizer) -> None:
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        torch = sys.modules["torch"]  # a gradient of a class of its own may ask other ranks
        plain = (one for one in parameters if type(one.grad) is torch.Tensor and one.grad.layout is torch.strided)
        fed = min((one for one in plain if one.numel() <= _MOST_NUMBERS), key=lambda one: one.numel(), default=None)
        if fed is None:  # cleared already, or there never is one: sharded, or used up within the backward pass
            self.over, self.fruitless = True, self._steps == 1
            return
        self._kept = weakref.ref(fed), weakref.ref(fed.grad), fed._version, fed.grad._version
        self._progress.losses.proof = self._backward_begins
        self._progress.plain = False  # so that the backward pass calls it

    @guarded
    def _backward_begins(self, _roots: object) -> None:
        self._progress.losses.proof = self._backward_begins  # for the next one of this step
        self._passes += 1
        kept = self._kept if self._passes == 1 else None
        fed = None if kept is None else kept[0]()
        if kept is None or fed is None:
            return
        gradient = fed.grad
        if gradient is None or gradient is not kept[1]() or gradient._version != kept[3]:
            self.over = True
            return
        if is_captured(gradient):
            return
        # a loop may clear it past autograd (.data.zero_())
        reading = read_later((gradient.detach() != 0).any().float())
        self.readings += [] if reading is None else [reading]
        self._seen = reading is not None
