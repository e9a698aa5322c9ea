"""Takes rows out of the training thread's deque and turns each into what can be written down.

Runs seven times a second with cold caches: rows are packed as they come (row_packing.py), usual steps are kept unread,
all others are asked one by one. What was taken is written down (drafts.py) and let go of, since
objects that live on make the garbage collector run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.decode.finished_steps import is_plain, is_ready, note_of, row_of, with_user_loss
from perfagent.delivery.captured_rows import CapturedRows
from perfagent.delivery.columns import INT64, Columns
from perfagent.delivery.drafts import is_pressing, is_pressing_block, rows_of
from perfagent.delivery.row_packing import Packed, Packer
from perfagent.delivery.wakeup import yield_gil
from perfagent.device import device_was_read, listen_here
from perfagent.step.overflow import OverflowMark
from perfagent.step.pending_logs import CapturedLog, EarlyLog
from perfagent.step.row import StepRow
from perfagent.step.trace import entry_count

if TYPE_CHECKING:
    from perfagent.delivery.columns import AnyRow
    from perfagent.delivery.handoff import Handoff

__all__ = ["Collector", "Drained"]

DEFERRED_S = 1800.0
"""How long a row may wait for its device. It holds up no other series, and while one rank saves for minutes, or until a
collective times out, nothing arrives on the others."""
_AT_A_TIME = 32
"""Rows that are taken in 0.1 ms."""
_AT_ONCE_S = 1e-5
"""log() calls that are no further apart are made in one loop, with nothing of a training between them."""
_LOSSES_KEPT = 100
"""Losses that the user logged for steps to come: of more, those of steps that will never come are forgotten."""
_EARLY = frozenset((EarlyLog, CapturedLog))
_OURS = 5
"""Fields of a row of ours, of which names and values stand apart; a user's has four."""


class Drained(NamedTuple):
    """What one tick found: notes of steps, and all other rows."""

    notes: list[Any]
    packed: list[Packed]

    @property
    def total(self) -> int:
        return len(self.notes) + sum(block.rows for block in self.packed)


_NOTHING = Drained([], [])


