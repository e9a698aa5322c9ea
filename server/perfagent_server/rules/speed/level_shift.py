"""A series that jumped to a higher level and stays there, told from its noise.

Measured on 78 research runs with the wall time of each step (314,314 steps): "median of the newest 20 above 1.05 times
the median of the 200 before" has no false alarm and finds a slowdown of 5.7 % after ten steps. Jobs on shared machines
are noisier: their thresholds grow with the noise of the steps before, and what has happened before is nothing new.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

__all__ = ["LevelShift", "Shift", "middle"]

_GROUP_S = 0.05
"""Where there are enough of them, shorter groups of steps are put together, two and two, until they are so long."""
_MARKED = 128  # groups whose end is known
_SINCE = 64  # groups that are kept of the new level
_TYPICAL_FOR = 20  # groups for which the level before is good enough for a first look
_LEAST_NOISE = 0.002  # clocks tick in milliseconds
_NOISE_OF_MEDIAN = 1.4826  # of the median deviation, for the standard deviation
_LEAST_EVIDENCE = math.log(1e7)  # that many to one against chance


@dataclass(frozen=True, slots=True)
class Shift:
    """A new level. times: of the level before; noise: standard deviation of the groups before, as a share of their
    level; step, time: when it began; groups: for how many groups it has lasted; size: steps in a group."""

    times: float
    level: float
    before: float
    noise: float
    step: int
    time: float
    groups: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShift:
    """The detector; its state is a dictionary of plain values that the rule keeps (`fresh()`). least_before: at least 60.

    The newest groups (of one step, or of as many as take _GROUP_S) are compared with up to `before` ones before them:
    their median must be rise_times as high, or stand out by noise_times its standard error, whichever is more; and
    stand out, by half of that rise, from every stretch of the same length among those before, so that a slow drift or
    another bad minute is no jump. A larger number of groups finds in noise what a smaller one cannot.
    """

    rise_times: float
    newest: tuple[int, ...] = (20, 60)
    before: int = 200
    least_before: int = 100
    noise_times: float = 6.0
    over_at: float = 0.8  # of the rise

    @staticmethod
    def fresh() -> dict[str, Any]:
        """size: steps in a group; part: values of the group to come; groups: medians, oldest first; ends, times: the last
        step of each group, and when that was; level: of the groups before the jump, if there is one; since: the groups
        after it, `count` of them; step, time: where it began."""
        return {
            "size": 1, "part": [], "groups": b"", "ends": b"", "times": b"", "typical": 0.0, "typical_for": 0,
            "level": None, "noise": 0.0, "since": b"", "count": 0, "step": 0, "time": 0.0,
        }  # fmt: skip

    def take(self, state: dict[str, Any], step: int, time: float, value: float, step_s: float) -> bool:
        """Takes the value of one step that took step_s. Whether a group is complete, and it is time to look."""
        part = state["part"]
        part.append(value)
        if len(part) < state["size"]:
            return False
        group, state["part"] = middle(part), []
        state["ends"] = _appended(state["ends"], step, _MARKED)
        state["times"] = _appended(state["times"], time, _MARKED)
        if state["level"] is not None:
            state["since"] = _appended(state["since"], group, _SINCE)
            state["count"] += 1
            return True
        most = self.before + self.newest[-1]
        state["groups"] = _appended(state["groups"], group, most)
        if len(state["groups"]) == 8 * most and state["size"] * step_s < _GROUP_S:
            self._pair(state)
        return True

    @staticmethod
    def _pair(state: dict[str, Any]) -> None:
        """Makes one group of two."""
        groups, ends, times = (_numbers(state[name]) for name in ("groups", "ends", "times"))
        pairs = zip(groups[-2::-2], groups[::-2], strict=False)
        paired = array("d", reversed([0.5 * (one + other) for one, other in pairs]))
        state.update(groups=paired.tobytes(), ends=ends[::-2][::-1].tobytes(), times=times[::-2][::-1].tobytes())
        state.update(size=2 * state["size"], typical_for=0)

    def knows_enough(self, state: dict[str, Any]) -> bool:
        return state["level"] is not None or len(state["groups"]) >= 8 * (self.newest[0] + self.least_before)

    def look(self, state: dict[str, Any]) -> Shift | None:
        """The jump that there is now. What was before it is then kept, until the jump is over or taken for good."""
        if state["level"] is None and not self._jumps(state):
            return None
        level = middle(_numbers(state["since"])[-self.newest[-1] :])
        times = level / state["level"]
        if times < 1 + self.over_at * (self.rise_times - 1):
            self._go_on(state, _numbers(state["groups"]) + _numbers(state["since"])[-self.newest[0] :])
            return None
        return Shift(
            times, level, state["level"], state["noise"], state["step"], state["time"], state["count"], state["size"]
        )

    def declare(self, state: dict[str, Any], count: int) -> bool:
        """Takes the newest `count` groups for a new level that something else tells of, whatever the noise. Whether they
        are one."""
        groups = _numbers(state["groups"])
        before = groups[-count - self.before : -count] if 0 < count < len(groups) else groups[:0]
        usual = middle(before) if len(before) >= self.least_before else 0.0
        if state["level"] is not None or not usual > 0 or middle(groups[-count:]) < self.rise_times * usual:
            return False
        _split(state, groups, count, usual, _noise(before, usual))
        return True

    def accept(self, state: dict[str, Any]) -> None:
        """From now on the new level is the usual one: the work of a step has changed."""
        self._go_on(state, _numbers(state["since"]))

    def _jumps(self, state: dict[str, Any]) -> bool:
        packed, few = state["groups"], self.newest[0]
        if len(packed) < 8 * (few + self.least_before):
            return False
        state["typical_for"] -= 1
        if state["typical_for"] < 0:
            state["typical"], state["typical_for"] = middle(_numbers(packed[: -8 * few])), _TYPICAL_FOR
        if middle(_numbers(packed[-8 * few :])) < (1 + 0.5 * (self.rise_times - 1)) * state["typical"]:
            return False  # nearly every step ends here
        groups = _numbers(packed)
        return any(self._splits(groups, count, state) for count in self.newest)

    def _splits(self, groups: array[float], count: int, state: dict[str, Any]) -> bool:
        """Whether the newest groups are of a higher level. If so, tells them from those before."""
        before = groups[-count - self.before : -count]
        if len(before) < self.least_before:
            return False
        usual = middle(before)
        newest = groups[-_newest_above(groups[-count - self.newest[0] :], 0.5 * (usual + middle(groups[-count:]))) :]
        level = middle(newest)
        if not usual > 0 or len(newest) < count // 2:
            return False
        noise = _noise(before, usual)
        if not self._stands_out(newest, before, usual, level, noise):
            return False
        _split(state, groups, len(newest), usual, noise)
        return True

    def _stands_out(
        self, newest: Sequence[float], before: Sequence[float], usual: float, level: float, noise: float
    ) -> bool:
        few = self.newest[0]
        stretches = [middle(before[end - few : end]) for end in range(len(before), few - 1, -few)]
        steps = [one - other for one, other in pairwise(stretches)]
        # From one stretch to the next noise is not independent; a steady drift is no noise, and goes on.
        wander = stdev(steps) / math.sqrt(2) / usual * (1 + 4 / len(stretches))
        slope = max(0.0, mean(steps[: (len(steps) + 1) // 2]))
        drifted = stretches[0] + slope * (few + len(newest)) / (2 * few)
        error = max(noise * math.sqrt(1 / len(newest) + 1 / len(before)), wander)
        rise = max(self.rise_times - 1, self.noise_times * error)
        if level < (1 + rise) * usual or level < (1 + 0.5 * rise) * max(drifted, *stretches):
            return False
        return not _is_chance(newest, before, 0.5 * (usual + level))

    def _go_on(self, state: dict[str, Any], groups: array[float]) -> None:
        kept = groups[-self.before - self.newest[-1] :].tobytes()
        state.update(groups=kept, since=b"", count=0, level=None, typical_for=0)


def _newest_above(values: Sequence[float], limit: float) -> int:
    """How many of the newest values are of a level above a limit: from there on most are."""
    best, most, score = 1, 0, 0
    for back in range(1, len(values) + 1):
        score += 1 if values[-back] > limit else -1
        if score > most:
            best, most = back, score
    return best


def _noise(before: Sequence[float], usual: float) -> float:
    return max(_LEAST_NOISE, _NOISE_OF_MEDIAN * middle([abs(one - usual) for one in before]) / usual)


def _split(state: dict[str, Any], groups: array[float], count: int, level: float, noise: float) -> None:
    """Tells the newest `count` groups from those before."""
    ends, times = _numbers(state["ends"]), _numbers(state["times"])
    last = max(0, len(ends) - count - 1)
    state.update(
        groups=groups[:-count].tobytes(), since=groups[-count:].tobytes(), count=count, level=level, noise=noise,
        step=int(ends[last]) + 1, time=times[last],
    )  # fmt: skip


def _is_chance(newest: Sequence[float], before: Sequence[float], halfway: float) -> bool:
    """Whether a share of the groups before is as high as the newest ones, so that it may be chance that they came in a
    row: steps of two kinds. By Chernoff's bound of the binomial."""
    often = (sum(one > halfway for one in before) + 1) / (len(before) + 2)
    now = sum(one > halfway for one in newest) / (len(newest) + 1e-9)
    if now <= often:
        return True
    distance = now * math.log(now / often) + (1 - now) * math.log((1 - now) / (1 - often))
    return len(newest) * distance < _LEAST_EVIDENCE


def middle(values: Sequence[float]) -> float:
    """The median; of an even number of values the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def _numbers(packed: bytes) -> array[float]:
    return array("d", packed)


def _appended(packed: bytes, value: float, most: int) -> bytes:
    return packed[-8 * (most - 1) :] + array("d", (value,)).tobytes()
