"""Takes rows out of the training thread's deque and turns each into what can be written down, with as little work as
possible.

This runs seven times a second with cold caches, and each object was written by another core: every look at a row costs
more than what is done with it, and the first call of each function more than the twenty after it. So each row is looked
at once, and what the usual rows need, a user's with the names of the one before (row_packing.py) or a step, stands in one
loop. Any other is asked by itself. What was taken is
written down (drafts.py) and let go of, since objects that live on make the garbage collector run. (Taking all rows at
once at a tick took no less CPU in eight interleaved pairs.)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.delivery.captured_rows import CapturedRows
from perfagent.delivery.columns import INT64, Columns
from perfagent.delivery.drafts import is_pressing, is_pressing_block, rows_of
from perfagent.delivery.row_packing import Packed, Packer, is_finite
from perfagent.delivery.wakeup import give_way
from perfagent.device import listen_here
from perfagent.device import waiting as elsewhere
from perfagent.step.captured_log import CapturedLog
from perfagent.step.overflow import Mark
from perfagent.step.pending_logs import EarlyLog
from perfagent.step.row import Note, StepRow
from perfagent.step.trace import entry_count

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff

__all__ = ["Collector", "Taken"]

DEFERRED_S = 1800.0
"""How long a row may wait for its device. It holds up no other series, and while one rank saves for minutes, or until a
collective times out, nothing arrives on the others."""
_AT_A_TIME = 32
"""Rows that are taken in 0.1 ms."""
_AT_ONCE_S = 1e-5
"""log() calls that are no further apart are made in one loop, with nothing of a training between them."""
_LOSSES_KEPT = 100
"""Losses that the user logged for steps whose rows have not come: of more, those of steps that will never come are
forgotten."""
_EARLY = frozenset((EarlyLog, CapturedLog))
_LOGGED, _OURS = 4, 5
"""Fields of a row as a user logged it, and of one with its names, from a sampler: a few each second."""


class Taken(NamedTuple):
    """What one tick found. rows: notes of steps, and what else cannot be packed; total: of rows in all."""

    rows: list[Any]
    packed: list[Packed]
    total: int


_NOTHING = Taken([], [], 0)


class Collector:
    """Of one sender. before_row: called before a row that cannot be written down as a note is made: earlier notes are
    read first.

    pressing: of the rows last collected: one holds what must not wait for the next frame. newest: the highest step so
    far. What was dropped because rows came too fast is counted as "overflows".
    """

    def __init__(
        self, sender: Handoff, columns: Columns, before_row: Callable[[], None], lost: Callable[[Any], None]
    ) -> None:
        self._sender, self._columns, self._before_row, self._lost = sender, columns, before_row, lost
        self._captured = CapturedRows(sender, columns)
        self._packer = Packer(columns, self._captured.delivers)
        self._held: deque[tuple[float, Any]] = deque()
        """Rows that wait for their device, each since a moment of the ticks' clock; those behind them are taken, but for
        steps and what may be of the same series."""
        self._holds_logs = False
        self._calls = self._values = self._again = self._values_again = 0
        self._called = -math.inf
        """When log() was called last."""
        self._epoch = 0.0
        self._newest_step = 0
        self.aside: list[EarlyLog] = []
        """log() calls whose step is not known yet: those behind them need not wait for that."""
        self._passed = 0
        """Rows that were taken or dropped so far, as far as that is known: up to the last mark."""
        self.pressing = False
        self.newest = 0
        Mark.put(sender.rows)

    @property
    def waits(self) -> bool:
        """Whether a row is there that was not taken yet, or rows were dropped that have to be counted."""
        rows: deque[Any] = self._sender.rows
        if self.aside or self._held or self._captured.waits or len(rows) > 1:
            return True
        return len(rows) == 1 and not (type(rows[0]) is Mark and rows[0].fresh)

    def collect(self, now: float, *, last: bool) -> Taken:
        """The rows that can be written down; those of one series in their order. last: nothing is waited for."""
        waiting: deque[Any] = self._sender.rows
        most = len(waiting)
        self.pressing = False
        if not self.waits:
            return _NOTHING
        p = self._sender.progress
        plain = p is not None and p.clock is None and not elsewhere()
        if not plain:
            listen_here()  # now: what these rows hold of a device was taken before
        # a loss that the user logs later takes the place of ours
        settled = p.completed + p.opened if p is not None else 0
        losses = p.losses.user_losses if p is not None else {}
        packer, newest = self._packer, self.newest
        self._epoch = epoch = time.time() - time.monotonic()
        self._calls = self._values = self._again = self._values_again = steps = entries = taken = 0
        called = self._called
        rows: list[Any] = []
        rejoined = self._release(rows, now, last=last) if self._held else 0
        rejoined += self._rejoin(rows, now, last=last) if self.aside else 0
        put_aside = 0
        while taken < most and waiting:
            row = waiting[0]
            kind = type(row)
            if kind is tuple and len(row) == _LOGGED and not self._holds_logs:
                step, wall, monotonic, metrics = row
                if monotonic - called < _AT_ONCE_S:
                    self._again += 1
                    self._values_again += len(metrics)
                else:
                    self._calls += 1
                    self._values += len(metrics)
                called = monotonic
                if newest < step < INT64:  # one beyond is refused, and so would be what is told under it
                    newest = step
                try:  # as in Packer.add, which does the same for any names
                    usual = (*metrics,) == packer.names
                    if usual:
                        packer.parts.append(packer.pack(step, wall or epoch + monotonic, monotonic, *metrics.values()))
                except Exception:  # noqa: BLE001
                    usual = False
                if not usual:
                    self._logged(row, rows)
            elif (
                kind is StepRow
                and plain
                and row[0] < settled
                and row[8] is None
                and row[3] == 1
                and type(row[7]) is list
            ):
                steps += 1
                entries += entry_count(row[7])
                self._newest_step = row[0]
                rows.append(row.with_user_loss(p) if losses else row)
            elif kind is Mark:
                self._compare(row, taken)
                most -= 1
                continue
            elif kind in _EARLY and not row.settled and not last:
                self.aside.append(row)
                put_aside += 1
            elif kind is CapturedLog:
                self._capture(row)
                put_aside += 1
            elif self._must_wait(row) or not self._ask(row, rows, now, now, last=last):
                if plain and kind is StepRow:
                    break  # it waits for the next step to begin, and takes the short way then
                self._held.append((now, row))
                self._holds_logs = self._holds_logs or kind is not StepRow
                put_aside += 1
            waiting.popleft()
            taken += 1
            if not taken % _AT_A_TIME and taken + _AT_A_TIME <= most:  # not for the sake of a few more
                give_way(len(waiting))
        self._passed += taken
        self._called = called
        self.newest = max(newest, self.newest, self._newest_step)
        self._account(steps, entries)
        if len(losses) > _LOSSES_KEPT:
            self._forget(losses)
        packed = packer.take()
        others, captured = self._captured.take(rows, lambda: self._read_now(rows), last=last)
        packed += others
        if not all(map(is_finite, packed)):
            self.pressing = self.pressing or any(map(is_pressing_block, packed))
        return Taken(rows, packed, taken - put_aside + rejoined + captured)

    def _must_wait(self, row: Any) -> bool:
        """Whether rows that wait have to be taken first: steps behind steps, and what users log behind what they
        logged."""
        return bool(self._held) and not (type(row) is tuple and len(row) == _OURS)

    def _release(self, rows: list[Any], now: float, *, last: bool) -> int:
        """Takes those that waited for their device and are there by now; how many."""
        found = 0
        while self._held and self._ask(self._held[0][1], rows, self._held[0][0], now, last=last):
            self._held.popleft()
            found += 1
        self._holds_logs = any(type(row) is not StepRow for _, row in self._held)
        return found

    def _rejoin(self, rows: list[Any], now: float, *, last: bool) -> int:
        """Takes those that were put aside and have their step by now; how many."""
        # they get their steps at once, on another thread: in the midst of that
        if not (last or self.aside[-1].settled):
            return 0
        found = captured = 0
        for log in self.aside:
            if not (log.settled or last):
                break
            if type(log) is CapturedLog:
                self._capture(log)
                captured += 1
            elif not self._ask(log, rows, now, now, last=last):
                break
            found += 1
        del self.aside[:found]
        return found - captured

    def _capture(self, log: CapturedLog) -> None:
        """One of another logger's: it is written down when its names are known."""
        self._calls += 1
        self._values += log.size
        self._captured.add(log)

    def _read_now(self, rows: list[Any]) -> None:
        """Reads the steps that were taken so far, in place of their notes."""
        self._before_row()  # notes are read in the order of their steps
        rows[:] = rows_of(rows, self._sender.reader, self._lost)

    def _compare(self, mark: Mark, taken: int) -> None:
        """What was handed in before the mark with what was taken of it; the difference was dropped."""
        dropped = mark.before - self._passed - taken
        if dropped > 0:
            self._sender.counters["overflows"] += dropped
        self._passed += dropped
        mark.renew(self._sender.rows)

    def _logged(self, row: tuple[int, float, float, Mapping[str, Any]], rows: list[Any]) -> None:
        """What a user's call logged, numbers of Python's own. Its Unix time is worked out here: the call reads one
        clock."""
        step, wall, monotonic, metrics = row
        wall = wall or self._epoch + monotonic
        if not self._packer.add(step, wall, monotonic, (*metrics,), metrics.values()):
            row = step, wall, monotonic, metrics
            self.pressing = self.pressing or is_pressing(row)
            self._captured.delivers(metrics)
            rows.append(row)

    def _forget(self, losses: dict[int, float]) -> None:
        """Of steps before those that have come. Looked through once a tick: once a row took quadratic time in fast
        loops."""
        for step in [*losses]:  # a copy: the training thread may be adding to them
            if step < self._newest_step:
                losses.pop(step, None)

    def _account(self, steps: int, entries: int) -> None:
        """For the agent's account of its own cost."""
        sender = self._sender
        calls, values, again, values_again = sender.logged
        sender.logged = (
            calls + self._calls,
            values + self._values,
            again + self._again,
            values_again + self._values_again,
        )
        before, its_entries = sender.stepped
        sender.stepped = before + steps, its_entries + entries

    def _ask(self, head: Any, rows: list[Any], since: float, now: float, *, last: bool) -> bool:
        """Takes a row that may have to be waited for. False while it has. since: when it was asked first."""
        try:
            if self._ready(head):
                self._take(self._noted(head, rows), rows)
            else:
                if now - since < DEFERRED_S and not last:
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
            self._newest_step = head.step
            if head.plain(p):
                return head.note(p)
            self._read_now(rows)
            return head.row(p)
        row: tuple[Any, ...] = head if isinstance(head, tuple) else head.row()
        if len(row) == _LOGGED:
            self._calls += 1
            self._values += len(row[3])
        return row

    def _take(self, row: tuple[Any, ...], rows: list[Any]) -> None:
        """Adds a row, or what may be stored of it."""
        try:
            checked = row if isinstance(row, Note) else self._columns.checked(row)
        except Exception:  # noqa: BLE001 - a hostile object among a user's names or values costs its own row and no other
            self._sender.counters["dropped"] += 1
            return
        if checked is None:
            return
        pressing = is_pressing(checked)
        self.pressing = self.pressing or pressing
        self.newest = max(self.newest, checked[0])
        if isinstance(checked, Note):
            rows.append(checked)
        elif not self._packs(checked):
            self._captured.delivers(checked[3])
            rows.append(checked)

    def _packs(self, row: tuple[Any, ...]) -> bool:
        if len(row) == _OURS:
            return self._packer.add(*row)
        if len(row) == _LOGGED:
            step, wall, monotonic, metrics = row
            return self._packer.add(step, wall, monotonic, (*metrics,), metrics.values())
        return False
