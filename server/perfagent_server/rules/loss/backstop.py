"""A loss that is many times its best, and stays there: told whatever the schedule, the noise and the shape of its curve."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

__all__ = ["Lost", "follow", "fresh"]

_BLOCK = 25  # values, whose mean counts
_LEARNED, _OF_THE_FALL = 0.5, 0.05
"""The loss must have come down to this part of its first values, and be above its best by this part of that fall: next to zero
ten times as much is nothing."""
_BEYOND_ALL = 10_000.0
"""A loss that never fell is lost at so many times its best. The temporal-difference loss of a DQN grows with the rewards, but
stays far below that."""
_STAYS = 0.9
_RAISED = 1.25
"""A learning rate that is so many times the rate at the best loss, as after a warm restart, may raise the loss for a while.
Then five times the evidence is needed, and the loss must now be `times` its best."""
_MAY_RISE = 10.0
"""How many times higher a loss other than a cross entropy must be: a temporal-difference loss grows with the rewards."""


class Lost(NamedTuple):
    """level: of the newest block; best: the lowest block, which ended with the value at `step`."""

    level: float
    best: float
    step: int


def fresh() -> dict[str, Any]:
    """best: [mean, step, learning rate] of the lowest block; part: [count, sum] of the next one; since then, highest: the
    highest block; excess: how far blocks were above twice the best, as a sum of logarithms."""
    return {"first": None, "best": None, "part": [0, 0.0], "level": 0.0, "highest": 0.0, "excess": 0.0}


def follow(
    state: dict[str, Any], value: float, step: int, lr: float | None, times: float, *, must_fall: bool
) -> Lost | None:
    """Takes the loss and the learning rate of a step. What is told is evidence that adds up: two blocks at `times` the best,
    or more that are lower."""
    part = state["part"]
    part[0] += 1
    part[1] += value
    if part[0] == _BLOCK:
        mean, state["part"] = part[1] / _BLOCK, [0, 0.0]
        if state["best"] is None:
            state["first"] = mean
        if state["best"] is None or mean < state["best"][0]:
            state.update(best=[mean, step, lr], highest=0.0, excess=0.0)
        elif state["best"][0] > 0:
            above = math.log(mean / state["best"][0] / (2.0 if must_fall else 2.0 * _MAY_RISE))
            state.update(excess=max(0.0, state["excess"] + above), highest=max(mean, state["highest"]))
        state["level"] = mean
    if not state["excess"]:
        return None
    (best, at, rate), first, level = state["best"], state["first"], state["level"]
    is_raised = lr is not None and rate is not None and lr > _RAISED * rate
    needed = 2 * math.log(times / 2) * (5 if is_raised or not must_fall else 1)
    has_learned = best <= _LEARNED * first and level - best >= _OF_THE_FALL * (first - best)
    is_lost = (has_learned or level >= _BEYOND_ALL * best) and state["excess"] >= needed
    is_lost = is_lost and (not is_raised or level >= times * best)
    return Lost(level, best, at) if is_lost and level >= _STAYS * state["highest"] else None
