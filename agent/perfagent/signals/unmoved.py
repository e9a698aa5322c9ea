"""Finds trainable parameters that do not move: a few numbers of each, compared over 20 steps or more.

`update/ratio` says how far one step moves what has a gradient. This says what stands still although the optimizer has
it: because no gradient reaches it (a `detach()`, a layer that is never called), its learning rate is zero, or its
updates are rounded away (bfloat16 weights of 1 do not change by less than 0.004). Frozen parameters do not count, nor
tables of embeddings that are not compared whole: only rows of tokens that occur move.

Runs with a pass over the gradients: the first three times that 20 steps have passed, then at every eighth pass. For 306
tensors it takes 1.4 ms, as the pass itself does; the period of the passes accounts for it. Between two comparisons, 8192
numbers are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perfagent.signals.gradients import Plan, parameters_of
from perfagent.signals.updates import Changes, Weights

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["Unmoved"]

LEAST_STEPS = 20
_MOST_NUMBERS = 2**13
_OFTEN, _EVERY = 3, 8
"""So many comparisons come as soon as may be, the later ones with every eighth pass."""
_MOST_NAMED = 20


class Unmoved:
    """The comparisons of one run."""

    __slots__ = ("_compared", "_kept", "_passes", "_since", "_tables", "_told", "_trainable")

    def __init__(self) -> None:
        self._kept: Weights | None = None
        self._since = self._passes = self._compared = 0
        self._tables: tuple[Plan | None, frozenset[int]] = None, frozenset()
        self._trainable: list[bool] = []
        self._told = False

    def look(self, p: StepState, optimizer: Any, plan: Plan, model: Any, *, tell: bool) -> None:
        """Ends a pass, after the optimizer's step. tell: this rank reports the names."""
        self._passes += 1
        since = p.completed - self._since
        if self._kept is not None and since < LEAST_STEPS:
            return
        if self._compared >= _OFTEN and self._passes < _EVERY:
            return
        parameters = parameters_of(optimizer)
        if not plan.fits(parameters):
            self._kept = None
            return
        kept, self._kept = self._kept, None
        changes = kept.changes(parameters) if kept is not None and kept.is_of(plan) else None
        if changes is not None:
            self._compared += 1
            p.measured.deferred.append(_Compared(self, p, changes, plan, _facts(optimizer), since, tell=tell))
        self._passes = 0
        self._since = p.completed
        trainable = [parameter.requires_grad for parameter in parameters]
        if changes is None or trainable != self._trainable:
            kept = self._keep(parameters, plan, model, trainable)
        self._kept, self._trainable = kept, trainable

    def _keep(self, parameters: Sequence[Any], plan: Plan, model: Any, trainable: list[bool]) -> Weights:
        if self._tables[0] is not plan:
            self._tables = plan, _tables_in(model)
        tables = self._tables[1]
        kept = Weights(parameters, plan, _MOST_NUMBERS, of=trainable)
        if any(id(parameter) in tables and not kept.is_whole(at) for at, parameter in enumerate(parameters)):
            small = [
                one and (id(parameter) not in tables or kept.is_whole(at))
                for at, (one, parameter) in enumerate(zip(trainable, parameters, strict=True))
            ]
            kept = Weights(parameters, plan, _MOST_NUMBERS, of=small)
        return kept

    # ---- on the sender's thread

    def told(self, share: float) -> bool:
        """Whether names are reported with this share: while something stands still, and when that is over."""
        before, self._told = self._told, share > 0
        return share > 0 or before


class _Compared:
    """What a comparison found, perhaps still on the device."""

    def __init__(
        self,
        unmoved: Unmoved,
        p: StepState,
        changes: Changes,
        plan: Plan,
        facts: list[tuple[bool, bool, float | None]],
        steps: int,
        *,
        tell: bool,
    ) -> None:
        self._unmoved, self._progress, self._changes, self._plan = unmoved, p, changes, plan
        self._facts, self._steps, self._tell = facts, steps, tell
        self._step = p.completed + 1
        self.ready = changes.ready

    def add(self, values: dict[str, float], rows: list[dict[str, float]]) -> None:  # noqa: ARG002
        sizes, facts = self._plan.sizes, self._facts
        compared = [(place, still) for place, still in self._changes.stood_still() if facts[place][0]]
        still = [place for place, stood in compared if stood]
        whole = sum(sizes[place] for place, _ in compared)
        if not whole:
            return
        numbers = sum(sizes[place] for place in still)
        values["update/unmoved_share"] = share = numbers / whole
        if not self._tell or not self._unmoved.told(share) or self._progress.links.on_event is None:
            return
        named = sorted(still, key=lambda place: -sizes[place])[:_MOST_NAMED]
        told = {
            "what": "unmoved",
            "share": share,
            "names": [self._plan.names[place] for place in named],
            "count": len(still),
            "of": len(compared),
            "numbers": numbers,
            "without_gradient": sum(sizes[place] for place in still if not facts[place][1]),
            "without_rate": sum(sizes[place] for place in still if facts[place][2] == 0.0),
            "steps": self._steps,
        }
        self._progress.links.on_event("parameters", told, step=self._step)


def _facts(optimizer: Any) -> list[tuple[bool, bool, float | None]]:
    """Returns for each parameter whether it is trainable, whether it has a gradient, and its learning rate (None if that
    may be on a device)."""
    rates = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        rates += [rate if isinstance(rate, float) else None] * len(group["params"])
    return [
        (parameter.requires_grad, parameter.grad is not None, rate)
        for parameter, rate in zip(parameters_of(optimizer), rates, strict=True)
    ]


def _tables_in(model: Any) -> frozenset[int]:
    """Returns the ids of the weights of which a step moves only some rows."""
    nn = sys.modules["torch"].nn
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return frozenset(id(module.weight) for module in model.modules() if isinstance(module, kinds))
