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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

from perfagent_server.rules.rule import Series

__all__ = ["ABSENT_AFTER_S", "MERGES", "PATIENCE_S", "Part", "StepSeries", "in_step_order"]

PATIENCE_S = 5.0  # how long the slowest rank may keep a step waiting
ABSENT_AFTER_S = 15.0  # a rank that was silent in a series for so long is not waited for
_MAX_PENDING = 512  # steps that wait for a rank, per series
_FEW = 96  # steps that every series has room for
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


@dataclass(slots=True)
class _Pending:
    """A step that waits for ranks. since: when it was first reported, server clock; time: of the sample; values: by rank."""

    since: float
    time: float
    values: dict[int, float]


class _Rows:
    """Steps with their values and times, in order. Their arrays double: thousands of small ones that grow in step by a
    sixteenth leave holes in the heap that none of them fits into. usual: how many rows there are in the end; timed: else
    the time of the newest is kept for all.
    """

    __slots__ = ("_columns", "_room", "_timed", "_usual", "count", "newest")

    def __init__(self, usual: int, *, timed: bool) -> None:
        self._usual, self._room = usual, min(usual, _FEW)
        self._timed = timed
        self._columns = self._empty(self._room)
        self.count = 0
        self.newest = math.nan  # time of the newest row

    def column(self, place: int) -> Any:
        return memoryview(self._columns[place])[: self.count]

    def append(self, step: int, value: float, time: float) -> None:
        if self.count == self._room:
            self._resize(2 * self._room)
        for column, new in zip(self._columns, (step, value, time), strict=False):
            column[self.count] = new
        self.newest = time
        self.count += 1

    def insert(self, place: int, step: int, value: float, time: float) -> None:
        self.append(step, value, time)
        for column in self._columns:
            column[place : self.count] = column[self.count - 1 : self.count] + column[place : self.count - 1]

    def trim(self, keep: int) -> None:
        """Drops all but the newest."""
        for column in self._columns:
            column[:keep] = column[self.count - keep : self.count]
        self.count = keep
        if self._room > 4 * self._usual and keep <= self._usual:
            self._resize(self._usual)

    def times(self) -> Sequence[float]:
        return self.column(2) if self._timed else [self.newest] * self.count

    def _resize(self, room: int) -> None:
        larger = self._empty(room)
        for column, old in zip(larger, self._columns, strict=True):
            column[: self.count] = old[: self.count]
        self._columns, self._room = larger, room

    def _empty(self, room: int) -> tuple[array[Any], ...]:
        return tuple(array(kind, bytes(8 * room)) for kind in ("qdd" if self._timed else "qd"))


