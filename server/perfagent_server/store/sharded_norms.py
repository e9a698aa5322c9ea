"""Puts a value together of which every rank knows a part only: the norm of sharded gradients, from the square sums that
ranks send.

The value is the root of the sum of the parts over all ranks of an attempt. A step that some rank has not sent is left
out: part of a norm is no norm. A part that is NaN or infinite makes the value so, whatever the other ranks say. Where a
cell is wider than a step, its mean is the root of the mean square, and its minimum and maximum are bounds.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from perfagent_server.store.codec.aggregates import Cells
from perfagent_server.store.read.step_columns import StepColumns

__all__ = ["root_of_sums"]


def root_of_sums(ranks: Iterable[Cells], expected: int) -> Cells:
    """One row of cells out of those of the ranks of one attempt, of which it keeps none. expected: how many ranks send
    this series in it."""
    columns = StepColumns(
        present=0, finite_ranks=0, low=0.0, high=0.0, mean=0.0, count=0, nonfinite=0, time=np.inf
    )  # fmt: skip
    for cells in ranks:
        at = columns.places(cells.step)
        finite = cells.count > cells.nonfinite
        columns["present"][at] += 1
        columns["finite_ranks"][at] += finite
        columns["low"][at] += np.where(finite, cells.min, 0.0)
        columns["high"][at] += np.where(finite, cells.max, 0.0)
        columns["mean"][at] += np.where(finite, cells.mean, 0.0)
        columns["count"][at] = np.maximum(columns["count"][at], cells.count)
        columns["nonfinite"][at] = np.maximum(columns["nonfinite"][at], cells.nonfinite)
        columns["time"][at] = np.minimum(columns["time"][at], cells.time)
    whole = columns["finite_ranks"] >= expected  # every rank has a finite part
    present, nonfinite = columns["present"], columns["nonfinite"]
    count = np.where(whole, columns["count"], nonfinite)
    finite_count = count - nonfinite
    whole &= finite_count > 0
    low = np.where(whole, np.sqrt(columns["low"]), np.inf)
    high = np.where(whole, np.sqrt(columns["high"]), -np.inf)
    total = np.where(whole, np.sqrt(columns["mean"]) * finite_count, 0.0)
    found = Cells(columns.step, low, high, total, count, nonfinite, columns["time"])
    return found.take((present >= expected) | (nonfinite > 0))
