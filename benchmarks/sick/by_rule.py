"""What each rule said of the programs: how often it named what it should, and how often it was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sick.batches import Program
from sick.results import Kept

__all__ = ["OfPrograms", "by_rule", "plain"]


@dataclass(slots=True)
class OfPrograms:
    """should: the sick programs that expect this rule before others; named: those of them that it named, in each newest
    run. also: the programs that it named where another rule was expected first, and it was allowed. false: those in which
    it raised an alert that nothing explains; healthy_false: the healthy ones of them, of healthy in all."""

    healthy: int
    should: int = 0
    named: int = 0
    also: int = 0
    false: int = 0
    healthy_false: int = 0

    @property
    def right(self) -> int:
        return self.named + self.also


def by_rule(programs: Sequence[Program], kept: Kept) -> dict[str, OfPrograms]:
    """Of the rules that some program expects, or that raised a false alarm; by the newest runs of the measured programs."""
    measured = [(one, kept[one.key]["newest"]["runs"]) for one in programs if one.key in kept]
    healthy = sum(one.expected.healthy for one, _ in measured)
    found: dict[str, OfPrograms] = {}
    for program, runs in measured:
        is_healthy = program.expected.healthy
        for place, rule in enumerate(() if is_healthy else program.expected.accept):
            of = found.setdefault(rule, OfPrograms(healthy))
            is_named = all(rule in run["named"] for run in runs)
            of.should += place == 0
            of.named += place == 0 and is_named
            of.also += place > 0 and is_named
        for rule in {rule for run in runs for rule in run["false"]}:
            of = found.setdefault(rule, OfPrograms(healthy))
            of.false += 1
            of.healthy_false += is_healthy
    found.pop("healthy", None)
    return found


def plain(of: OfPrograms) -> Mapping[str, Any]:
    """As measured.json of the rules keeps it."""
    return {
        "should": of.should, "named": of.named, "right": of.right, "false": of.false, "healthy": of.healthy,
        "healthy_false": of.healthy_false,
    }  # fmt: skip
