"""The own work of each rank in each step: the step without its wait for others; and what is typical of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfagent.wire import LOSS
from perfagent_server.rules.row_series import Floats
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["PHASES", "READS", "OwnWork", "OwnWorkRule", "lower_median", "rank_medians", "slowest_phase"]

_TOTAL, _WAITED = "step_time_s", "phase/comm_s"
PHASES = ("data", "h2d", "forward", "backward", "optimizer", "other")
"""Of a rank's own work."""
_KEPT = 128  # steps; of small models, frames of one rank may be a hundred steps ahead of another's
READS = (
    Series(_TOTAL, merge="median"),
    Series(_TOTAL, keep=_KEPT, ranks="apart"),
    Series(_WAITED, ranks="apart"),
    *(Series(f"phase/{phase}_s", ranks="apart") for phase in PHASES),
    Series(LOSS),
)
"""What a rule must read for its own work, and for the stages of ranks (stages.py)."""


@dataclass(frozen=True, slots=True)
class OwnWork:
    """ranks: that have told at least half of the steps; own: float64 (ranks, steps); total: how long the steps took, ranks
    put together, float64 (steps,)."""

    ranks: list[int]
    own: Floats
    total: Floats

    @property
    def steps(self) -> int:
        return len(self.total)

    @property
    def typical(self) -> Floats:
        """Of each rank: the median over the steps, float64 (ranks,)."""
        return lower_median(self.own, axis=1)


class OwnWorkRule(Rule):
    """What the rules on ranks that wait for each other share. steps, least_steps: how many are looked at."""

    steps: int
    least_steps: int
    question = Question.IS_IT_FAST
    reads = (Every(3.0), *READS)
    life = Life(for_s=6.0, clear_s=15.0, restated=True)
    charts = (_WAITED, _TOTAL)
    profile_helps = True

    def own_work(self, window: Window) -> OwnWork | Unknown | None:
        """None where no rank waits for another, or too early; UNKNOWN where too few steps are told."""
        took = window.series(_TOTAL)
        if window.world_size < 2 or took is None or took.total < self.least_steps:
            return None
        found = _own_work(window, self.steps) if len(window.by_rank) >= self.least_steps else None
        return UNKNOWN if found is None else found


def _own_work(window: Window, steps: int) -> OwnWork | None:
    """Of the steps up to window.at that all ranks have told, the newest `steps` in which nothing else happened than
    training; None where that are fewer than a quarter, or fewer than two ranks. Frames of one rank may be seconds
    ahead of another's."""
    ranks, at, total = window.by_rank.matrix(_TOTAL, window.at)
    waited = window.by_rank.matrix(_WAITED, window.at)[2]
    own = np.maximum(total - waited, 0.0)
    known = np.flatnonzero(4 * np.count_nonzero(~np.isnan(own), axis=1) >= min(steps, own.shape[1]))
    interrupted = window.wall.interrupted
    steady = np.array([step not in interrupted for step in at], bool)
    told = np.flatnonzero(steady & ~np.isnan(own[known]).any(axis=0))[-steps:]
    if len(known) < 2 or 4 * len(told) < min(steps, own.shape[1]):
        return None
    return OwnWork([ranks[place] for place in known], own[known][:, told], np.median(total[known][:, told], axis=0))


def lower_median(values: Floats, axis: int) -> Floats:
    """Of an even number of values the lower of the two in the middle: half of the ranks may be slow."""
    ordered: Floats = np.sort(values, axis=axis)
    middle: Floats = np.take(ordered, (values.shape[axis] - 1) // 2, axis=axis)
    return middle


def rank_medians(window: Window, names: tuple[str, ...], steps: int) -> tuple[list[int], list[Floats]]:
    """The ranks that have all of these series, and for each series a median over the newest `steps` steps up to
    window.at: float64 (ranks,). A rank has a series if it reported it in at least half of those steps."""
    found: list[dict[int, float]] = []
    for name in names:
        ranks, columns, values = window.by_rank.matrix(name, window.at)
        found.append(_medians(ranks, values[:, -steps:], min(steps, len(columns))))
    common = sorted(set.intersection(*(set(one) for one in found)))
    return common, [np.array([one[rank] for rank in common]) for one in found]


def _medians(ranks: list[int], values: Floats, steps: int) -> dict[int, float]:
    if not values.size:
        return {}  # the steps of these ranks are older than all that are kept
    ordered = np.sort(values, axis=1)  # NaN, a step without a value, comes last
    counts = np.count_nonzero(~np.isnan(values), axis=1)
    places = np.maximum(counts - 1, 0) // 2
    middles = ordered[np.arange(len(ordered)), places]
    return {
        rank: float(middle)
        for rank, middle, count in zip(ranks, middles, counts, strict=True)
        if count and 2 * count >= steps
    }


def slowest_phase(window: Window, rank: int, steps: int) -> tuple[str, float]:
    """The phase in which a rank spends most more than a typical one, and how much more in seconds; "" if none does."""
    most: tuple[str, float] = ("", 0.0)
    for phase in PHASES:
        ranks, medians = rank_medians(window, (f"phase/{phase}_s",), steps)
        if rank in ranks:
            values = medians[0]
            more = float(values[ranks.index(rank)] - np.sort(values)[(len(values) - 1) // 2])
            most = max(most, (phase, more), key=lambda one: one[1])
    return most