class Collector:
    """before_row: called before a row that cannot be written down as a note is made: earlier notes are read first.

    pressing: of the rows last collected, one holds what must not wait for the next frame. newest: the highest step so
    far. What was dropped because rows came too fast is counted as "overflows".
    """

    def __init__(
        self, handoff: Handoff, columns: Columns, before_row: Callable[[], None], lost: Callable[[object], None]
    ) -> None:
        self._handoff, self._before_row, self._lost = handoff, before_row, lost
        self._captured = CapturedRows(handoff, columns)
        self._packer = Packer(columns, self._captured.delivered.update)
        self._notes: list[Any] = []
        self._held_steps: deque[tuple[float, Any]] = deque()
        self._held_logs: deque[tuple[float, Any]] = deque()
        """Rows that wait for their device, and since when. Behind a step only steps wait, behind a user's log only those."""
        self._called = -math.inf
        """When log() was called last."""
        self._epoch = 0.0
        self.aside: list[EarlyLog] = []
        """log() calls whose step is not known yet: those behind them need not wait for that."""
        self._passed = 0
        """Rows that were taken or dropped so far, as far as that is known: up to the last mark."""
        self.pressing = False
        self.newest = 0
        OverflowMark.put(handoff.rows)

    @property
    def waits(self) -> bool:
        """Whether a row is there that was not taken yet, or rows were dropped that have to be counted."""
        rows: deque[Any] = self._handoff.rows
        if self.aside or self._held_steps or self._held_logs or self._captured.waits or len(rows) > 1:
            return True
        return len(rows) == 1 and not (type(rows[0]) is OverflowMark and rows[0].fresh)

    def collect(self, now: float, *, last: bool) -> Drained:
        """The rows that can be written down; those of one series in their order. last: nothing is waited for."""
        self.pressing = False
        if not self.waits:
            return _NOTHING
        waiting: deque[Any] = self._handoff.rows
        most, taken, newest, stepped = len(waiting), 0, 0, self._handoff.stepped
        p = self._handoff.progress
        plain = p is not None and p.clock is None and not device_was_read()
        if not plain:
            listen_here()  # now: what these rows hold of a device was taken before
        # a loss that the user logs later takes the place of ours
        settled = p.completed + p.opened if p is not None else 0
        losses = p.losses.user_losses if p is not None else {}
        self._epoch = time.time() - time.monotonic()
        self._notes = notes = []
        self._release(now, last=last)
        while taken < most and waiting:
            row = waiting[0]
            kind = type(row)
            held = self._held_steps if kind is StepRow else self._held_logs
            if kind is OverflowMark:
                self._compare(row, taken)
                most -= 1
                continue
            if kind is tuple and (len(row) == _OURS or not held):
                self._add(row)
            elif (
                kind is StepRow
                and plain
                and row[0] < settled
                and row[8] is None
                and row[3] == 1
                and type(row[7]) is list
            ):
                stepped[0] += 1
                stepped[1] += entry_count(row[7])
                newest = row[0]
                notes.append(with_user_loss(p, row) if losses and p is not None else row)
            elif kind in _EARLY and not row.settled and not last:
                self.aside.append(row)
            elif (held and kind is not CapturedLog) or not self._ask(row, now, now, last=last):
                if plain and kind is StepRow:
                    break  # it waits for the next step to begin, and takes the short way then
                held.append((now, row))
            waiting.popleft()
            taken += 1
            if not taken % _AT_A_TIME and taken + _AT_A_TIME <= most:  # not for the sake of a few more
                yield_gil(len(waiting))
        self._passed += taken
        self.newest = max(self.newest, newest)
        if len(losses) > _LOSSES_KEPT:
            for step in [*losses]:  # a copy: the training thread may be adding to them
                if step < self.newest:
                    losses.pop(step, None)
        captured = self._captured.take(self._read_now, last=last)
        packed = self._packer.take() + captured
        self.pressing = self.pressing or any(map(is_pressing_block, packed))
        return Drained(notes, packed)

    def _release(self, now: float, *, last: bool) -> None:
        """Takes those that waited for their device and are there by now, and those that have their step."""
        for held in (self._held_steps, self._held_logs):
            while held and self._ask(held[0][1], held[0][0], now, last=last):
                held.popleft()
        # they get their steps at once, on another thread: in the midst of that none is taken
        if self.aside and (last or self.aside[-1].settled):
            while self.aside and self._ask(self.aside[0], now, now, last=last):
                self.aside.pop(0)

    def _ask(self, row: Any, since: float, now: float, *, last: bool) -> bool:
        """Takes a row that may have to be waited for. False while it has. since: when it was asked first."""
        p = self._handoff.progress
        with contextlib.suppress(Exception):  # a device that was lost answers every query with its own error
            if type(row) is CapturedLog:  # it is written down when its names are known
                self._handoff.logged[0] += 1
                self._handoff.logged[1] += len(row.metrics)
                self._captured.arriving.append(row)
                return True
            if isinstance(row, StepRow) and p is not None:
                if is_ready(p, row):
                    self._take_step(row)
                    return True
            elif type(row) is tuple or row.ready():
                self._add(row if type(row) is tuple else row.row())
                return True
            if now - since < DEFERRED_S and not last:
                return False
        self._handoff.counters["dropped"] += 1
        return True

    def _take_step(self, step: StepRow) -> None:
        p = self._handoff.progress
        assert p is not None
        if is_plain(p, step):
            note = note_of(p, step)
            self.newest = max(self.newest, step.step)
            self.pressing = self.pressing or is_pressing(note)
            self._notes.append(note)
            return
        self._read_now()
        row = row_of(p, step)
        self.pressing = self.pressing or is_pressing(row)
        self._add((*row[:3], (*row[3],), [*row[3].values()]))

    def _add(self, row: AnyRow) -> None:
        """Packs what may be stored of a row."""
        if len(row) == 5:
            step, wall, monotonic, names, values = row
        else:
            step, wall, monotonic, metrics = row
            names, values = (*metrics,), [*metrics.values()]
            logged, at = self._handoff.logged, 2 if 0.0 <= monotonic - self._called < _AT_ONCE_S else 0
            logged[at] += 1
            logged[at + 1] += len(names)
            self._called = monotonic
        wall = wall or self._epoch + monotonic  # a user's call reads one clock
        try:
            if self.newest < step < INT64:  # one beyond is refused, and so would be what is reported under it
                self.newest = step
            self._packer.add(step, wall, monotonic, names, values)
        except Exception:  # noqa: BLE001 - a hostile object among a user's names or values costs its own row and no other
            self._handoff.counters["dropped"] += 1

    def _read_now(self) -> None:
        """Reads the steps that were taken so far, in place of their notes."""
        self._before_row()  # notes are read in the order of their steps
        notes, self._notes[:] = [*self._notes], []
        for row in rows_of(notes, self._handoff.reader, self._lost):
            self._add((*row[:3], (*row[3],), [*row[3].values()]))

    def _compare(self, mark: OverflowMark, taken: int) -> None:
        """What was handed in before the mark with what was taken of it; the difference was dropped."""
        dropped = mark.before - self._passed - taken
        if dropped > 0:
            self._handoff.counters["overflows"] += dropped
        self._passed += dropped
        mark.renew(self._handoff.rows)
