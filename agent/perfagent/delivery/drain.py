"""Takes rows out of the training thread's deque and turns each into what can be written down.

Runs seven times a second with cold caches: each row becomes names and values (decode/ reads those of steps) and is packed
at once (row_packing.py). A row is let go of with that, since objects that live on make the garbage collector run, on the
thread that makes the 700th: in a loop of 800 log() calls a second it ran 2 to 3 times a second, up to 13 ms each.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from perfagent.decode.finished_steps import is_ready, row_of
from perfagent.delivery.captured_rows import CapturedRows
from perfagent.delivery.columns import INT64, Columns, is_urgent
from perfagent.delivery.row_packing import Packed, Packer, grouped, is_finite
from perfagent.delivery.wakeup import yield_gil
from perfagent.device import device_was_read, listen_here
from perfagent.step.overflow import OverflowMark
from perfagent.step.pending_logs import CapturedLog, EarlyLog
from perfagent.step.row import StepRow

if TYPE_CHECKING:
    from perfagent.delivery.columns import AnyRow
    from perfagent.delivery.handoff import Handoff

__all__ = ["Collector"]

DEFERRED_S = 1800.0
"""How long a row may wait for its device. It holds up no other series, and while one rank saves for minutes, or until a
collective times out, nothing arrives on the others."""
_AT_A_TIME = 32
"""Rows that are taken in 0.3 ms where they are steps, and in 0.1 ms where they are not."""
_AT_ONCE_S = 1e-5
"""log() calls that are no further apart are made in one loop, with nothing of a training between them."""
_LOSSES_KEPT = 100
"""Losses that the user logged for steps to come: of more, those of steps that will never come are forgotten."""
_EARLY = frozenset((EarlyLog, CapturedLog))
_OURS = 5
"""Fields of a row of ours, of which names and values stand apart; a user's has four."""


class Collector:
    """pressing: of the rows last collected, one holds what must not wait for the next frame. newest: the highest step so
    far. What was dropped because rows came too fast is counted as "overflows".
    """

    def __init__(self, handoff: Handoff, columns: Columns) -> None:
        self._handoff = handoff
        self._captured = CapturedRows(handoff, columns)
        self._packer = Packer(columns, self._captured.delivered.update)
        self._held_steps: deque[tuple[float, Any]] = deque()
        self._held_logs: deque[tuple[float, Any]] = deque()
        """Rows that wait for their device or the next step, and since when. Behind a step only steps wait, behind a user's
        log only those."""
        self._called = -math.inf
        """When log() was called last."""
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

    def collect(self, now: float, *, last: bool) -> list[Packed]:
        """The rows that can be written down; those of one series in their order. last: nothing is waited for."""
        self.pressing = False
        if not self.waits:
            return []
        waiting: deque[Any] = self._handoff.rows
        most, taken = len(waiting), 0
        p = self._handoff.progress
        if p is not None and (p.clock is not None or device_was_read()):
            listen_here()  # now: what these rows hold of a device was taken before
        self._handoff.reader.epoch = time.time() - time.monotonic()
        self._release(now, last=last)
        while taken < most and waiting:
            row = waiting[0]
            kind = type(row)
            held = self._held_steps if isinstance(row, StepRow) else self._held_logs
            if kind is OverflowMark:
                self._compare(row, taken)
                most -= 1
                continue
            if kind is tuple and (len(row) == _OURS or not held):
                self._add(row)
            elif kind in _EARLY and not row.settled and not last:
                self.aside.append(row)
            elif (held and kind is not CapturedLog) or not self._ask(row, now, now, last=last):
                held.append((now, row))
            waiting.popleft()
            taken += 1
            if not taken % _AT_A_TIME and taken + _AT_A_TIME <= most:  # not for the sake of a few more
                yield_gil(len(waiting))
        self._passed += taken
        losses = p.losses.user_losses if p is not None else {}
        if len(losses) > _LOSSES_KEPT:
            for step in [*losses]:  # a copy: the training thread may be adding to them
                if step < self.newest:
                    losses.pop(step, None)
        packed = self._packer.take()
        if self._captured.waits:
            packed += self._captured.take(last=last)
        self.pressing = any(map(_is_pressing, packed))
        return packed

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
        try:
            if isinstance(row, StepRow) and p is not None:
                if is_ready(p, self._handoff.reader, row):
                    step, wall, monotonic, values = row_of(p, self._handoff.reader, row)
                    self._add((step, wall, monotonic, (*values,), values.values()))
                    return True
            elif type(row) is CapturedLog:  # it is written down when its names are known
                self._handoff.logged[0] += 1
                self._handoff.logged[1] += len(row.metrics)
                self._captured.arriving.append(row)
                return True
            elif type(row) is tuple or row.ready():
                self._add(row if type(row) is tuple else row.row())
                return True
            if now - since < DEFERRED_S and not last:
                return False
        except Exception:  # noqa: BLE001, S110 - a device that was lost answers every query with its own error
            pass
        self._handoff.counters["dropped"] += 1
        return True

    def _add(self, row: AnyRow) -> None:
        """Packs what may be stored of a row."""
        if len(row) == 5:
            step, wall, monotonic, names, values = row
        else:
            step, wall, monotonic, metrics = row
            names, values = (*metrics,), metrics.values()
            logged, at = self._handoff.logged, 2 if 0.0 <= monotonic - self._called < _AT_ONCE_S else 0
            logged[at] += 1
            logged[at + 1] += len(names)
            self._called = monotonic
        wall = wall or self._handoff.reader.epoch + monotonic  # a user's call reads one clock
        try:
            if self.newest < step < INT64:  # one beyond is refused, and so would be what is reported under it
                self.newest = step
            self._packer.add(step, wall, monotonic, names, values)
        except Exception:  # noqa: BLE001 - a hostile object among a user's names or values costs its own row and no other
            self._handoff.counters["dropped"] += 1

    def _compare(self, mark: OverflowMark, taken: int) -> None:
        """What was handed in before the mark with what was taken of it; the difference was dropped."""
        dropped = mark.before - self._passed - taken
        if dropped > 0:
            self._handoff.counters["overflows"] += dropped
        self._passed += dropped
        mark.renew(self._handoff.rows)


def _is_pressing(block: Packed) -> bool:
    """Whether one of its rows holds a loss or gradient that is not finite."""
    return (not is_finite(block) or "grad/nonfinite" in block.names) and any(map(is_urgent, grouped([block])))
