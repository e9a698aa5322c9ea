"""Counts the rows that a full deque drops."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

__all__ = ["OverflowMark"]


class OverflowMark:
    """Counts the rows that a full deque drops, without any cost to the threads that append.

    One mark lies among the rows and holds the number of rows appended before it. When the deque drops the mark,
    exactly `maxlen` rows have come after it, and a new mark is appended. So the reader of the deque always meets a
    mark and can compare counts. (A count with every append would cost each log().)

    fresh: the reader itself put this mark in, so it says nothing about dropped rows. Nobody else may hold a
    reference to a mark.
    """

    __slots__ = ("_rows", "before", "fresh", "live")

    def __init__(self, rows: weakref.ref[deque[Any]], before: int) -> None:
        self._rows, self.before = rows, before
        self.fresh, self.live = False, True

    @classmethod
    def put(cls, rows: deque[Any]) -> None:
        """Puts a mark into the deque, before any row can have been dropped. A deque without a bound drops no rows."""
        if rows.maxlen is not None and len(rows) < rows.maxlen and not any(type(row) is cls for row in rows):
            rows.append(cls(weakref.ref(rows), len(rows)))

    def renew(self, rows: deque[Any]) -> None:
        """Removes this mark from the head of the rows and appends the next one."""
        self.live = False
        mark = OverflowMark(self._rows, self.before)
        mark.fresh = True
        rows.append(mark)  # append first: if the rows are full, they drop this mark and nothing else
        if rows[0] is self:
            rows.popleft()
        mark.before += len(rows) - 1

    def __del__(self) -> None:
        rows = self._rows()
        if self.live and rows and rows.maxlen:  # not where a sender drops all its rows
            rows.append(OverflowMark(self._rows, self.before + rows.maxlen))
