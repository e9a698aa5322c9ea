"""Rows leave the deque of the training thread: what can be written down of each, with as little work as possible.

This runs seven times a second with cold caches, and each object was written by another core: every look at a row costs more than
what is done with it. So a user's row and a step of the usual kind are looked at once, and all checks that can wait until a
hundred of them are read together (columns.py, reading.py) wait until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfagent.cost import steps_ns
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import is_pressing, rows_of
from perfagent.hooks.reading import Note
from perfagent.hooks.row import StepRow

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender
    from perfagent.hooks.progress import Progress

__all__ = ["Collector"]

DEFERRED_S = 60.0
_as_note = tuple.__new__
_NOTHING = -1


class Collector:
    """Of one sender. before_row: called before a row that cannot be written down as a note is made: earlier notes are read first.

    pressing: of the rows last collected: one holds what must not wait for the next frame.
    """

    def __init__(self, sender: Sender, columns: Columns, before_row: Callable[[], None], lost: Callable[[Any], None]) -> None:
        self._sender, self._columns, self._before_row, self._lost = sender, columns, before_row, lost
        self._deferred_since = 0.0
        self.pressing = False

    def collect(self, now: float, *, last: bool) -> list[Any]:
        """The rows that can be written down, in their order, up to one that has to be waited for. last: nothing is waited for."""
        rows: list[Any] = []
        waiting: deque[Any] = self._sender.rows
        progress: Progress | None = None
        settled = calls = values = steps = entries = 0
        total = 0.0
        self.pressing = False
        for _ in range(len(waiting)):
            head = waiting[0]
            kind = type(head)
            if kind is tuple and len(head) == 4:  # a user's, with numbers of Python's own (session.py)
                logged = head[3].values()
                calls += 1
                values += len(logged)
                try:
                    total += sum(logged)
                except OverflowError:  # a whole number beyond any float: looked at below
                    total = float("nan")
                rows.append(head)
            elif kind is tuple:
                self._take(head, rows)
            else:
                if kind is StepRow and head[0] is not progress:
                    progress = head[0]
                    settled = _NOTHING if progress.user_losses or not head.plain() else progress.completed
                if kind is StepRow and head[1] < settled and head[4] == 1 and head[6] is None and type(head[2]) is list:
                    steps += 1
                    entries += len(head[2])
                    rows.append(_as_note(Note, (head[1], 0.0, head[3], 1, head[5], None, 0, head[2], None)))
                elif not self._ask(head, rows, now, last=last):
                    break
            waiting.popleft()
            self._deferred_since = 0.0  # whatever was waited for has come: the next one has all the time there is
        if steps and progress is not None:
            progress.hooks_ns += steps_ns(steps, entries)
        self._count_logged(calls, values)
        if total - total != 0.0:
            self.pressing = self.pressing or any(is_pressing(row) for row in rows if len(row) == 4)
        return rows

    def _count_logged(self, calls: int, values: int) -> None:
        """For the agent's account of its own cost."""
        before = self._sender.logged
        self._sender.logged = before[0] + calls, before[1] + values

    def _take(self, row: tuple[Any, ...], rows: list[Any]) -> None:
        """Adds a row, or what may be stored of it."""
        try:
            checked = row if isinstance(row, Note) else self._columns.checked(row)
        except Exception:  # noqa: BLE001 - a hostile object among a user's names or values costs its own row and no other
            self._sender.counters["dropped"] += 1
            return
        if checked is not None:
            self.pressing = self.pressing or is_pressing(checked)
            rows.append(checked)

    def _ask(self, head: Any, rows: list[Any], now: float, *, last: bool) -> bool:
        """Takes a row that may have to be waited for. False while it has."""
        try:
            if head.ready():
                self._take(self._noted(head, rows), rows)
            else:
                self._deferred_since = self._deferred_since or now
                if now - self._deferred_since < DEFERRED_S and not last:
                    return False
                self._sender.counters["dropped"] += 1
        except Exception:  # noqa: BLE001 - a device that was lost answers every query with its own error
            self._sender.counters["dropped"] += 1
        return True

    def _noted(self, head: Any, rows: list[Any]) -> tuple[Any, ...]:
        """What can be written down of a row that had to be asked."""
        if not isinstance(head, StepRow):
            row: tuple[Any, ...] = head.row()
            if len(row) == 4:
                self._count_logged(1, len(row[3]))
            return row
        if head.plain():
            return head.note()
        self._before_row()  # notes are read in the order of their steps
        rows[:] = rows_of(rows, self._sender.reader, self._lost)
        return head.row()
