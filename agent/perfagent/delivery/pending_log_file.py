"""Keeps log() calls on disk while their step is not known yet, so that a kill before the first step does not lose them.

Each waiting call is written to a separate file, with a provisional step: the step that it has if the process ends
now. When the true step is known, the call is drafted like any other row, and the file is deleted. Between these two
writes the file names the tick that holds the call. After a kill, whoever finds both copies takes the call once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from perfagent.delivery.columns import clean_name, number
from perfagent.delivery.drafts import Draft
from perfagent.delivery.recovery import drafted
from perfagent.delivery.segments import BAD_RECORD, DRAFT, Segments, framed, number_of, numbered, records

if TYPE_CHECKING:
    from perfagent.step.pending_logs import EarlyLog
    from perfagent.step.state import Progress

__all__ = ["Early"]

_AGE_S = 0.05
"""A younger one is not written down: in a fast loop the next call settles it before the next tick."""
_KIND = "early"

_encoder = msgspec.msgpack.Encoder()


class Early:
    """The file of one source. What the disk does not take, or is no plain data, is not kept: nothing else depends on
    it."""

    def __init__(self, files: Segments) -> None:
        self._files = files
        self.kept = 0

    def keep(self, waiting: Sequence[EarlyLog], progress: Progress, context: list[Any]) -> None:
        """waiting: in their order, those that were kept before at their head."""
        if self.kept and self._files.growing(_KIND) is None and not numbered(self._files.folder, _KIND):
            self.kept = 0  # somebody has deleted them
        new = waiting[self.kept :]
        if not new or new[0].age_s(time.monotonic()) < _AGE_S:
            return
        rows = []
        before = sum(not log.goes_on for log in waiting[: self.kept])
        for log in new:
            try:
                if not log.can_be_read():
                    break
                rows.append(_plain(log.row() if log.settled else log.row_at(progress.step_of_early(before))))
                before += not log.goes_on
            except Exception:  # noqa: BLE001 - a device that was lost answers every query with its own error
                break
        if rows and self._write(Draft(context, rows), 0):
            self.kept += len(rows)

    def joins(self, tick: int, context: list[Any]) -> bool:
        """The tick to be written next holds them all, with their true steps. True when that is on the disk."""
        return self.kept > 0 and self._write(Draft(context, []), tick)

    def forget(self) -> None:
        """That tick is written."""
        if not self.kept:
            return
        self.kept = 0
        self._files.rotate(_KIND)
        for path in numbered(self._files.folder, _KIND):  # more than one where the script had closed it
            self._files.delete(path)

    def left(self) -> tuple[Draft, int]:
        """What a dead process left: the rows that waited last, and the tick that holds them if it was written; 0: none
        does."""
        rows: list[Any] = []
        context: list[Any] = []
        holder = 0
        for path in numbered(self._files.folder, _KIND):
            self.kept = 1  # something is there to be forgotten
            self._files.number = max(self._files.number, number_of(path))
            with contextlib.suppress(OSError, *BAD_RECORD):
                for _, kind, payload in records(path.read_bytes()):
                    if kind != DRAFT:
                        continue
                    number, draft = drafted(payload)
                    if holder and not number:  # what was there before is in a tick, and another log waited
                        rows, holder = [], 0
                    rows += draft.rows
                    context, holder = draft.context, number
        return Draft(context, rows), holder

    def _write(self, draft: Draft, tick: int) -> bool:
        try:
            record = framed(DRAFT, _encoder.encode((tick, *draft)))
        except (TypeError, ValueError, OverflowError):  # a whole number beyond 64 bits
            return False
        return bool(self._files.append(_KIND, record))


def _plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the values that a tick would refuse, and count."""
    *known, metrics = row
    found = ((clean_name(key), number(value)) for key, value in metrics.items())
    return *known, {name: value for name, value in found if name is not None and value is not None}
