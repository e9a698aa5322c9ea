"""Finds trainable parameters that do not move: a few numbers of each, compared over 20 steps or more.

No gradient reaches them (a `detach()`, a layer that is never called), their learning rate is zero, or their updates are
rounded away (bfloat16 weights of 1 do not change by less than 0.004). Frozen parameters do not count, nor tables of
embeddings that are not compared whole: only rows of tokens that occur move.

Runs with a pass over the gradients: the first three times that 20 steps have passed, then at every eighth pass. For 306
tensors it takes 1.4 ms, as the pass itself does; the period of the passes accounts for it. Between two comparisons, 8192
numbers are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from perfagent.measure.gradients import Plan, parameters_of
from perfagent.measure.updates import Changes, Weights

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["Unmoved"]

LEAST_STEPS = 20
_MOST_NUMBERS = 2**13
_OFTEN, _EVERY = 3, 8
"""So many comparisons come as soon as may be, the later ones with every eighth pass."""
_MOST_NAMED = 20


class _Facts(NamedTuple):
    """Of a parameter when it was compared. rate: its learning rate; None if that may be on a device."""

    trainable: bool
    has_gradient: bool
    rate: float | None


class Unmoved:
    """The comparisons of one run."""

    __slots__ = ("_compared", "_kept", "_passes", "_since", "_tables", "_trainable", "told")

    def __init__(self) -> None:
        self._kept: Weights | None = None
        self._since = self._passes = self._compared = 0
        self._tables: tuple[Plan | None, frozenset[int]] = None, frozenset()
        self._trainable: list[bool] = []
        self.told = False  # something stood still when names were reported last

    def look(self, p: StepState, optimizer: Optimizer, plan: Plan, model: nn.Module, *, tell: bool) -> None:
        """Ends a pass, after the optimizer's step. tell: this rank reports the names."""
        self._passes += 1
        since = p.completed - self._since
        if self._kept is not None and since < LEAST_STEPS:
            return
        if self._compared >= _OFTEN and self._passes < _EVERY:
            return
        parameters = parameters_of(optimizer)
        kept, self._kept = self._kept, None
        if not plan.fits(parameters):
            return
        changes = kept.changes(parameters) if kept is not None and kept.is_of(plan) else None
        if changes is not None:
            self._compared += 1
            p.measured.deferred.append(
                _Compared(self, p, changes, plan, _facts(optimizer), p.completed + 1, since, tell)
            )
        self._passes, self._since = 0, p.completed
        trainable = [parameter.requires_grad for parameter in parameters]
        if changes is None or trainable != self._trainable:
            kept = self._keep(parameters, plan, model, trainable)
        self._kept, self._trainable = kept, trainable

    def _keep(self, parameters: Sequence[Tensor], plan: Plan, model: nn.Module, trainable: list[bool]) -> Weights:
        nn = sys.modules["torch"].nn
        if self._tables[0] is not plan:
            embeddings = (one for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)))
            self._tables = plan, frozenset(id(module.weight) for module in embeddings)
        kept = Weights(parameters, plan, _MOST_NUMBERS, of=trainable)
        parts = [id(one) in self._tables[1] and not kept.is_whole(at) for at, one in enumerate(parameters)]
        if not any(parts):
            return kept
        whole = [one and not part for one, part in zip(trainable, parts, strict=True)]
        return Weights(parameters, plan, _MOST_NUMBERS, of=whole)


@dataclass(slots=True)
class _Compared:
    """What a comparison found, perhaps still on the device. steps: over so many. tell: this rank reports the names."""

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
        compared = [(place, stood) for place, stood in self.changes.stood_still() if facts[place].trainable]
        still = sorted((place for place, stood in compared if stood), key=lambda place: -sizes[place])
        whole = sum(sizes[place] for place, _ in compared)
        if not whole:
            return
        numbers = sum(sizes[place] for place in still)
        values["update/unmoved_share"] = share = numbers / whole
        if not self.tell or self.progress.links.on_event is None:
            return
        before, self.unmoved.told = self.unmoved.told, bool(still)
        if not (still or before):  # it is reported while something stands still, and when that is over
            return
        told = {
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
        self.progress.links.on_event("parameters", told, step=self.step)


def _facts(optimizer: Optimizer) -> list[_Facts]:
    return [
        _Facts(one.requires_grad, one.grad is not None, rate if isinstance(rate, float) else None)
        for group in optimizer.param_groups
        for rate in (group.get("lr"),)
        for one in group["params"]
    ]
