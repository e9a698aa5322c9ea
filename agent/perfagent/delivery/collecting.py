"""Rows leave the deque of the training thread: what can be written down of each, with as little work as possible.

This runs seven times a second with cold caches, and each object was written by another core: every look at a row costs more than
what is done with it. So rows of the usual kinds, users' rows and plain steps, are taken all at once and with few words, and all
checks that can wait until more of them are read together (columns.py, reading.py) wait until then. What was taken is written
down (drafts.py) and let go of, since objects that live on make the garbage collector run. Any other row is asked by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from perfagent.cost import steps_ns
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import is_pressing, rows_of
from perfagent.device import waiting as elsewhere
from perfagent.hooks.reading import Note
from perfagent.hooks.row import StepRow

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender
    from perfagent.hooks.progress import Progress

__all__ = ["Collector"]

DEFERRED_S = 60.0
_MOST = 64
"""Rows that are looked at together: where every second one has to be asked by itself, they are looked at again after it."""
_USUAL = frozenset((tuple, StepRow))
_OURS = 5
"""Fields of a row with its names, from a sampler: a few each second."""


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
        waiting: deque[Any] = self._sender.rows
        self.pressing = False
        rows: list[Any] = []
        most = len(waiting)
        while len(rows) < most and waiting:
            usual = self._usual(waiting)
            for _ in usual:
                waiting.popleft()
            if usual:
                rows += usual
                self._deferred_since = 0.0
            if len(usual) == _MOST:
                continue
            if not waiting or not self._ask(waiting[0], rows, now, last=last):
                break
            waiting.popleft()
            self._deferred_since = 0.0  # whatever was waited for has come: the next one has all the time there is
        return rows

    def _usual(self, waiting: deque[Any]) -> list[Any]:
        """What the deque begins with, as far as it is of the usual kinds. It stays there."""
        rows = [*islice(waiting, min(len(waiting), _MOST))]
        p = self._sender.progress
        if not _USUAL.issuperset(map(type, rows)) or _OURS in map(len, rows):
            del rows[next(at for at, row in enumerate(rows) if type(row) not in _USUAL or len(row) == _OURS) :]
        steps = [row for row in rows if type(row) is StepRow]
        if steps and p is not None:
            rows = self._plain(rows, steps, p)
        logged = [row[3].values() for row in rows if len(row) == 4]
        try:
            finite = math.isfinite(sum(map(sum, logged)))
        except OverflowError:  # a whole number beyond any float
            finite = False
        if not finite:
            self.pressing = self.pressing or any(is_pressing(row) for row in rows if len(row) == 4)
        self._count_logged(len(logged), sum(map(len, logged)))
        return rows

    def _plain(self, rows: list[Any], steps: list[StepRow], p: Progress) -> list[Any]:
        """The rows up to the first step that has to be asked by itself."""
        plain = p.clock is None and not elsewhere()
        settled = p.completed + p.opened  # a loss that the user logs for a later step takes the place of ours
        for step in steps:
            if step[0] >= settled or step[8] is not None or step[3] != 1 or type(step[7]) is not list or not plain:
                at = next(at for at, row in enumerate(rows) if row is step)
                rows, steps = rows[:at], [row for row in rows[:at] if type(row) is StepRow]
                break
        if steps:
            p.hooks_ns += steps_ns(len(steps), sum(map(len, [step[7] for step in steps])))
        if p.user_losses:
            rows = [row.with_user_loss(p) if type(row) is StepRow else row for row in rows]
        return rows

    def _count_logged(self, calls: int, values: int) -> None:
        """For the agent's account of its own cost."""
        before = self._sender.logged
        self._sender.logged = before[0] + calls, before[1] + values

    def _ask(self, head: Any, rows: list[Any], now: float, *, last: bool) -> bool:
        """Takes a row that may have to be waited for. False while it has."""
        try:
            if self._ready(head):
                self._take(self._noted(head, rows), rows)
            else:
                self._deferred_since = self._deferred_since or now
                if now - self._deferred_since < DEFERRED_S and not last:
                    return False
                self._sender.counters["dropped"] += 1
        except Exception:  # noqa: BLE001 - a device that was lost answers every query with its own error
            self._sender.counters["dropped"] += 1
        return True

    def _ready(self, head: Any) -> bool:
        p = self._sender.progress
        if isinstance(head, StepRow) and p is not None:
            return head.ready(p)
        return isinstance(head, tuple) or bool(head.ready())

    def _noted(self, head: Any, rows: list[Any]) -> tuple[Any, ...]:
        """What can be written down of a row that had to be asked."""
        p = self._sender.progress
        if isinstance(head, StepRow) and p is not None:
            if head.plain(p):
                return head.note(p)
            self._before_row()  # notes are read in the order of their steps
            rows[:] = rows_of(rows, self._sender.reader, self._lost)
            return head.row(p)
        row: tuple[Any, ...] = head if isinstance(head, tuple) else head.row()
        if len(row) == 4:
            self._count_logged(1, len(row[3]))
        return row

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
