"""What each rank works itself: ranks that wait for each other all have steps of the same length."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

from perfagent.wire import RankMatrix

__all__ = ["OWN_WORK", "own_work"]

OWN_WORK = "own_work_s"
"""The name of this matrix. No rank sends such a series."""


def own_work(read: Callable[[str], RankMatrix]) -> RankMatrix:
    """The step time less what a rank waited for others in it (phase/comm_s). read: gives the matrix of a series."""
    whole, waited = read("step_time_s"), read("phase/comm_s")
    ends = [*whole.step[1:], math.inf]
    # the buckets of the two begin where their series do: the last that begins before the next one of the step
    places = [bisect_left(waited.step, end) - 1 for end in ends]
    waits = dict(zip(waited.ranks, waited.mean, strict=True))
    mean = [
        [
            _less(took, waits[rank][place] if rank in waits and place >= 0 else 0.0)
            for took, place in zip(row, places, strict=True)
        ]
        for rank, row in zip(whole.ranks, whole.mean, strict=True)
    ]
    return RankMatrix(name=OWN_WORK, unit="s", ranks=whole.ranks, step=whole.step, mean=mean)


def _less(took: float, waited: float) -> float:
    """A wait that was not told is none."""
    return took if math.isnan(took) or math.isnan(waited) else max(0.0, took - waited)
