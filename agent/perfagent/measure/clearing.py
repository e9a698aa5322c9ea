"""Finds out whether the gradients of a step are still there when the backward pass of the next one begins, so that each
step is taken with the sum of all gradients so far.

It follows one parameter, in steps of one backward pass each: where there are several, two models may train in turn, or
micro-batches are added up.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

from perfagent.boundary.guard import guarded
from perfagent.device import Reading, is_captured, read_later

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["LEAST_SUMS", "GradientClearing"]

LEAST_SUMS = 3
_MOST_NUMBERS = 2**20
"""Largest gradient to check: the check allocates one byte a number."""


class GradientClearing:
    """sums: gradients that the optimizer used with what was there before. readings: whether that was other than zero. over:
    a gradient was cleared, or there were enough sums."""

    def __init__(self, p: StepState) -> None:
        self._progress = p
        # weakly a parameter and its gradient, and the versions of both
        self._kept: tuple[weakref.ref[Tensor], weakref.ref[Tensor], int, int] | None = None
        self._was_there = False  # the gradient was as it had been, when backward began
        self._passes = 0
        self.readings: list[Reading] = []
        self.sums = 0
        self.over = False

    def step_ended(self) -> None:
        if self._kept is not None and self._was_there and self._passes == 1:
            parameter, gradient = self._kept[0](), self._kept[1]()
            # backward added to it, and the optimizer used the sum
            if parameter is not None and gradient is not None:
                self.sums += parameter._version > self._kept[2] and gradient._version > self._kept[3]
        self.close()
        self.over = self.over or self.sums >= LEAST_SUMS
        p = self._progress
        if not self.over and p.losses.proof is None and p.selection.primary is not None:
            self._keep(p.selection.primary)

    def close(self) -> None:
        self._kept, self._was_there, self._passes = None, False, 0
        if self._progress.losses.proof == self._backward_begins:
            self._progress.losses.proof = None

    def _keep(self, optimizer: Optimizer) -> None:
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        torch = sys.modules["torch"]  # a gradient of a class of its own may ask other ranks
        plain = (one for one in parameters if type(one.grad) is torch.Tensor and one.grad.layout is torch.strided)
        small = min((one for one in plain if one.numel() <= _MOST_NUMBERS), key=lambda one: one.numel(), default=None)
        if small is None:  # cleared already, or there never is one: sharded, or used up within the backward pass
            self.over = True
            return
        self._kept = weakref.ref(small), weakref.ref(small.grad), small._version, small.grad._version
        self._progress.losses.proof = self._backward_begins
        self._progress.plain = False  # so that the backward pass calls it

    @guarded
    def _backward_begins(self, _roots: object) -> None:
        self._progress.losses.proof = self._backward_begins  # for the next one of this step
        self._passes += 1
        parameter = self._kept[0]() if self._kept is not None and self._passes == 1 else None
        if self._kept is None or parameter is None:
            return
        gradient = parameter.grad
        if gradient is None or gradient is not self._kept[1]() or gradient._version != self._kept[3]:
            self.over = True
        elif not is_captured(gradient):
            # a loop may clear it past autograd (.data.zero_())
            reading = read_later((gradient.detach() != 0).any().float())
            self.readings += [] if reading is None else [reading]
            self._was_there = reading is not None
