"""Which ranks of a run do the same work: those of one stage of a pipeline. Only they can be compared with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perfagent.wire import LOSS
from perfagent_server.rules.row_series import Floats
from perfagent_server.rules.window import Window

__all__ = ["Stages", "stages_of"]

_APART_TIMES = 1.15
_MOST_REST = 0.25
"""Of the distance between the slowest and the fastest stage, how far a typical rank may be from its own stage."""


@dataclass(frozen=True, slots=True)
class Stages:
    """of: the stages in their order, each with the places of its ranks; known: how: the ranks said so, only those of the
    last stage have a loss, or from their own work alone."""

    of: tuple[tuple[int, ...], ...]
    known: Literal["told", "by the loss", "by their work"]

    def typical(self, own: Floats) -> Floats:
        """The own work of a typical rank of each stage: the lower median. float64 (stages,)."""
        return np.array([np.sort(own[list(stage)])[(len(stage) - 1) // 2] for stage in self.of])

    def peers(self, own: Floats) -> Floats:
        """For each rank the own work of a typical rank of its stage; NaN where a stage has one rank. float64 (ranks,)."""
        found = np.full(len(own), np.nan)
        for stage, typical in zip(self.of, self.typical(own), strict=True):
            if len(stage) > 1:
                found[list(stage)] = typical
        return found


def stages_of(window: Window, ranks: Sequence[int], own: Floats) -> Stages | None:
    """The stages of these ranks, whose own work takes `own` seconds a step; None where all do the same work."""
    told = {place: window.stages[rank] for place, rank in enumerate(ranks) if rank in window.stages}
    if len(told) == len(ranks):
        names = sorted({*told.values()})
        groups = tuple(tuple(place for place in told if told[place] == name) for name in names)
        return Stages(groups, "told") if len(groups) > 1 else None
    last = _last_stage(window, ranks)
    if last:
        return Stages(tuple(_blocks(len(ranks), last)), "by the loss")
    found = next((one for one in _divisions(len(ranks)) if _fits(Stages(one, "by their work"), own)), None)
    return None if found is None else Stages(found, "by their work")


def _last_stage(window: Window, ranks: Sequence[int]) -> int:
    """How many ranks the last stage has, where only the last ones have a loss: the others pass gradients on. 0 where it
    is not so."""
    series = window.by_step.get(LOSS)
    having = [place for place, rank in enumerate(ranks) if series is not None and rank in series.ranks]
    size = len(having)
    is_last = having == [*range(len(ranks) - size, len(ranks))]
    return size if 0 < size < len(ranks) and is_last and len(ranks) % size == 0 else 0


def _divisions(ranks: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ways to make stages of two ranks or more of as many ranks in a row, as launchers place them: few stages first."""
    for count in range(2, ranks // 2 + 1):
        if ranks % count == 0:
            yield tuple(_blocks(ranks, ranks // count))


def _blocks(ranks: int, size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(range(first, first + size)) for first in range(0, ranks, size))


def _fits(stages: Stages, own: Floats) -> bool:
    """Whether ranks differ by stage, and hardly within a stage."""
    typical = stages.typical(own)
    if not typical.min() > 0 or typical.max() < _APART_TIMES * typical.min():
        return False
    rest = np.concatenate([np.abs(own[list(stage)] - level) for stage, level in zip(stages.of, typical, strict=True)])
    return bool(
        np.median(rest) <= _MOST_REST * (typical.max() - typical.min()) and _is_told_apart(stages, own, typical)
    )


def _is_told_apart(stages: Stages, own: Floats, typical: Floats) -> bool:
    """Whether nearly all ranks of the slowest stage are slower than nearly all of the fastest: of both all but a tenth,
    or all."""
    slow, fast = (np.sort(own[list(stages.of[place])]) for place in (int(typical.argmax()), int(typical.argmin())))
    return bool(slow[len(slow) // 10] > fast[-1 - len(fast) // 10])
