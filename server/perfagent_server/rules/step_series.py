"""Series over steps, as rules see them, ranks put together.

Ranks arrive at different moments. A step of a StepSeries is closed, and only then shown to the rules, when every rank
that reports the series has reported the step, or when the slowest has kept it waiting for PATIENCE_S. A frame costs the same
however many ranks there are.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from perfagent_server.rules.rule import Series

__all__ = ["ABSENT_AFTER_S", "MERGES", "PATIENCE_S", "Part", "StepSeries", "in_step_order"]

PATIENCE_S = 5.0  # how long the slowest rank may keep a step waiting
ABSENT_AFTER_S = 15.0  # a rank that was silent in a series for so long is not waited for
_MAX_PENDING = 512  # steps that wait for a rank, per series
_COUNTED_EVERY_S = 1.0  # how often the ranks that still report are counted

Part = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""Steps, values and times of a series in one group."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _root_of_sum(values: Sequence[float]) -> float:
    total = sum(values)
    return math.sqrt(total) if total >= 0 else math.nan


MERGES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean, "median": median, "min": min, "max": max, "sum": sum, "root of sum": _root_of_sum,
}  # fmt: skip


def in_step_order(parts: Sequence[Part]) -> Part:
    """A series that is in several groups of a frame (some steps have more names than others) as though it were in one:
    a step that comes after a later one would be taken for late."""
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in zip(*part, strict=True)]
    rows.sort(key=itemgetter(0))
    steps, values, times = zip(*rows, strict=True)
    return steps, values, times


class _Pending:
    """A step that waits for ranks. since: when it was first reported, server clock; time: of the sample."""

    __slots__ = ("since", "time", "values")

    def __init__(self, since: float, time: float) -> None:
        self.since, self.time = since, time
        self.values: dict[int, float] = {}


class StepSeries:
    """One series, ranks put together. steps int64 (n,), values float64 (n,), times float64 (n,): the newest closed
    steps; a rule sees the first `seen`.

    name: what it is filled from, which is a part of what rules read where ranks send parts of it. judged: whether it is
    shown step by step, because something is judged at each.
    """

    __slots__ = (
        "_counted", "_enough", "_enough_until", "_full", "_live", "_oldest", "closed", "first", "judged", "merge", "name",
        "of_parts", "pending", "ranks", "seen", "size", "steps", "times", "total", "values",
    )  # fmt: skip

    def __init__(self, name: str, plan: Series, *, judged: bool) -> None:
        self.name, self.judged = name, judged
        self.size = plan.keep
        self._full = plan.keep + max(16, plan.keep // 4)  # steps that are seen: from then on the oldest are dropped
        self.merge = MERGES[plan.merge]
        self.of_parts = bool(plan.part_of)
        self.steps: array[int] = array("q")
        self.values: array[float] = array("d")
        self.times: array[float] = array("d")
        self.seen = 0
        self.total = 0  # steps seen in this attempt
        self.closed = -1  # newest closed step
        self.first: float | None = None  # when the series first came
        self.ranks: dict[int, float] = {}  # rank -> when it last reported
        self.pending: dict[int, _Pending] = {}
        self._live, self._counted = 0, -math.inf  # ranks that still report, and when they were counted
        self._oldest = 0  # of the steps that wait
        self._enough, self._enough_until = 0, -math.inf  # how many ranks it waits for, and until when that holds

    # --- reading ------------------------------------------------------------------------------------------------------

    def last(self, count: int) -> list[float]:
        """The newest `count` values that may be seen, oldest first."""
        return self.values[max(0, self.seen - count) : self.seen].tolist()

    def last_steps(self, count: int) -> list[int]:
        return self.steps[max(0, self.seen - count) : self.seen].tolist()

    @property
    def value(self) -> float | None:
        return self.values[self.seen - 1] if self.seen else None

    @property
    def step(self) -> int | None:
        return self.steps[self.seen - 1] if self.seen else None

    @property
    def time(self) -> float | None:
        return self.times[self.seen - 1] if self.seen else None

    def at(self, step: int) -> float | None:
        """The value of that step, if it is among the newest ones that may be seen."""
        place = bisect_right(self.steps, step, hi=self.seen) - 1
        return self.values[place] if place >= 0 and self.steps[place] == step else None

    def before(self, step: int, count: int) -> list[float]:
        """The newest `count` values up to this step, oldest first. What waits for a slow rank counts too, and not only
        what the rules have seen: they are judged in turn, and a value that is no number is judged at once."""
        end = bisect_right(self.steps, step)
        waiting = [self._merged(entry.values) for at, entry in sorted(self.pending.items()) if at <= step]
        return [*self.values[max(0, end - count) : end], *waiting][-count:]

    def steps_before(self, step: int, count: int) -> list[int]:
        """The steps of before(step, count)."""
        end = bisect_right(self.steps, step)
        return [*self.steps[max(0, end - count) : end], *sorted(at for at in self.pending if at <= step)][-count:]

    # --- filling ------------------------------------------------------------------------------------------------------

    def take(
        self, rank: int, steps: Sequence[int], values: Sequence[float], times: Sequence[float], now: float, world: int
    ) -> None:
        if self.seen > self._full:
            self._trim()
        if rank not in self.ranks:
            self.first = now if self.first is None else self.first
            self._live += 1
            self._enough_until = -math.inf
        self.ranks[rank] = now
        if world <= 1 and len(self.ranks) == 1 and not self.pending and steps[0] > self.closed and _rising(steps):
            self.closed = steps[-1]
            if len(steps) == 1:  # most frames
                self.steps.append(steps[0])
                self.values.append(self.merge(values) if self.of_parts else values[0])
                self.times.append(times[0])
                return
            self.steps.extend(steps)
            # a column may be of float32, which an array of another kind does not take
            self.values.extend([self.merge([value]) for value in values] if self.of_parts else array("d", values))
            self.times.extend(times)
            return
        for step, value, time in zip(steps, values, times, strict=True):
            if step <= self.closed:
                self._amend(step, value, time)
                continue
            entry = self.pending.get(step)
            if entry is None:
                self._oldest = min(step, self._oldest) if self.pending else step
                entry = self.pending[step] = _Pending(now, time)
            entry.values[rank] = value

    def _amend(self, step: int, value: float, time: float) -> None:
        """A step that comes after later ones were judged is history: rules see it beside the others, and are not judged
        at it. One that is known was judged without this rank."""
        place = bisect_right(self.steps, step, hi=self.seen)
        if self.of_parts or (place and self.steps[place - 1] == step) or (not place and self.seen >= self.size):
            return
        self.steps.insert(place, step)
        self.values.insert(place, value)
        self.times.insert(place, time)
        self.seen += 1
        self.total += 1

    def fill(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Takes steps that were judged before: they are seen already, and their ranks are together."""
        self.steps, self.values = array("q", steps), array("d", values)
        self.times = array("d", [0.0] * len(steps))
        self.seen = self.total = len(steps)
        self.closed = steps[-1] if len(steps) else -1

    def close(self, now: float, world: int) -> None:
        """Puts complete steps, and those that waited long enough, behind the visible ones."""
        if not self.pending or self._waits(self.pending[self._oldest], now, world):
            return
        for step in sorted(self.pending):
            entry = self.pending[step]
            if self._waits(entry, now, world):
                self._oldest = step
                return
            del self.pending[step]
            self.closed = step
            if self.of_parts and len(entry.values) < len(self.ranks) and _all_finite(entry.values):
                continue  # some rank did not measure that step: part of a norm is no norm
            self.steps.append(step)
            self.values.append(self._merged(entry.values))
            self.times.append(entry.time)

    def waits_until(self) -> float | None:
        """When the oldest step that waits for a rank is closed without it, server clock; None if none waits."""
        return self.pending[self._oldest].since + PATIENCE_S if self.pending else None

    def _waits(self, entry: _Pending, now: float, world: int) -> bool:
        """Whether this step, the oldest, is still to wait for other ranks."""
        if now - entry.since >= PATIENCE_S or len(self.pending) > _MAX_PENDING:
            return False
        if now >= self._enough_until:
            self._count(now, world)
        return len(entry.values) < self._enough

    def _count(self, now: float, world: int) -> None:
        """How many ranks a step waits for: those that still report; in the first seconds, all that there are."""
        if now - self._counted >= _COUNTED_EVERY_S:
            self._live = sum(1 for seen in self.ranks.values() if now - seen < ABSENT_AFTER_S)
            self._counted = now
        self._enough_until = self._counted + _COUNTED_EVERY_S
        self._enough = max(1, self._live)
        if self.first is None or now - self.first < PATIENCE_S:
            self._enough = max(world, self._enough)
            self._enough_until = -math.inf  # the world may become known at any moment

    def _merged(self, values: dict[int, float]) -> float:
        return self.merge([values[rank] for rank in sorted(values)])

    def advance(self) -> bool:
        """Shows one more step to the rules. False when there is none."""
        if self.seen < len(self.steps):
            self.seen += 1
            self.total += 1
            return True
        return False

    def show_all(self) -> None:
        """Shows every step at once, where no rule wants to judge them one by one."""
        self.total += len(self.steps) - self.seen
        self.seen = len(self.steps)

    def _trim(self) -> None:
        """Drops what is too old, when new steps come and not when the last one was judged: of a frame with more steps
        than are kept, rules on other series, which are judged later, look up each."""
        over = self.seen - self.size
        for column in (self.steps, self.values, self.times):
            del column[:over]
        self.seen = self.size

    # --- persistence --------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[Any]:
        steps = self.steps[-self.size :]
        hidden = len(self.steps) - self.seen
        even = len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1
        return [
            [steps[0], len(steps)] if even else steps.tolist(), even, self.values[-self.size :].tobytes(),
            self.times[-1:].tolist(), hidden, self.total, self.closed, self.first, list(self.ranks.items()),
            self._live, self._counted,
            [[step, one.since, one.time, list(one.values.items())] for step, one in self.pending.items()],
        ]  # fmt: skip

    def restore(self, state: Sequence[Any]) -> None:
        (
            steps, even, values, times, hidden, self.total, self.closed, self.first, ranks, self._live, self._counted, pending,
        ) = state  # fmt: skip
        self.steps = array("q", range(steps[0], steps[0] + steps[1]) if even else steps)
        self.values = array("d", values)
        self.times = array("d", list(times) * len(self.steps))  # only the newest is ever asked for
        self.seen = len(self.steps) - hidden
        self.ranks = dict(ranks)
        for step, since, time, entries in pending:
            entry = self.pending[step] = _Pending(since, time)
            entry.values = dict(entries)
        self._oldest = min(self.pending, default=0)


def _all_finite(values: dict[int, float]) -> bool:
    return all(map(math.isfinite, values.values()))


def _rising(steps: Sequence[int]) -> bool:
    if len(steps) == 1:
        return True
    return all(a < b for a, b in itertools.pairwise(steps))
