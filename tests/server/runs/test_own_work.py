"""What each rank works itself, from its step time and its wait for others."""

from __future__ import annotations

import math

from perfagent.wire import RankMatrix
from perfagent_server.runs.own_work import own_work


def test_own_work_is_the_step_without_the_wait_for_others() -> None:
    """Rank 1 waits in some steps only, rank 2 never told of any, and no rank told of step 9. Step times begin at step 2."""
    took = RankMatrix(
        name="step_time_s",
        unit="s",
        ranks=[0, 1, 2],
        step=[2, 5, 9],
        mean=[[3.0, 3.0, math.nan]] * 2 + [[3.0, 4.0, 3.0]],
    )
    waited = RankMatrix(name="phase/comm_s", unit="s", ranks=[0, 1], step=[1, 5], mean=[[2.0, 4.0], [math.nan, 1.0]])
    found = own_work({"step_time_s": took, "phase/comm_s": waited}.__getitem__)
    assert (found.name, found.ranks, found.step) == ("own_work_s", [0, 1, 2], [2, 5, 9])
    assert [row[:2] for row in found.mean] == [[1.0, 0.0], [3.0, 2.0], [3.0, 4.0]]
    assert [math.isnan(row[2]) for row in found.mean] == [True, True, False]
