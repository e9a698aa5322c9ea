"""Finds trainable parameters that do not move: a few numbers of each, compared over 20 steps or more.

No gradient reaches them (a `detach()`, a layer that is never called), their learning rate is zero, or their updates are
rounded away (bfloat16 weights of 1 do not change by less than 0.004). Frozen parameters do not count, nor tables of
embeddings with a gradient: only rows of tokens that occur move.

Runs with a pass over the gradients: the first three times that 20 steps have passed, then at every eighth pass. The
period of the passes accounts for its cost. Between two comparisons, 8192 numbers are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from perfagent.measure.gradients import Plan, parameters_of
from perfagent.measure.updates import Changes, Weights

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["Unmoved"]

LEAST_STEPS = 20
_MOST_NUMBERS = 2**13
_OFTEN, _EVERY = 3, 8
"""So many comparisons come as soon as may be, the later ones with every eighth pass."""
_MOST_NAMED = 20


class _Facts(NamedTuple):
    """State of a parameter when it was compared. rate: its learning rate; None if that may be on a device."""

    counts: bool
    has_gradient: bool
    rate: float | None


class Unmoved:
    """The comparisons of one run."""

    __slots__ = ("_compared", "_kept", "_passes", "_since", "_trainable", "was_reported")

    def __init__(self) -> None:
        self._kept: Weights | None = None
        self._since = self._passes = self._compared = 0
        self._trainable: list[bool] = []
        self.was_reported = False  # something stood still when names were reported last

    def compare(self, p: StepState, optimizer: Optimizer, plan: Plan, *, tell: bool) -> None:
        """Ends a pass, after the optimizer's step. tell: this rank reports the names."""
        self._passes += 1
        since, kept = p.completed - self._since, self._kept
        if (kept is not None and since < LEAST_STEPS) or (self._compared >= _OFTEN and self._passes < _EVERY):
            return
        parameters = parameters_of(optimizer)
        self._kept = None
        if not plan.fits(parameters):
            return
        trainable = [one.requires_grad for one in parameters]
        changes = kept.changes(parameters) if kept is not None and kept.plan is plan else None
        if changes is not None:
            self._compared += 1
            facts = _facts(optimizer, plan)
            p.measured.deferred.append(_Compared(self, p, changes, plan, facts, p.completed + 1, since, tell))
        self._passes, self._since = 0, p.completed
        if changes is None or trainable != self._trainable:
            kept = Weights(parameters, plan, _MOST_NUMBERS, of=trainable)
        self._kept, self._trainable = kept, trainable


@dataclass(slots=True)
class _Compared:
    """Result of a comparison, perhaps still on the device. steps: over so many. tell: this rank reports the names."""

    unmoved: Unmoved
    progress: StepState
    changes: Changes
    plan: Plan
    facts: list[_Facts]
    step: int
    steps: int
    tell: bool

    def ready(self) -> bool:
        return self.changes.ready()

    def add(self, values: dict[str, float], rows: list[dict[str, float]]) -> None:  # noqa: ARG002
        sizes, facts = self.plan.sizes, self.facts
        compared = [(place, stood) for place, stood in self.changes.stood_still() if facts[place].counts]
        whole = sum(sizes[place] for place, _ in compared)
        if not whole:
            return
        still = sorted((place for place, stood in compared if stood), key=lambda place: -sizes[place])
        numbers = sum(sizes[place] for place in still)
        values["update/unmoved_share"] = share = numbers / whole
        if not self.tell or self.progress.links.on_event is None:
            return
        before, self.unmoved.was_reported = self.unmoved.was_reported, bool(still)
        if not (still or before):  # it is reported while something stands still, and when that is over
            return
        data = {
            "what": "unmoved",
            "share": share,
            "names": [self.plan.names[place] for place in still[:_MOST_NAMED]],
            "count": len(still),
            "of": len(compared),
            "numbers": numbers,
            "without_gradient": sum(sizes[place] for place in still if not facts[place].has_gradient),
            "without_rate": sum(sizes[place] for place in still if facts[place].rate == 0.0),
            "steps": self.steps,
        }
        self.progress.links.on_event("parameters", data, step=self.step)


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
