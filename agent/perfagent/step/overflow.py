"""Counts the rows that a full deque drops, at no cost to the training thread, which only appends."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

__all__ = ["Mark"]


class Mark:
    """Counts what a full deque of rows drops, at no cost to those who append.

    One lies among the rows and knows how many were handed in before it. Where it is the one that is dropped, as many came after
    it as the deque holds, and another one takes its place at the end. So whoever takes the rows out meets it and can compare.
    fresh: put there by who takes the rows out, so that by itself it has nothing to tell. Nobody else may hold on to one.
    """

    __slots__ = ("_rows", "before", "fresh", "live")

    def __init__(self, rows: weakref.ref[deque[Any]], before: int) -> None:
        self._rows, self.before = rows, before
        self.fresh, self.live = False, True

    @classmethod
    def put(cls, rows: deque[Any]) -> None:
        """Before any row can have been dropped. A deque without a bound drops none."""
        if rows.maxlen is not None and len(rows) < rows.maxlen and not any(type(row) is cls for row in rows):
            rows.append(cls(weakref.ref(rows), len(rows)))

    def renew(self, rows: deque[Any]) -> None:
        """Takes it out, from the head of the rows, and puts the next one at their end."""
        self.live = False
        mark = Mark(self._rows, self.before)
        mark.fresh = True
        rows.append(mark)  # first: where the rows are full it is this one that they drop, and nothing else
        if rows[0] is self:
            rows.popleft()
        mark.before += len(rows) - 1

    def __del__(self) -> None:
        rows = self._rows()
        if self.live and rows and rows.maxlen:  # not those of a sender that lets go of them all
            rows.append(Mark(self._rows, self.before + rows.maxlen))
