"""Counters of devices that go up from whenever the driver was loaded, or from the device's first day: only what they gain
during the run is about the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from perfagent.wire import Finding, Severity
from perfagent_server.rules.rule import Question, Rule
from perfagent_server.rules.window import Window

__all__ = ["CounterRule", "Trouble", "follow_gains"]


class Trouble(NamedTuple):
    """figures: of its sentence, with its kind."""

    severity: Severity
    cause: str
    ranks: list[int]
    figures: dict[str, Any]


class CounterRule(Rule):
    """What the rules on counters of devices share."""

    question = Question.DOES_IT_MOVE
    needs_card = True

    def worst(
        self, window: Window, found: list[Trouble], since_step: int, gains: dict[str, dict[int, float]], **evidence: Any
    ) -> Finding | None:
        """The worst of what was found, the first of those as bad, with all of it as evidence."""
        if not found:
            return None
        worst = max(found, key=lambda one: self.severities.index(one.severity))
        several = window.world_size > 1
        return self.found(
            worst.severity,
            cause=worst.cause,
            since_step=since_step,
            ranks=sorted({rank for one in found for rank in one.ranks}),
            evidence={
                "troubles": [{**one.figures, "on": one.ranks if several else []} for one in found],
                "world_size": window.world_size, **evidence,
                "gained": {name: {str(rank): gain for rank, gain in of.items()} for name, of in gains.items()},
            },
        )  # fmt: skip


def follow_gains(window: Window, state: dict[str, Any], names: Iterable[str]) -> dict[str, dict[int, float]]:
    """What each counter has gained on which ranks since this attempt was first seen; only those that gained. state: a
    rule's own, {} at first. A counter that went back (the driver was loaded anew) begins anew."""
    last: dict[str, dict[str, float]] = state.setdefault("last", {})
    gained: dict[str, dict[str, float]] = state.setdefault("gained", {})
    for name in names:
        known = last.setdefault(name, {})
        for rank, value in window.readings(name).newest_by_rank().items():
            before = known.get(str(rank), value)
            if value > before:
                of_ranks = gained.setdefault(name, {})
                of_ranks[str(rank)] = of_ranks.get(str(rank), 0.0) + value - before
            known[str(rank)] = value
    return {name: {int(rank): gain for rank, gain in of_ranks.items()} for name, of_ranks in gained.items()}
