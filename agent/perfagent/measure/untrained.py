"""Looks for parameters that do not train, over 20 steps:

- those that stand still. A few numbers of each are compared, 8192 in total. No gradient reaches them (a `detach()`, a
  layer that is never called), their learning rate is zero, or their updates are rounded away (bfloat16 weights of 1 do
  not change by less than 0.004). Frozen parameters do not count, nor tables of embeddings with a gradient: only rows of
  tokens that occur move.
- those of the model that receive gradients, that no optimizer has and that the loop does not move by hand.
- all of them, if nobody clears the gradients (clearing.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from perfagent.boundary.guard import guarded
from perfagent.device import tolerating_out_of_memory
from perfagent.measure.clearing import GradientClearing
from perfagent.measure.gradients import Plan, parameters_of
from perfagent.measure.step_task import StepTask
from perfagent.measure.tensor_storage import numbers_in
from perfagent.measure.updates import Weights
from perfagent.step.gradients import WeightChanges

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["LEAST_STEPS", "UntrainedParameters", "owned_by"]

LEAST_STEPS = 20
_MOST_NUMBERS = 2**13


class _Facts(NamedTuple):
    """State of a parameter when it was compared. rate: its learning rate; None if that may be on a device."""

    counts: bool
    has_gradient: bool
    rate: float | None


class _Unowned(NamedTuple):
    """A parameter that the stepping optimizers do not have. versions: its own, and that of its gradient."""

    name: str
    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    versions: tuple[int, int]


class UntrainedParameters(StepTask):
    """One look at them, of LEAST_STEPS steps. owned: ids of parameters of optimizers that did not step so far.

    plan: of the optimizer's parameters. moved: how far they have moved, and facts: of each; None if that is not known.
    unoptimized: name, numbers and id of those without an optimizer, of `trainable` numbers in total; None where that
        cannot be said, as where the optimizer holds other tensors than the model (fp32 copies, DeepSpeed's partitions).
    """

    plan: Plan

    def __init__(self, p: StepState, model: Callable[[], nn.Module | None], owned: set[int]) -> None:
        super().__init__(p)
        self._model, self._owned, self._began = model, owned, -1
        self._weights: Weights | None = None
        self._unowned: list[_Unowned] | None = None
        self.clearing = GradientClearing(p)
        self.clearing.over = bool(p.links.rank)
        self.moved: WeightChanges | None = None
        self.facts: list[_Facts] = []
        self.unoptimized: list[tuple[str, int, int]] | None = None
        self.trainable = 0

    def ready(self) -> bool:
        """True when it is over and its values have arrived. Never blocks."""
        arrived = self.moved is None or self.moved.ready()
        return self.over and arrived and all(reading.ready() for reading in self.clearing.readings)

    def close(self) -> None:
        self.clearing.close()
        self.over = True

    @guarded  # here, since an error in the investigator would end every other task as well
    def _goes_on(self) -> bool:
        p = self._progress
        optimizer = p.selection.primary
        if optimizer is None:
            return False
        if self._began < 0:
            self._began = p.completed
            self._begin(optimizer)
        elif p.completed - self._began >= LEAST_STEPS:
            self.step = p.completed
            self._compare(optimizer)
        self.clearing.step_ended()
        return not self.step

    def _begin(self, optimizer: Optimizer) -> None:
        parameters, model = parameters_of(optimizer), self._model()
        self.plan = Plan.of(optimizer, model)
        if model is None:
            return
        with tolerating_out_of_memory():
            trained = [one.requires_grad for one in parameters]
            self._weights = Weights(parameters, self.plan, _MOST_NUMBERS, of=trained)
        trainable = {id(one): (name, one) for name, one in model.named_parameters() if one.requires_grad}
        if self._progress.links.rank or trainable.keys().isdisjoint(self.plan.ids):
            return
        self.trainable = sum(numbers_in(one) for _, one in trainable.values())
        unowned = trainable.keys() - owned_by(self._progress.selection.all()) - self._owned
        self._unowned = [
            _Unowned(name, weakref.ref(one), weakref.ref(one.grad), (one._version, one.grad._version))
            for name, one in (trainable[each] for each in unowned)
            if one.grad is not None
        ]

    def _compare(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        if self._weights is not None and self.plan.fits(parameters):
            with tolerating_out_of_memory():
                self.moved = self._weights.compare(parameters)
            self.facts = _facts(optimizer, self.plan)
        if self._unowned is not None:
            owned = owned_by(self._progress.selection.all())
            pairs = ((one, one.parameter()) for one in self._unowned)
            self.unoptimized = [
                (one.name, numbers_in(parameter), id(parameter))
                for one, parameter in pairs
                if parameter is not None and id(parameter) not in owned and _is_fed(one, parameter)
            ]


def _is_fed(before: _Unowned, parameter: Tensor) -> bool:
    """True if new gradients have come, and nobody has changed the parameter."""
    if parameter.grad is None or not parameter.requires_grad or parameter._version != before.versions[0]:
        return False
    return parameter.grad is not before.gradient() or parameter.grad._version != before.versions[1]


def owned_by(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(one) for optimizer in optimizers for one in parameters_of(optimizer)}


def _facts(optimizer: Optimizer, plan: Plan) -> list[_Facts]:
    return [
        _Facts(
            one.requires_grad and (one.grad is None or id(one) not in plan.tables),
            one.grad is not None,
            rate if isinstance(rate, float) else None,
        )
        for group in optimizer.param_groups
        for rate in (group.get("lr"),)
        for one in group["params"]
    ]
