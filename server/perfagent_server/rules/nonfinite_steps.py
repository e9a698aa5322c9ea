"""Steps in which a value was NaN or infinite: noted the moment they arrive, without waiting for other ranks."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perfagent.wire import LOSS, loss_kind

__all__ = ["GRADIENTS", "Kind", "NonfiniteStep", "NonfiniteSteps"]

Kind = Literal["loss", "gradient"]
GRADIENTS = ("grad/norm", "grad/nonfinite", "grad/local_square_sum")

_MOST_JUDGED = 64  # of the non-finite steps of a frame the newest are judged, and of each unbroken row its first
_MOST_BEGINNINGS = 256
_ROW_BEGIN = 24  # steps: more than what a GradScaler may skip, or a part of a loss may miss, before it is a fault
_KEPT = 256  # steps that are remembered: other ranks send the same ones some frames later


@dataclass(slots=True)
class NonfiniteStep:
    """time: when it was noted, server clock; value: the first one seen, or that of `loss`; ranks: whose it was; series:
    of losses their names."""

    step: int
    time: float
    value: float
    ranks: list[int]
    series: list[str] = field(default_factory=list)

    @property
    def leading(self) -> str:
        """The series to name: `loss`, else a whole loss, else a part of one."""
        if not self.series or LOSS in self.series:
            return LOSS
        return next((name for name in self.series if loss_kind(name) == "whole"), self.series[0])


class NonfiniteSteps:
    """Of losses, or of gradients. fresh: steps that are still to be judged."""

    __slots__ = ("fresh", "steps")

    def __init__(self) -> None:
        self.steps: list[NonfiniteStep] = []
        self.fresh: list[int] = []

    def forget_old(self) -> None:
        """Keeps the newest; called when they have been judged."""
        del self.steps[:-_KEPT]

    def at(self, step: int) -> NonfiniteStep | None:
        for entry in reversed(self.steps):
            if entry.step == step:
                return entry
            if entry.step < step:
                return None
        return None

    def note(self, name: str, rank: int, steps: Sequence[int], values: Sequence[float], now: float) -> None:
        """Takes the column of a series."""
        bad = _bad_places(name, values)
        if not bad:
            return
        by_step = {entry.step: entry for entry in self.steps}
        for place in _to_judge(bad):
            step, value = steps[place], math.nan if name == "grad/nonfinite" else values[place]
            entry = by_step.get(step)
            if entry is None:
                by_step[step] = NonfiniteStep(step, now, value, [rank], [] if name in GRADIENTS else [name])
                self.steps.append(by_step[step])
                self.fresh.append(step)
            elif self._add(entry, name, rank, value):
                self.fresh.append(step)
        self.steps.sort(key=lambda entry: entry.step)

    @staticmethod
    def _add(entry: NonfiniteStep, name: str, rank: int, value: float) -> bool:
        """Adds a rank or a series to a step that is known; whether it is to be judged again."""
        again = rank not in entry.ranks
        if again:
            insort(entry.ranks, rank)
        if name not in GRADIENTS and name not in (entry.series or [LOSS]):
            entry.series.append(name)
            entry.value = value if name == LOSS else entry.value
            again = True
        return again

    def snapshot(self) -> list[Any]:
        return [[[one.step, one.time, one.value, one.ranks, one.series] for one in self.steps], self.fresh]

    def restore(self, state: Sequence[Any]) -> None:
        steps, self.fresh = state
        self.steps = [NonfiniteStep(*entry) for entry in steps]


def _bad_places(name: str, values: Sequence[float]) -> list[int]:
    total = sum(values)
    if name == "grad/nonfinite":
        return [] if total == 0 else [place for place, value in enumerate(values) if value != 0]
    return [] if math.isfinite(total) else [place for place, value in enumerate(values) if not math.isfinite(value)]


def _to_judge(bad: Sequence[int]) -> Sequence[int]:
    """Of the places of bad values in a frame those to judge: a fault begins where an unbroken row of them does, and the
    newest say how it is now. What lies between, in a frame of thousands of them, says no more."""
    if len(bad) <= _MOST_JUDGED:
        return bad
    beginnings: list[int] = []
    row = 0
    for before, place in itertools.pairwise([-2, *bad]):
        row = row + 1 if place == before + 1 else 1
        if row <= _ROW_BEGIN:
            beginnings.append(place)
    return sorted({*beginnings[:_MOST_BEGINNINGS], *bad[-_MOST_JUDGED:]})
