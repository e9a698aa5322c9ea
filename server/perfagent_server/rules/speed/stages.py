"""Which ranks of a run do the same work: those of one stage of a pipeline. Only they can be compared with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perfagent.wire import LOSS
from perfagent_server.rules.row_series import Floats
from perfagent_server.rules.speed.own_work import lower_median
from perfagent_server.rules.window import Window

__all__ = ["Stages", "stages_of"]

_APART_TIMES = 1.15
_MOST_STEPS = 0.75
_MOST_REST = 0.25
"""Of the distance between the slowest and the fastest stage, how far a typical rank may be from its own stage."""


@dataclass(frozen=True, slots=True)
class Stages:
    """of: the stages in their order, each with the places of its ranks; known: how: the ranks said so, only those of the
    last stage have a loss, or from their own work alone."""

    of: tuple[tuple[int, ...], ...]
    known: Literal["told", "by the loss", "by their work"]

    def by_step(self, own: Floats) -> Floats:
        """The own work of a typical rank of each stage in each step. own: float64 (ranks, steps) -> (stages, steps)."""
        return np.array([lower_median(own[list(stage)], axis=0) for stage in self.of])

    def typical(self, own: Floats) -> Floats:
        """Of each stage, float64 (stages,). What falls on other ranks from step to step is no property of a stage."""
        return lower_median(self.by_step(own), axis=1)

    def peers(self, own: Floats) -> Floats:
        """For each rank the own work of a typical rank of its stage; NaN where a stage has one rank. float64 (ranks,)."""
        found = np.full(len(own), np.nan)
        for stage, typical in zip(self.of, self.typical(own), strict=True):
            if len(stage) > 1:
                found[list(stage)] = typical
        return found


def stages_of(window: Window, ranks: Sequence[int], own: Floats) -> Stages | None:
    """The stages of these ranks; None where all do the same work. own: seconds of own work, float64 (ranks, steps)."""
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
    """Whether ranks differ by stage, in most steps, and hardly within a stage."""
    typical, of_rank = stages.typical(own), lower_median(own, axis=1)
    slowest, fastest = int(typical.argmax()), int(typical.argmin())
    apart = typical[slowest] - typical[fastest]
    if not typical[fastest] > 0 or apart < (_APART_TIMES - 1) * typical[fastest]:
        return False
    rest = np.concatenate(
        [np.abs(of_rank[list(stage)] - level) for stage, level in zip(stages.of, typical, strict=True)]
    )
    by_step = stages.by_step(own)
    often = np.mean(by_step[slowest] - by_step[fastest] > 0.5 * apart)
    slow, fast = (np.sort(of_rank[list(stages.of[place])]) for place in (slowest, fastest))
    # of both stages nearly all ranks: all but a tenth
    are_apart = slow[len(slow) // 10] > fast[-1 - len(fast) // 10]
    return bool(np.median(rest) <= _MOST_REST * apart and often >= _MOST_STEPS and are_apart)
