"""Puts a value together of which every rank knows a part only: the norm of sharded gradients, from the square sums that
ranks send.

The value is the root of the sum of the parts over all ranks of an attempt. A step that some rank has not sent is left
out: part of a norm is no norm. A part that is NaN or infinite makes the value so, whatever the other ranks say. Where a
cell is wider than a step, its mean is the root of the mean square, and its minimum and maximum are bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfagent_server.store.codec.aggregates import Cells, Ints, concatenate

__all__ = ["root_of_sums"]


def root_of_sums(ranks: Sequence[Cells], expected: int) -> Cells:
    """One row of cells out of those of the ranks of one attempt. expected: how many ranks send this series in it."""
    if not ranks:
        return concatenate([])
    steps: Ints = np.unique(np.concatenate([cells.step for cells in ranks]))
    present, finite_ranks = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    low, high, mean = np.zeros(len(steps)), np.zeros(len(steps)), np.zeros(len(steps))
    count, nonfinite = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    time = np.full(len(steps), np.inf)
    for cells in ranks:
        at = np.searchsorted(steps, cells.step)
        finite = cells.count > cells.nonfinite
        present[at] += 1
        finite_ranks[at] += finite
        low[at] += np.where(finite, cells.min, 0.0)
        high[at] += np.where(finite, cells.max, 0.0)
        mean[at] += np.where(finite, cells.mean, 0.0)
        count[at] = np.maximum(count[at], cells.count)
        nonfinite[at] = np.maximum(nonfinite[at], cells.nonfinite)
        time[at] = np.minimum(time[at], cells.time)
    whole = finite_ranks >= expected  # every rank has a finite part
    count = np.where(whole, count, nonfinite)
    finite_count = count - nonfinite
    whole &= finite_count > 0
    low, high = np.where(whole, np.sqrt(low), np.inf), np.where(whole, np.sqrt(high), -np.inf)
    total = np.where(whole, np.sqrt(mean) * finite_count, 0.0)
    return Cells(steps, low, high, total, count, nonfinite, time).take((present >= expected) | (nonfinite > 0))
