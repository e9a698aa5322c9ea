"""A series that rises little by little since the run began: each time the run is twice as long, it is higher again.

What a jump detector compares (the newest values with those just before) hardly differs then.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from perfagent_server.rules.speed.level_shift import middle

__all__ = ["FRESH", "drift", "follow"]

FRESH: dict[str, Any] = {"count": 0, "newest": [], "marks": [], "from": None}
"""Plain values that a rule keeps. newest: the newest values; marks: [step, level] when there were 16, 32, 64 ... of
them; from: the mark from which it rises."""

_NEWEST = 16
_MARKS = 4
_RISES_TIMES, _TIMES = 1.15, 1.5
"""From mark to mark, and over all marks in question."""
_OVER_TIMES = 1.25
_LOOKED_EVERY = 16


def follow(state: dict[str, Any], step: int, value: float) -> bool:
    """Takes a value. Whether it is time to look."""
    newest = state["newest"]
    newest.append(value)
    del newest[:-_NEWEST]
    state["count"] += 1
    if state["count"] == _NEWEST * 2 ** len(state["marks"]):
        state["marks"].append([step, middle(newest)])
        return True
    return state["from"] is not None and state["count"] % _LOOKED_EVERY == 0


def drift(state: dict[str, Any]) -> tuple[int, float, float] | None:
    """Of the values up to now: what rises, until it has come down again. The step at which the level was last as it was
    before, that level, and the present one."""
    if len(state["newest"]) < _NEWEST:
        return None
    level = middle(state["newest"])
    if state["from"] is None:
        marks = state["marks"][-_MARKS:]
        rises = all(after[1] >= _RISES_TIMES * before[1] > 0 for before, after in pairwise(marks))
        if len(marks) < _MARKS or not rises or level < _TIMES * marks[0][1]:
            return None
        state["from"] = marks[0]
    step, before = state["from"]
    if level < _OVER_TIMES * before:
        state["from"] = None
        return None
    return step, before, level
