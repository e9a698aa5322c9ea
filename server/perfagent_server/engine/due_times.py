"""When time alone changes something in which run: a heap, so that a look costs nothing while nothing is due."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

__all__ = ["DueTimes"]


class DueTimes:
    """Of each run the time that was set last counts."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._of: dict[str, float] = {}

    def __contains__(self, run: object) -> bool:
        return run in self._of

    def set(self, run: str, due: float | None) -> None:
        """None: never. NaN: now, for in the heap it would hold up all others."""
        if due is None:
            self.drop(run)
            return
        due = -math.inf if math.isnan(due) else due
        if self._of.get(run) != due:
            self._of[run] = due
            heapq.heappush(self._heap, (due, run))

    def put_off(self, run: str, now: float, later: float) -> None:
        """What is due still, although it was just looked at, is due later; else pop() would never end."""
        if self._of.get(run, math.inf) <= now:
            self.set(run, later)

    def drop(self, run: str) -> None:
        self._of.pop(run, None)

    def clear(self) -> None:
        self._heap.clear()
        self._of.clear()

    def pop(self, now: float) -> Iterator[str]:
        """The runs that are due, one after the other."""
        while self._heap and self._heap[0][0] <= now:
            due, run = heapq.heappop(self._heap)
            if self._of.get(run) == due:
                del self._of[run]
                yield run
