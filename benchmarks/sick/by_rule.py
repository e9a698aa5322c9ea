"""How often each rule named the sick programs that expect it, and how often it raised a false alarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sick.batches import Program
from sick.results import Kept

__all__ = ["OfPrograms", "by_rule"]


@dataclass(slots=True)
class OfPrograms:
    """should: sick programs that expect this rule first; named: those of them that it named in each of the newest runs;
    false: programs in which it raised a false alarm, healthy_false of them healthy; healthy: all healthy programs."""

    healthy: int
    should: int = 0
    named: int = 0
    false: int = 0
    healthy_false: int = 0


def by_rule(programs: Sequence[Program], kept: Kept) -> dict[str, OfPrograms]:
    """Of the rules that some program expects first, or that raised a false alarm; from the newest runs of each program."""
    measured = [(one, kept[one.key]["newest"]["runs"]) for one in programs if one.key in kept]
    healthy = sum(one.expected.healthy for one, _ in measured)
    found: dict[str, OfPrograms] = {}
    for program, runs in measured:
        is_healthy = program.expected.healthy
        if not is_healthy:
            rule = next(iter(program.expected.accept))
            of = found.setdefault(rule, OfPrograms(healthy))
            of.should += 1
            of.named += all(rule in run["named"] for run in runs)
        for rule in {rule for run in runs for rule in run["false"]}:
            of = found.setdefault(rule, OfPrograms(healthy))
            of.false += 1
            of.healthy_false += is_healthy
    found.pop("healthy", None)
    return found
