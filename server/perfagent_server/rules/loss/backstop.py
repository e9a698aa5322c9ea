"""A loss that is many times its best, and stays there: told whatever the schedule, the noise and the shape of its curve."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Lost", "follow", "fresh"]

_BLOCK = 25  # values, whose mean counts
_KEPT = 8  # blocks
_LEARNED, _OF_THE_FALL = 0.5, 0.05
"""The loss must have come down to this part of its first values, and be above its best by this part of that fall: next to zero
ten times as much is nothing."""
_STAYS = 0.9
_TIMES, _TIMES_IF_RAISED = {2: 10.0, 4: 3.0}, {8: 10.0}
"""Blocks -> for so many in a row, and now no lower, the loss is that many times its best. A learning rate that was raised since,
as by a warm restart, may lift the loss for a while."""
_RAISED = 1.25  # of the learning rate at the best


class Lost(NamedTuple):
    """level: of the newest block; best: the lowest block, which ended with the value at `step`."""

    level: float
    best: float
    step: int
    first: float


def fresh() -> dict[str, Any]:
    """best: [mean, step, learning rate] of the lowest block; part: [count, sum] of the next one; above: means since then."""
    return {"first": None, "best": None, "part": [0, 0.0], "above": []}


def follow(state: dict[str, Any], value: float, step: int, lr: float | None) -> Lost | None:
    """Takes the loss and the learning rate of a step."""
    part = state["part"]
    part[0] += 1
    part[1] += value
    if part[0] == _BLOCK:
        mean, state["part"] = part[1] / _BLOCK, [0, 0.0]
        if state["first"] is None:
            state["first"] = mean
        if state["best"] is None or mean < state["best"][0]:
            state.update(best=[mean, step, lr], above=[])
        else:
            state["above"] = [*state["above"], mean][-_KEPT:]
    if state["best"] is None or not state["above"]:
        return None
    best, at, rate = state["best"]
    is_raised = lr is not None and rate is not None and lr > _RAISED * rate
    first, above = state["first"], state["above"]
    is_enough = above[-1] - best >= _OF_THE_FALL * (first - best)
    if not 0 < best <= _LEARNED * first or not is_enough:
        return None
    for blocks, least in (_TIMES_IF_RAISED if is_raised else _TIMES).items():
        newest = above[-blocks:]
        if len(newest) == blocks and min(newest) >= least * best and newest[-1] >= _STAYS * max(newest):
            return Lost(newest[-1], best, at, first)
    return None
