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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from perfagent.boundary.gc_instances import instances_of
from perfagent.measure.tensor_storage import numbers_in
from perfagent.measure.uncleared import Uncleared

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
        self._look: _Look | None = None
        self._clearing: Uncleared | None = None
        self._owned: set[int] = set()  # ids of parameters that an optimizer has that did not step
        self._searches = 0
        self._told = self._is_starved = self._is_uncleared = self._is_fruitless = False

    # ---- on the sender's thread

    def poll(self) -> float:
        """Returns the time (of its clock) before which nothing is due."""
        p, look, clearing = self._progress, self._look, self._clearing
        if p.links.gradient_schedule.rank:
            return math.inf
        starved = p.measured.without_gradient
        if (starved >= LEAST_STEPS) != self._is_starved:
            self._is_starved = starved >= LEAST_STEPS
            numbers = sum(numbers_in(one) for one in _held_by(p.selection.all()[:1]).values())
            self._event("without_gradient", float(self._is_starved), p.completed, numbers=numbers, steps=starved)
        if clearing is not None and clearing.over:
            self._tell_uncleared(clearing)
        if (
            look is None
            and self._clock() >= self._due
            and not p.links.ended
            and p.completed - self._begin >= FIRST_STEPS
        ):
            began = self._cpu()
            self._compare()
            if self._clearing is None and not self._is_fruitless:
                self._clearing = Uncleared(p)
                self._add(self._clearing)
            self._due = self._clock() + max(EVERY_S, (self._cpu() - began) / _SHARE_OF_CORE)
        elif look is not None and look.over:
            self._look = None
            p.costs.hooks_ns += look.cost_ns
            self._tell(look.model(), look.found)
        is_idle = self._look is None and self._clearing is None and not 0 < starved < LEAST_STEPS
        return self._due if is_idle else self._clock()

    def close(self) -> None:
        for look in (self._look, self._clearing):
            if look is not None:
                look.over = True

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
            self._look = _Look(self, self._progress, model, [trainable[one] for one in left])
            self._add(self._look)
        else:
            self._tell(model, [])

    def _tell_uncleared(self, look: Uncleared) -> None:
        looks = look.result()
        if looks is None:
            return
        self._clearing, self._is_fruitless = None, look.fruitless
        self._progress.costs.hooks_ns += look.cost_ns
        if self._is_uncleared != bool(looks):
            self._is_uncleared = bool(looks)
            self._event("uncleared", float(self._is_uncleared), look.step, steps=looks)

    def _tell(self, model: nn.Module | None, found: list[Tensor] | None) -> None:
        if found is None or model is None:
            return
        p = self._progress
        whole = sum(numbers_in(one) for one in model.parameters() if one.requires_grad)
        numbers = sum(map(numbers_in, found))
        share = numbers / whole if whole else 0.0
        p.rows.append((p.completed, time.time(), time.monotonic(), _NAME, (share,)))
        before, self._told = self._told, bool(found)
        if found or before:
            ids = {id(one) for one in found}
            largest = sorted(model.named_parameters(), key=lambda pair: -pair[1].numel())
            names = [name for name, one in largest if id(one) in ids][:_MOST_NAMED]
            self._event(
                "unoptimized", share, p.completed, names=names, count=len(found), numbers=numbers, steps=LEAST_STEPS
            )

    def _event(self, what: str, share: float, step: int, **facts: object) -> None:
        if self._progress.links.on_event is not None:
            self._progress.links.on_event("parameters", {"what": what, "share": share, **facts}, step=step)

    # ---- on the training thread

    def without(self, left: list[Tensor]) -> list[Tensor]:
        """Returns those that no optimizer of the process has."""
        stepping = _held_by(self._progress.selection.all())
        left = [one for one in left if id(one) not in stepping]
        if left and self._searches < _MOST_SEARCHES:
            self._searches += 1
            held = _held_by(
                one for one in instances_of(sys.modules["torch"].optim.Optimizer) if "param_groups" in vars(one)
            )
            self._owned.update(id(one) for one in left if id(one) in held)
            left = [one for one in left if id(one) not in held]
        return left


class _Look:
    """Watches what the stepping optimizers do not have: a task between two steps.

    found: what receives gradients and no optimizer has; None if that cannot be said.
    """

    def __init__(self, of: Unoptimized, p: StepState, model: nn.Module, left: Iterable[Tensor]) -> None:
        self._of, self._progress = of, p
        self.model = weakref.ref(model)
        self._left = [weakref.ref(one) for one in left]
        self._began = -1
        self._before: list[_Kept] = []
        self.found: list[Tensor] | None = None
        self.over = False
        self.cost_ns = 0

    def at_boundary(self) -> bool:
        if self.over:
            return False
        began, completed = time.perf_counter_ns(), self._progress.completed
        if self._began < 0:
            self._began = completed
            self._before = [_kept(one) for reference in self._left if (one := reference()) is not None]
        elif completed - self._began >= LEAST_STEPS:
            left = [one for kept in self._before if (one := kept.parameter()) is not None and kept.is_fed(one)]
            self.found = self._of.without(left) if left else []
            self.over = True
        self.cost_ns += time.perf_counter_ns() - began
        return not self.over


class _Kept(NamedTuple):
    """A parameter and its gradient as they were at first, and the versions of both."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor] | None
    version: int
    gradient_version: int

    def is_fed(self, parameter: Tensor) -> bool:
        """True if new gradients have come, and nobody has changed the parameter."""
        gradient = parameter.grad
        if self.gradient is None or gradient is None or not parameter.requires_grad:
            return False
        is_new = self.gradient() is not gradient or gradient._version != self.gradient_version
        return is_new and parameter._version == self.version


def _kept(parameter: Tensor) -> _Kept:
    gradient = parameter.grad
    known = None if gradient is None else weakref.ref(gradient)
    return _Kept(weakref.ref(parameter), known, parameter._version, -1 if gradient is None else gradient._version)


def _held_by(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    return {
        id(one): one for optimizer in optimizers for group in [*optimizer.param_groups] for one in [*group["params"]]
    }
