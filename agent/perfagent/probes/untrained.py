"""Schedules the looks for parameters that do not train (measure/untrained.py), and reports what they have found: the first
three one after another, later ones every half a minute or less often.

If the optimizer steps 20 times in a row and none of its parameters has a gradient, they are not those that are trained:
the model, or its last layer, was replaced after the optimizer was made, or gradients are cleared before each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from perfagent.hooks.selection.models import search
from perfagent.measure.clearing import LEAST_SUMS
from perfagent.measure.gradients import parameters_of
from perfagent.measure.tensor_storage import numbers_in
from perfagent.measure.untrained import LEAST_STEPS, UntrainedParameters, owned_by
from perfagent.step.gradients import WeightChanges

if TYPE_CHECKING:
    from torch import nn

    from perfagent.causes.watch import Task
    from perfagent.step.state import StepState

__all__ = ["UntrainedReport"]

EVERY_S = 30.0
_SHARE_OF_TIME = 5e-4
"""Of the training thread: a look takes 5 ms for 300 parameters."""
_AT_ONCE = 3
_MOST_NAMED = 20
_MOST_SEARCHES = 3
"""Of a run for optimizers that did not step: each takes 0.1 s."""


class UntrainedReport:
    """The looks of one run. model: returns the root module or None. add: registers a task to call between two steps."""

    def __init__(
        self,
        progress: StepState,
        add: Callable[[Task], None],
        model: Callable[[], nn.Module | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._add, self._model, self._clock = progress, add, model, clock
        self._owned: set[int] = set()  # ids of parameters of optimizers that did not step so far
        self._searches = 0
        self._look: UntrainedParameters | None = None
        self._looks, self._due = 0, 0.0
        self._told: dict[str, bool] = {}  # what was reported, and whether it was still so

    def poll(self) -> float:
        """Begins or ends a look. Returns the time (of its clock) before which nothing is due."""
        p, look = self._progress, self._look
        self._report_starved()
        if look is None:
            if self._clock() >= self._due and p.selection.primary is not None:
                self._look = UntrainedParameters(p, self._model, self._owned)
                self._add(self._look)
        elif look.ready():
            self._look = None
            self._looks += 1
            p.costs.hooks_ns += look.cost_ns
            if self._looks >= _AT_ONCE:
                self._due = self._clock() + max(EVERY_S, look.cost_ns / 1e9 / _SHARE_OF_TIME)
            if look.step:
                self._report(look)
        return self._clock() if 0 < p.measured.without_gradient < LEAST_STEPS else self._due

    def close(self) -> None:
        self._report_starved()
        if self._look is not None:
            self._look.close()

    def _report(self, look: UntrainedParameters) -> None:
        p, values = self._progress, dict[str, float]()
        if look.moved is not None:
            self._report_unmoved(look, look.moved, values)
        if look.unoptimized is not None:
            self._report_unoptimized(look, look.unoptimized, values)
        if values:
            p.rows.append((look.step, time.time(), time.monotonic(), tuple(values), tuple(values.values())))
        if p.links.rank:
            return
        clearing = look.clearing
        sums = clearing.sums if all(reading.values()[0] for reading in clearing.readings) else 0
        if (sums >= LEAST_SUMS) != self._told.get("uncleared", False):
            self._tell(look.step, "uncleared", float(sums >= LEAST_SUMS), steps=sums)

    def _report_starved(self) -> None:
        """Without a look: a run may be shorter than one."""
        p = self._progress
        starved, optimizer = p.measured.without_gradient, p.selection.primary
        is_so = starved >= LEAST_STEPS
        if optimizer is None or p.links.rank or is_so == self._told.get("without_gradient", False):
            return
        numbers = sum(numbers_in(one) for one in parameters_of(optimizer))
        self._tell(p.completed, "without_gradient", float(is_so), numbers=numbers, steps=starved)

    def _report_unmoved(self, look: UntrainedParameters, moved: WeightChanges, values: dict[str, float]) -> None:
        sizes, facts = moved.table.sizes, look.facts
        compared = [(place, change) for place, change in _changes(moved) if facts[place].counts]
        whole = sum(sizes[place] for place, _ in compared)
        if not whole:
            return
        still = sorted((place for place, change in compared if change == 0.0), key=lambda place: -sizes[place])
        numbers = sum(sizes[place] for place in still)
        values["update/unmoved_share"] = share = numbers / whole
        if moved.table.same_everywhere and self._progress.links.rank:
            return
        self._tell(
            look.step,
            "unmoved",
            share,
            names=[moved.table.names[place] for place in still[:_MOST_NAMED]],
            count=len(still),
            of=len(compared),
            numbers=numbers,
            without_gradient=sum(sizes[place] for place in still if not facts[place].has_gradient),
            without_rate=sum(sizes[place] for place in still if facts[place].rate == 0.0),
            steps=LEAST_STEPS,
        )

    def _report_unoptimized(
        self, look: UntrainedParameters, found: list[tuple[str, int, int]], values: dict[str, float]
    ) -> None:
        if found and self._searches < _MOST_SEARCHES:  # optimizers may take turns
            self._searches += 1
            self._owned.update(owned_by(search(models=False)[1]))
        found = sorted((one for one in found if one[2] not in self._owned), key=lambda one: -one[1])
        numbers = sum(size for _, size, _ in found)
        values["params/unoptimized_share"] = share = numbers / (look.trainable or 1)
        names = [name for name, _, _ in found[:_MOST_NAMED]]
        self._tell(look.step, "unoptimized", share, names=names, count=len(found), numbers=numbers, steps=LEAST_STEPS)

    def _tell(self, step: int, what: str, share: float, **facts: object) -> None:
        """Tells of something while it is so, and when it is over."""
        before, self._told[what] = self._told.get(what, False), share > 0
        if share > 0 or before:
            self._progress.links.on_event("parameters", {"what": what, "share": share, **facts}, step=step)


def _changes(moved: WeightChanges) -> Iterator[tuple[int, float]]:
    """The norm of the change of each parameter, by its place."""
    for reading, places in moved.readings:
        yield from zip(places, reading.values()[len(places) :], strict=True)
