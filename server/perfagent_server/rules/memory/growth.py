"""How a level (memory in use, space used on a disk) went over time, and whether it rises without end.

A track keeps little of a long time: points are seconds apart at first and ever further with age, each the lowest level
of its interval. What comes and goes (an evaluation's memory, a save's buffers) is in no lowest level; what stays is.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

__all__ = ["Growth", "Track"]

_FINENESS = 16  # a point stands for at most this part of its age
_THINNED_EVERY = 32  # points
_BLOCKS = 6
_HALF_WAY = (0.1, 0.95)
_LONG_S = 300.0
"""Of a long rise, half-way: what jumped is at its end or still at its beginning. Most that is no leak jumped, and a look at
blocks costs ten times as much."""
_POINT = struct.Struct("<ddq")  # time, level, step
_Point = tuple[float, float, int]
_NEXT_START = 1.12  # stretches that are looked at differ by this in length


class Growth(NamedTuple):
    """A steady rise up to now. since: Unix seconds, server clock; first, now: the level, in bytes."""

    since: float
    since_step: int
    lasted_s: float
    steps: int
    first: float
    now: float

    @property
    def grown(self) -> float:
        return self.now - self.first

    @property
    def per_s(self) -> float:
        return self.grown / self.lasted_s


class Track:
    """Reads and writes a rule's state: {} at first, plain values for MessagePack. A track that has not risen by far is
    not unpacked."""

    __slots__ = ("_state",)

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    @property
    def level(self) -> float:
        """The newest."""
        level: float = self._state["level"]
        return level

    def add(self, time: float, step: int, level: float, *, parts: int = 1) -> None:
        """time: server clock. parts: how many readings the level is the sum of; with another number it is no longer the
        same level, and the track begins anew."""
        state = self._state
        if state.get("parts") != parts:
            state.clear()
            state.update(parts=parts, low=level, time=-math.inf, points=b"", added=0)
        if time <= state["time"]:
            return
        state.update(time=time, level=level, low=min(level, state["low"]), added=state["added"] + 1)
        state["points"] += _POINT.pack(time, level, step)
        if state["added"] % _THINNED_EVERY == 0:
            state["points"] = b"".join(_POINT.pack(*point) for point in _thinned(self._points()))

    def first(self) -> float:
        """The oldest level."""
        level: float = _POINT.unpack_from(self._state["points"])[1]
        return level

    def at(self, time: float) -> float | None:
        """The level at a time; None before the first point."""
        before = [level for at, level, _ in self._points() if at <= time]
        return before[-1] if before else None

    def _points(self) -> list[_Point]:
        """Times, levels and steps, oldest first."""
        return list(_POINT.iter_unpack(self._state["points"]))

    def rise(
        self,
        least: float,
        *,
        settle_s: float,
        settle_steps: int = 0,
        steady_share: float = 0.4,
        lasting_share: float = 0.9,
        blocks: int = _BLOCKS,
    ) -> Growth | None:
        """The longest steady rise up to now that had added `least` settle_s ago and settle_steps ago.

        Steady: of as many blocks of equal length, the lowest level of each is above that of the block before by
        steady_share of the mean rise, and so is the end of the last above its lowest. Lasting: the last third rises by
        lasting_share of what the first third does; what fills up rises less and less. With settle_steps, length may be
        counted in steps as well: what each step adds, an evaluation between them does not.
        """
        if self.level - self._state["low"] < least:
            return None
        times, levels, steps = zip(*self._points(), strict=True)
        settled = bisect_right(steps, steps[-1] - settle_steps) - 1 if settle_steps else len(times) - 1
        if settled < 0:
            return None
        now, longest = times[-1], math.inf
        settle_s = max(settle_s, now - times[settled])
        for start, time in enumerate(times):
            span = now - time
            if span <= settle_s:
                break
            if span > longest:
                continue
            longest = span / _NEXT_START
            grown = levels[-1] - levels[start]
            if grown < least:
                continue
            half = levels[bisect_left(times, time + span / 2)] - levels[start]
            if span > _LONG_S and not _HALF_WAY[0] * grown < half < _HALF_WAY[1] * grown:
                continue
            risen = _risen(steps, levels, start, blocks, steady_share, lasting_share) if settle_steps else 0.0
            risen = risen or _risen(times, levels, start, blocks, steady_share, lasting_share)
            if risen * (1 - settle_s / span) >= least:
                return Growth(time, steps[start], span, steps[-1] - steps[start], levels[start], levels[-1])
        return None


def _risen(
    axis: Sequence[float], levels: Sequence[float], start: int, blocks: int, steady_share: float, lasting_share: float
) -> float:
    """By how much from this point on; 0 if that is no steady and lasting rise. axis: times or steps."""
    begin, length = axis[start], (axis[-1] - axis[start]) / blocks
    lowest, last, place = [], start, start
    for block in range(1, blocks + 1):
        end = bisect_left(axis, begin + block * length, place) if block < blocks else len(axis)
        if end == place:
            return 0.0
        lowest.append(min(levels[place:end]))
        if len(lowest) > 1 and lowest[-1] <= lowest[-2]:
            return 0.0
        last, place = place, end
    newest = max(levels[(last + len(levels)) // 2 :])
    rises = [after - before for before, after in pairwise(lowest)]
    mean = math.fsum(rises) / len(rises)
    third = max(1, round(len(rises) / 3))
    if min(*rises, newest - lowest[-1]) < steady_share * mean or sum(rises[-third:]) < lasting_share * sum(
        rises[:third]
    ):
        return 0.0
    return mean * blocks


def _thinned(points: Sequence[_Point]) -> list[_Point]:
    kept: list[_Point] = []
    now = points[-1][0]
    for time, level, step in points:
        if kept and time - kept[-1][0] < (now - time) / _FINENESS:
            kept[-1] = (kept[-1][0], min(kept[-1][1], level), kept[-1][2])
        else:
            kept.append((time, level, step))
    return kept
