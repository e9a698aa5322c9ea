"""A completed step on its way from the training thread to the sender, as plain data.

The training thread stores references. Once everything that belongs to the step has arrived (decode/finished_steps.py),
decode/step_decoder.py turns them into names and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perfagent.device import Value, ready
from perfagent.step.gradients import Deferred, GradientNorms, WeightChanges
from perfagent.step.trace import Trace

__all__ = ["AfterLastStep", "OccasionalValues", "OptimizerGradients", "Row", "StepRow"]

Row = tuple[int, float, float, dict[str, float]]
"""step, Unix time, monotonic time, values by name"""


class StepRow(NamedTuple):
    """One completed step as the training thread leaves it: a tuple, since that is the fastest to make.

    began: end of the step before in ns; 0 for the first.
    loss_count: the number of losses that were backpropagated in it.
    trace: see trace.py; its last entry holds the end.
    """

    step: int
    began: int
    loss_count: int
    lr: Value | None
    trace: Trace
    rare: OccasionalValues | None


class AfterLastStep(StepRow):
    """The trace after the last step, which may hold an evaluation."""

    __slots__ = ()


class OptimizerGradients(NamedTuple):
    """The gradients that one optimizer used in a step.

    norms: the measured norms; None if not measured.
    clips: the norms that clipping returned; empty unless all of the gradients were clipped.
    scale: a factor that the gradients still carried when they were measured.
    skipped: above zero if a scaler kept the optimizer from using them; a fused optimizer knows this on its device.
    moved: how far its step moved the weights; None if not compared.
    """

    norms: GradientNorms | None
    clips: Sequence[Value]
    scale: Value | None = None
    skipped: Value = 0.0
    moved: WeightChanges | None = None

    def ready(self) -> bool:
        """True when all values have arrived. Never blocks."""
        measured = (self.norms is None or self.norms.ready()) and (self.moved is None or self.moved.ready())
        return measured and all(map(ready, (self.scale, self.skipped, *self.clips)))


@dataclass(eq=False, slots=True)
class OccasionalValues:
    """What only some steps have.

    gradients: of the optimizer that counts; others: by id, of optimizers that step on the same backward pass, to which more
        may still be added.
    scale: the loss scale. skipped: whether a scaler skipped the step; skipped_before: how many it has skipped so far.
    clipped_scaled: the gradients were clipped before `GradScaler.unscale_`.
    arrived: gradients and others, once all have arrived; what is added later is left out.
    """

    gradients: OptimizerGradients
    others: dict[int, OptimizerGradients]
    scale: Value | None
    skipped: Value | bool | None
    skipped_before: int
    deferred: list[Deferred]
    clipped_scaled: bool
    arrived: Sequence[OptimizerGradients] = ()

    def ready(self) -> bool:
        self.arrived = taken = (self.gradients, *list(self.others.values()))
        if not ready(self.scale) or not ready(self.skipped) or not all(one.ready() for one in taken):
            return False
        return all(each.ready() for each in self.deferred)
