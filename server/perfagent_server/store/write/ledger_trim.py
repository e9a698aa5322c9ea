"""Keeps the ledger short: a source's gapless beginning becomes one number, `seq_floor`.

Who needs it is read from the tables and not remembered, so that it holds after a restart and for frames without
content: sources that have ended or are silent, and those with many frames.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
from sqlalchemy import ColumnElement, Connection, delete, func, or_, select, update
from sqlalchemy.orm import aliased

from perfagent_server.database import Database
from perfagent_server.store.tables import ledger, source
from perfagent_server.store.write.lifecycle import ENDED

__all__ = ["LedgerTrim", "trim_ledger"]

EVERY_S = 60.0
SILENT_S = 60.0
MANY = 1000
_AT_ONCE = 20
"""Sources in one job."""
_FRAMES_AT_ONCE = MANY
"""Of a source in one job: with 20 of them 20,000 rows, which take 30 ms. All 200,000 of a source took 280."""


class LedgerTrim:
    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock
        self._due = 0.0

    def run_when_due(self) -> None:
        now = self._clock()
        if now < self._due:
            return
        self._due = now + EVERY_S
        with self._database.read() as connection:
            found = _trimmable(connection, now - SILENT_S)
        for at in range(0, len(found), _AT_ONCE):  # between two jobs other writers have their turn
            some = found[at : at + _AT_ONCE]
            while some:
                some = self._database.write(functools.partial(_trim_some, source_ids=some))


def _trimmable(connection: Connection, silent_before: float) -> list[str]:
    """Sources of which the frame after the floor is in the ledger, and that are done or have many."""
    # From one source to the next, each by one step down the index: a DISTINCT would go through all rows.
    first = select(func.min(ledger.c.source).label("id")).cte("with_frames", recursive=True)
    before = aliased(first)
    following = select(func.min(ledger.c.source)).where(ledger.c.source > before.c.id).scalar_subquery()
    with_frames = first.union_all(select(following).where(before.c.id.is_not(None)))

    def has(seq: ColumnElement[int]) -> ColumnElement[bool]:
        return select(ledger.c.seq).where(ledger.c.source == source.c.id, ledger.c.seq == seq).exists()

    is_done = or_(source.c.state.in_(ENDED), source.c.contact <= silent_before)
    return list(
        connection.execute(
            select(source.c.id)
            .join(with_frames, with_frames.c.id == source.c.id)
            .where(has(source.c.seq_floor + 1), or_(is_done, has(source.c.seq_floor + MANY)))
        ).scalars()
    )


def _trim_some(connection: Connection, source_ids: Sequence[str]) -> list[str]:
    """Answers those sources that may have more."""
    return [source_id for source_id in source_ids if trim_ledger(connection, source_id) == _FRAMES_AT_ONCE]


def trim_ledger(connection: Connection, source_id: str) -> int:
    """Raises a source's `seq_floor` over the frames that follow it without a gap, so many at once, and drops these from
    the ledger. Answers how many they are."""
    floor = connection.execute(select(source.c.seq_floor).where(source.c.id == source_id)).scalar()
    if floor is None:
        return 0
    seqs = np.array(
        connection.execute(
            select(ledger.c.seq)
            .where(ledger.c.source == source_id, ledger.c.seq > floor)
            .order_by(ledger.c.seq)
            .limit(_FRAMES_AT_ONCE)
        )
        .scalars()
        .all(),
        np.int64,
    )
    gapless = int(np.cumprod(seqs == floor + 1 + np.arange(len(seqs))).sum())
    if gapless:
        connection.execute(update(source).where(source.c.id == source_id).values(seq_floor=floor + gapless))
        connection.execute(delete(ledger).where(ledger.c.source == source_id, ledger.c.seq <= floor + gapless))
    return gapless
