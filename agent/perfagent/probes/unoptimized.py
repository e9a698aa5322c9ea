"""Finds trainable parameters of the model that receive gradients and that no optimizer has, and optimizers whose
parameters receive none, or whose gradients nobody clears (uncleared.py).

The sender's thread compares the model's parameters with those of the optimizers that step, every half a minute or less
often (0.4 ms for 300 parameters). In a usual training nothing is left, and that is all. What is left is looked at
between two steps, and again 20 steps later: it counts if new gradients have come meanwhile and the loop has not moved
it by hand. Optimizers that did not step so far (several in turn) are searched for then, three times a run at most, since
that takes 0.1 s.

Where the optimizer holds other tensors than the model (fp32 copies, DeepSpeed's partitions), nothing is known. But if
it steps 20 times in a row and none of its parameters has a gradient, they are not those that are trained: the model, or
its last layer, was replaced after the optimizer was made, or gradients are cleared before each step.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from perfagent.boundary.gc_instances import instances_of
from perfagent.signals.batches.fingerprint import content_of
from perfagent.signals.tensor_storage import numbers_in
from perfagent.signals.uncleared import Uncleared

if TYPE_CHECKING:
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
        add: Callable[[Any], None],
        model: Callable[[], Any],
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
        p, look = self._progress, self._look
        if (p.measured.without_gradient >= LEAST_STEPS) != self._is_starved and not p.links.gradient_schedule.rank:
            self._tell_starved(p.measured.without_gradient)
        if self._clearing is not None and self._clearing.over:
            self._tell_uncleared(self._clearing)
        if look is not None:
            if not look.over:
                return self._clock()
            self._look = None
            p.costs.hooks_ns += look.cost_ns
            self._tell(look.model(), look.found)
        elif self._clock() >= self._due and not p.links.ended and p.completed - self._begin >= FIRST_STEPS:
            began = self._cpu()
            self._compare()
            if self._clearing is None and not self._is_fruitless and not p.links.gradient_schedule.rank:
                self._clearing = Uncleared(p)
                self._add(self._clearing)
            self._due = self._clock() + max(EVERY_S, (self._cpu() - began) / _SHARE_OF_CORE)
        is_idle = self._look is None and self._clearing is None and not 0 < p.measured.without_gradient < LEAST_STEPS
        return self._due if is_idle else self._clock()

    def close(self) -> None:
        for look in (self._look, self._clearing):
            if look is not None:
                look.over = True

    def _compare(self) -> None:
        model, p = self._model(), self._progress
        primary = p.selection.primary
        if model is None or primary is None or p.links.gradient_schedule.rank:
            return
        try:
            trainable = {id(one): one for one in model.parameters() if one.requires_grad}
            stepping = _held_by(p.selection.all())
        except RuntimeError:  # the loop changes the model or an optimizer at this moment
            return
        if not _held_by([primary]) & trainable.keys():
            return
        left = trainable.keys() - stepping - self._owned
        if left:
            self._look = _Look(self, p, model, [trainable[one] for one in left])
            self._add(self._look)
        else:
            self._tell(model, [])

    def _tell_starved(self, looks: int) -> None:
        p = self._progress
        optimizer = p.selection.primary
        self._is_starved = looks >= LEAST_STEPS
        if p.links.on_event is None or optimizer is None:
            return
        numbers = sum(numbers_in(one) for group in [*optimizer.param_groups] for one in [*group["params"]])
        told = {"what": "without_gradient", "share": float(self._is_starved), "numbers": numbers, "steps": looks}
        p.links.on_event("parameters", told, step=p.completed)

    def _tell_uncleared(self, look: Uncleared) -> None:
        p, looks = self._progress, look.result()
        if looks is None:
            return
        self._clearing, self._is_fruitless = None, look.fruitless
        p.costs.hooks_ns += look.cost_ns
        if self._is_uncleared != bool(looks) and p.links.on_event is not None:
            self._is_uncleared = bool(looks)
            told = {"what": "uncleared", "share": float(self._is_uncleared), "steps": looks}
            p.links.on_event("parameters", told, step=look.step)

    def _tell(self, model: Any, found: list[Any] | None) -> None:
        if found is None or model is None:
            return
        p = self._progress
        whole = sum(numbers_in(one) for one in model.parameters() if one.requires_grad)
        numbers = sum(map(numbers_in, found))
        share = numbers / whole if whole else 0.0
        p.rows.append((p.completed, time.time(), time.monotonic(), _NAME, (share,)))
        before, self._told = self._told, bool(found)
        if not (found or before) or p.links.on_event is None:
            return
        ids = {id(one) for one in found}
        named = sorted(
            ((name, one) for name, one in model.named_parameters() if id(one) in ids), key=lambda pair: -pair[1].numel()
        )
        told = {
            "what": "unoptimized",
            "share": share,
            "names": [name for name, _ in named[:_MOST_NAMED]],
            "count": len(found),
            "numbers": numbers,
            "steps": LEAST_STEPS,
        }
        p.links.on_event("parameters", told, step=p.completed)

    # ---- on the training thread

    def without(self, left: list[Any]) -> list[Any]:
        """Returns those that no optimizer of the process has."""
        p = self._progress
        stepping = _held_by(p.selection.all())
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
    """Looks at what the stepping optimizers do not have: a task between two steps.

    found: what receives gradients and no optimizer has; None if that cannot be said.
    """

    def __init__(self, of: Unoptimized, p: StepState, model: Any, left: Iterable[Any]) -> None:
        self._of, self._progress = of, p
        self.model = weakref.ref(model)
        self._left = [weakref.ref(one) for one in left]
        self._began = -1
        self._before: list[tuple[Any, _State]] = []
        self.found: list[Any] | None = None
        self.over = False
        self.cost_ns = 0

    def at_boundary(self) -> bool:
        completed = self._progress.completed
        if self.over:
            return False
        if self._began < 0:
            began = time.perf_counter_ns()
            self._began = completed
            alive = [(reference, one) for reference in self._left if (one := reference()) is not None]
            self._before = [(reference, _State(one)) for reference, one in alive]
            self.cost_ns += time.perf_counter_ns() - began
            return True
        if completed - self._began < LEAST_STEPS:
            return True
        began = time.perf_counter_ns()
        left = [one for reference, before in self._before if (one := reference()) is not None and before.is_fed(one)]
        self.found = self._of.without(left) if left else []
        self._before = []
        self.cost_ns += time.perf_counter_ns() - began
        self.over = True
        return False


class _State:
    """A parameter and its gradient as they were at the first look."""

    __slots__ = ("_gradient", "_numbers", "_version", "_version_of_gradient")

    def __init__(self, parameter: Any) -> None:
        gradient = parameter.grad
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version_of_gradient = getattr(gradient, "_version", -1)
        self._version, self._numbers = parameter._version, _few(parameter)

    def is_fed(self, parameter: Any) -> bool:
        """True if new gradients have come, and nobody has changed the parameter."""
        gradient: Any = parameter.grad
        if self._gradient is None or gradient is None or not parameter.requires_grad:
            return False
        is_same = self._gradient() is gradient
        if is_same and gradient._version == self._version_of_gradient:
            return False  # left over from a step before
        return bool(parameter._version == self._version and _few(parameter) == self._numbers)


def _few(parameter: Any) -> bytes:
    return content_of(parameter) if parameter.is_cpu and not parameter.is_complex() else b""


def _held_by(optimizers: Iterable[Any]) -> set[int]:
    return {
        id(one)
        for optimizer in optimizers
        if optimizer is not None
        for group in [*optimizer.param_groups]
        for one in [*group["params"]]
    }