class StepSeries:
    """One series, ranks put together: the newest closed steps; a rule sees the first `seen`.

    name: what it is filled from, which is a part of what rules read where ranks send parts of it. judged: whether it is
    shown step by step, because something is judged at each.
    """

    __slots__ = (
        "_counted", "_enough", "_enough_until", "_full", "_live", "_oldest", "_rows", "closed", "first", "judged", "merge",
        "name", "of_parts", "pending", "ranks", "seen", "size", "total",
    )  # fmt: skip

    def __init__(self, name: str, plan: Series, *, judged: bool) -> None:
        self.name, self.judged = name, judged
        self.size = plan.keep
        self._full = plan.keep + max(16, plan.keep // 16)  # steps that are seen: from then on the oldest are dropped
        self.merge = MERGES[plan.merge]
        self.of_parts = bool(plan.part_of)
        self._rows = _Rows(self._full + 16, timed=judged or name == "step_time_s")
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

    @property
    def steps(self) -> memoryview[int]:
        """int64 (n,), ascending."""
        steps: memoryview[int] = self._rows.column(0)
        return steps

    @property
    def values(self) -> memoryview[float]:
        """float64 (n,)."""
        values: memoryview[float] = self._rows.column(1)
        return values

    @property
    def times(self) -> Sequence[float]:
        """float64 (n,). Of a series that is not judged and no step time, the newest for all."""
        return self._rows.times()

    @property
    def hidden(self) -> int:
        """How many closed steps no rule has seen yet."""
        return self._rows.count - self.seen

    def last(self, count: int) -> list[float]:
        """The newest `count` values that may be seen, oldest first."""
        return [*self.values[max(0, self.seen - count) : self.seen]]

    def last_steps(self, count: int) -> list[int]:
        return self.steps[max(0, self.seen - count) : self.seen].tolist()

    def rows(self) -> Iterator[tuple[int, float]]:
        """The steps that may be seen and are kept, each with its value, oldest first."""
        return zip(self.last_steps(self.size), self.last(self.size), strict=True)

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
        alone = world <= 1 and len(self.ranks) == 1 and not self.pending and steps[0] > self.closed
        if alone and all(a < b for a, b in itertools.pairwise(steps)):
            self.closed = steps[-1]
            for step, value, time in zip(steps, values, times, strict=True):
                self._rows.append(step, self.merge([value]) if self.of_parts else value, time)
            return
        for step, value, time in zip(steps, values, times, strict=True):
            if step <= self.closed:
                self._amend(step, value, time)
                continue
            entry = self.pending.get(step)
            if entry is None:
                self._oldest = min(step, self._oldest) if self.pending else step
                entry = self.pending[step] = _Pending(now, time, {})
            entry.values[rank] = value

    def _amend(self, step: int, value: float, time: float) -> None:
        """A step that comes after later ones were judged is history: rules see it beside the others, and are not judged
        at it. One that is known was judged without this rank."""
        place = bisect_right(self.steps, step, hi=self.seen)
        if self.of_parts or (place and self.steps[place - 1] == step) or (not place and self.seen >= self.size):
            return
        self._rows.insert(place, step, value, time)
        self.seen += 1
        self.total += 1

    def fill(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Takes steps that were judged before: they are seen already, and their ranks are together."""
        for step, value in zip(steps, values, strict=True):
            self._rows.append(step, value, 0.0)
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
            if self.of_parts and len(entry.values) < len(self.ranks) and all(map(math.isfinite, entry.values.values())):
                continue  # some rank did not measure that step: part of a norm is no norm
            self._rows.append(step, self._merged(entry.values), entry.time)

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
        if self.hidden:
            self.seen += 1
            self.total += 1
            return True
        return False

    def show_all(self) -> None:
        """Shows every step at once, where no rule wants to judge them one by one."""
        self.total += self.hidden
        self.seen = self._rows.count

    def _trim(self) -> None:
        """Drops what is too old, when new steps come and not when the last one was judged: of a frame with more steps
        than are kept, rules on other series, which are judged later, look up each."""
        hidden = self.hidden
        self._rows.trim(self.size + hidden)
        self.seen = self.size

    # --- persistence --------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[Any]:
        steps = self.steps[-self.size :]
        even = len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1
        return [
            [steps[0], len(steps)] if even else steps.tolist(), even, self.values[-self.size :].tobytes(),
            [self._rows.newest], self.hidden, self.total, self.closed, self.first, list(self.ranks.items()),
            self._live, self._counted,
            [[step, one.since, one.time, list(one.values.items())] for step, one in self.pending.items()],
        ]  # fmt: skip

    def restore(self, state: Sequence[Any]) -> None:
        (
            steps, even, values, times, hidden, self.total, self.closed, self.first, ranks, self._live, self._counted, pending,
        ) = state  # fmt: skip
        values = array("d", values)
        for step, value in zip(range(steps[0], steps[0] + len(values)) if even else steps, values, strict=True):
            self._rows.append(step, value, times[0])  # only the newest is ever asked for
        self.seen = self._rows.count - hidden
        self.ranks = dict(ranks)
        for step, since, time, entries in pending:
            self.pending[step] = _Pending(since, time, dict(entries))
        self._oldest = min(self.pending, default=0)
