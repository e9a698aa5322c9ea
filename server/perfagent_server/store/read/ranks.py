"""Puts ranks together: one value of a run out of those of its ranks, as the catalogue says for a name."""

from __future__ import annotations

import numpy as np

from perfagent.wire import Latest, metric
from perfagent_server.store.codec.aggregates import Cells, Floats, Ints, concatenate

__all__ = ["latest_over_ranks", "over_ranks"]


def latest_over_ranks(name: str, found: dict[int, tuple[int, int, float, float]]) -> Latest:
    newest_attempt = max(attempt for attempt, _, _, _ in found.values())
    found = {rank: item for rank, item in found.items() if item[0] == newest_attempt}
    if len(found) == 1:
        rank, (_, step, time, value) = next(iter(found.items()))
        return Latest(value=value, step=step, time=time, rank=rank)
    values = np.array([value for _, _, _, value in found.values()])
    with np.errstate(all="ignore"):  # a NaN on any rank is the answer: this is what the run's figure must show
        combined = {"mean": values.mean(), "sum": values.sum(), "max": values.max(), "min": values.min()}
    value = float(combined[metric(name).over_ranks])
    return Latest(
        value=value,
        step=max(step for _, step, _, _ in found.values()),
        time=max(time for _, _, time, _ in found.values()),
        rank="all",
    )


def over_ranks(name: str, ranks: list[Cells]) -> tuple[Cells, Floats]:
    """One row of cells out of those of several ranks, as the catalogue says for this name.

    mean: the mean over all samples; sum: the ranks' means (minima, maxima) added up; max, min: the largest (smallest)
    of the ranks' means. Except for sums, minimum and maximum are those over all ranks. Answers the cells and their
    means.
    """
    if not ranks:
        return concatenate([]), np.empty(0)
    if len(ranks) == 1:
        return ranks[0], ranks[0].mean
    steps: Ints = np.unique(np.concatenate([cells.step for cells in ranks]))
    shape = (len(ranks), len(steps))
    low, high, total = np.full(shape, np.inf), np.full(shape, -np.inf), np.zeros(shape)
    count, nonfinite, time = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, np.inf)
    for row, cells in enumerate(ranks):
        at = np.searchsorted(steps, cells.step)
        low[row, at], high[row, at], total[row, at] = cells.min, cells.max, cells.sum
        count[row, at], nonfinite[row, at], time[row, at] = cells.count, cells.nonfinite, cells.time
    finite = count - nonfinite
    some = finite > 0
    all_finite = finite.sum(axis=0)
    how = metric(name).over_ranks
    with np.errstate(all="ignore"):
        sums = total.sum(axis=0)
        if how == "mean":
            mean: Floats = sums / np.maximum(all_finite, 1)
        else:
            rest = {"sum": 0.0, "max": -np.inf, "min": np.inf}[how]
            combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[how]
            mean = combine.reduce(np.where(some, total / np.maximum(finite, 1), rest), axis=0)
        if how == "sum":
            low, high = np.where(some, low, 0.0).sum(axis=0), np.where(some, high, 0.0).sum(axis=0)
            low, high = np.where(all_finite > 0, low, np.inf), np.where(all_finite > 0, high, -np.inf)
        else:
            low, high = low.min(axis=0), high.max(axis=0)
    cells = Cells(steps, low, high, sums, count.sum(axis=0), nonfinite.sum(axis=0), time.min(axis=0))
    return cells, np.where(all_finite > 0, mean, np.nan)
