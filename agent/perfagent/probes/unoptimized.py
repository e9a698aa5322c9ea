"""Finds trainable parameters of the model that receive gradients and that no optimizer has, and optimizers whose
parameters receive none, or whose gradients nobody clears (uncleared.py). Only rank 0 does.

The sender's thread compares the model's parameters with those of the optimizers that step, every half a minute or less
often (0.4 ms for 300 parameters). In a usual training nothing is left, and that is all. What is left is compared
between two steps, and again 20 steps later: it counts if new gradients have come meanwhile and the loop has not moved
it by hand. Optimizers that did not step so far (several in turn) are searched for then, three times a run at most, since
that takes 0.1 s.

Where the optimizer holds other tensors than the model (fp32 copies, DeepSpeed's partitions), nothing is known. But if
it steps 20 times in a row and none of its parameters has a gradient, they are not those that are trained: the model, or
its last layer, was replaced after the optimizer was made, or gradients are cleared before each step.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from perfagent.boundary.gc_instances import instances_of
from perfagent.measure.step_task import StepTask
from perfagent.measure.tensor_storage import numbers_in
from perfagent.measure.uncleared import LOOKS, Uncleared

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from perfagent.causes.watch import Task
    from perfagent.step.state import StepState

__all__ = ["Unoptimized"]

FIRST_STEPS = 3
LEAST_STEPS = 20
EVERY_S = 30.0
_SHARE_OF_CORE = 5e-5
_MOST_SEARCHES = 3
_MOST_NAMED = 20
_NAME = ("params/unoptimized_share",)


class Unoptimized:
    """The search of one run. model: returns the root module or None. add: registers a task to call between two steps."""

    def __init__(
        self,
        progress: StepState,
        add: Callable[[Task], None],
        model: Callable[[], nn.Module | None],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._progress, self._add, self._model, self._clock, self._cpu = progress, add, model, clock, cpu
        self._begin = progress.completed
        self._due = 0.0
        self._watch: _GradientWatch | None = None
        self._clearing: Uncleared | None = None
        self._owned: set[int] = set()  # ids of parameters that an optimizer has that did not step
        self._searches = 0
        self._is_on: defaultdict[str, bool] = defaultdict(bool)  # what was reported last
        self._is_fruitless = False

    # ---- on the sender's thread

    def poll(self) -> float:
        """Returns the time (of its clock) before which nothing is due."""
        p, watch = self._progress, self._watch
        if p.links.gradient_schedule.rank:
            return math.inf
        starved = p.measured.without_gradient
        if (starved >= LEAST_STEPS) != self._is_on["without_gradient"]:
            numbers = sum(map(numbers_in, _held_by(p.selection.all()[:1]).values()))
            self._event("without_gradient", float(starved >= LEAST_STEPS), p.completed, numbers=numbers, steps=starved)
        if self._clearing is not None and self._clearing.over:
            self._tell_uncleared(self._clearing)
        if watch is not None and watch.over:
            self._watch = None
            p.costs.hooks_ns += watch.cost_ns
            if watch.found is not None:
                self._tell(watch.model(), watch.found)
        elif watch is None and self._clock() >= self._due and self._has_begun():
            began = self._cpu()
            self._compare()
            if self._clearing is None and not self._is_fruitless:
                self._clearing = Uncleared(p)
                self._add(self._clearing)
            self._due = self._clock() + max(EVERY_S, (self._cpu() - began) / _SHARE_OF_CORE)
        is_idle = self._watch is None and self._clearing is None and not 0 < starved < LEAST_STEPS
        return self._due if is_idle else self._clock()

    def _has_begun(self) -> bool:
        return not self._progress.links.ended and self._progress.completed - self._begin >= FIRST_STEPS

    def close(self) -> None:
        for task in (self._watch, self._clearing):
            if task is not None:
                task.over = True

    def _compare(self) -> None:
        model, optimizers = self._model(), self._progress.selection.all()
        if model is None or not optimizers:
            return
        try:
            trainable = {id(one): one for one in model.parameters() if one.requires_grad}
            stepping, primary = _held_by(optimizers), _held_by(optimizers[:1])
        except RuntimeError:  # the loop changes the model or an optimizer at this moment
            return
        if not primary.keys() & trainable.keys():
            return
        left = trainable.keys() - stepping.keys() - self._owned
        if left:
            self._watch = _GradientWatch(self, self._progress, model, [trainable[one] for one in left])
            self._add(self._watch)
        else:
            self._tell(model, [])

    def _tell_uncleared(self, task: Uncleared) -> None:
        if not all(reading.ready() for reading in task.readings):
            return
        looks = task.looks if task.looks >= LOOKS and all(reading.values()[0] for reading in task.readings) else 0
        self._clearing, self._is_fruitless = None, task.fruitless
        self._progress.costs.hooks_ns += task.cost_ns
        if self._is_on["uncleared"] != bool(looks):
            self._event("uncleared", float(bool(looks)), task.step, steps=looks)

    def _tell(self, model: nn.Module | None, found: list[Tensor]) -> None:
        if model is None:
            return
        p, numbers = self._progress, sum(map(numbers_in, found))
        share = numbers / (sum(numbers_in(one) for one in model.parameters() if one.requires_grad) or 1)
        p.rows.append((p.completed, time.time(), time.monotonic(), _NAME, (share,)))
        if found or self._is_on["unoptimized"]:
            ids = {id(one) for one in found}
            largest = sorted(model.named_parameters(), key=lambda pair: -pair[1].numel())
            names = [name for name, one in largest if id(one) in ids][:_MOST_NAMED]
            facts = {"names": names, "count": len(found), "numbers": numbers, "steps": LEAST_STEPS}
            self._event("unoptimized", share, p.completed, **facts)

    def _event(self, what: str, share: float, step: int, **facts: object) -> None:
        self._is_on[what] = share > 0
        if self._progress.links.on_event is not None:
            self._progress.links.on_event("parameters", {"what": what, "share": share, **facts}, step=step)

    # ---- on the training thread

    def without(self, left: list[Tensor]) -> list[Tensor]:
        """Returns those that no optimizer of the process has."""
        stepping = _held_by(self._progress.selection.all())
        left = [one for one in left if id(one) not in stepping]
        if left and self._searches < _MOST_SEARCHES:
            self._searches += 1
            optimizers = instances_of(sys.modules["torch"].optim.Optimizer)
            held = _held_by(one for one in optimizers if "param_groups" in vars(one))
            self._owned.update(id(one) for one in left if id(one) in held)
            left = [one for one in left if id(one) not in held]
        return left


class _GradientWatch(StepTask):
    """Watches what the stepping optimizers do not have.

    found: what receives gradients and no optimizer has; None if that cannot be said.
    """

    def __init__(self, of: Unoptimized, p: StepState, model: nn.Module, left: Iterable[Tensor]) -> None:
        super().__init__(p)
        self._of = of
        self.model = weakref.ref(model)
        self._left = [weakref.ref(one) for one in left]
        self._began = -1
        self._before: list[_Versions | None] = []
        self.found: list[Tensor] | None = None

    def _goes_on(self) -> bool:
        completed = self._progress.completed
        if self._began < 0:
            self._began, self._before = completed, [_versions(one()) for one in self._left]
        elif completed - self._began >= LEAST_STEPS:
            pairs = zip((one() for one in self._left), self._before, strict=True)
            left = [one for one, before in pairs if one is not None and _is_fed(before, _versions(one))]
            self.found = self._of.without(left) if left else []
        return self.found is None


_Versions = tuple[int, "weakref.ref[Tensor]", int]
"""That of a parameter, its gradient, and the version of that."""


def _versions(parameter: Tensor | None) -> _Versions | None:
    if parameter is None or parameter.grad is None or not parameter.requires_grad:
        return None
    return parameter._version, weakref.ref(parameter.grad), parameter.grad._version


def _is_fed(before: _Versions | None, now: _Versions | None) -> bool:
    """True if new gradients have come, and nobody has changed the parameter."""
    if before is None or now is None or before[0] != now[0]:
        return False
    return before[1]() is not now[1]() or before[2] != now[2]


def _held_by(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    return {
        id(one): one for optimizer in optimizers for group in [*optimizer.param_groups] for one in [*group["params"]]
    }
