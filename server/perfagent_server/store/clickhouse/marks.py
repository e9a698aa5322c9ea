"""Which rows in ClickHouse count: kept in SQL, in the transactions that acknowledge, compact and delete.

Rows go to ClickHouse in batches with rising numbers. The transaction that removes tail rows raises `newest` to the number of
the batch that holds them. A reader's transaction therefore says which batches its tail no longer has: those up to
`newest`, without `dead` ones, whose INSERT ended in doubt and whose samples have gone out again under another number.
Deleting a run notes the newest number given by then: what a run of the same name has later is not deleted with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Connection, func, insert, select

from perfagent_server.store.statements import put
from perfagent_server.store.tables import cursor, sample_deletion, sample_rollup

__all__ = ["CURSOR", "Batches", "Marks", "Rollup", "batches_of", "keep_batches", "marks_of", "note_deletion"]

CURSOR = "samples"
"""The row of the table `cursor`: tail_id is the number of the newest batch that counts."""


class Dead(msgspec.Struct, array_like=True):
    number: int
    since: float  # Unix seconds


class _Extra(msgspec.Struct):
    pending: int = 0
    dead: list[Dead] = msgspec.field(default_factory=list)
    address: str = ""


@dataclass(slots=True)
class Batches:
    """newest: the newest that counts; pending: what an INSERT may be writing now, 0 for none; address: of the ClickHouse
    that holds them."""

    newest: int = 0
    pending: int = 0
    dead: list[Dead] = field(default_factory=list)
    address: str = ""

    @property
    def given(self) -> int:
        """The highest number that any row may have."""
        return max(self.newest, self.pending, *(each.number for each in self.dead), 0)

    def give_up(self, now: float) -> None:
        """What is pending ended in doubt."""
        if self.pending:
            self.dead.append(Dead(self.pending, now))
            self.pending = 0


@dataclass(frozen=True, slots=True)
class Rollup:
    """What of an attempt is in cells: the samples of the steps before `step` that came in batches up to `batch`.
    generations: of the cells that count. thinned: of the steps before that, full resolution is gone. late: the newest batch
    that brought samples of steps before `step`."""

    step: int = 0
    batch: int = 0
    generations: tuple[int, ...] = ()
    thinned: int = 0
    late: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the cells hold all samples of the steps before `step`."""
        return self.late <= self.batch


@dataclass(frozen=True, slots=True)
class Marks:
    """What one transaction sees of one run: batches after `floor` up to `newest` that are not dead."""

    run: str
    floor: int
    newest: int
    dead: tuple[int, ...]
    rollups: Mapping[int, Rollup]  # by attempt

    def parameters(self) -> dict[str, Any]:
        """For CONDITION of reading.py."""
        return {"run": self.run, "floor": self.floor, "newest": self.newest, "dead": list(self.dead)}


def batches_of(connection: Connection) -> Batches:
    row = connection.execute(select(cursor.c.tail_id, cursor.c.extra).where(cursor.c.name == CURSOR)).first()
    if row is None:
        return Batches()
    extra = msgspec.msgpack.decode(row.extra, type=_Extra) if row.extra else _Extra()
    return Batches(row.tail_id, extra.pending, extra.dead, extra.address)


def keep_batches(connection: Connection, batches: Batches) -> None:
    extra = msgspec.msgpack.encode(_Extra(batches.pending, batches.dead, batches.address))
    put(connection, cursor, {"name": CURSOR, "tail_id": batches.newest, "extra": extra})


def marks_of(connection: Connection, run: str) -> Marks:
    batches = batches_of(connection)
    floor = connection.execute(select(func.max(sample_deletion.c.batch)).where(sample_deletion.c.run == run)).scalar()
    rollups = {
        row.attempt: Rollup(row.step, row.batch, tuple(msgspec.msgpack.decode(row.generations)), row.thinned, row.late)
        for row in connection.execute(select(sample_rollup).where(sample_rollup.c.run == run))
    }
    dead = tuple(each.number for each in batches.dead if each.number <= batches.newest)
    return Marks(run, floor or 0, batches.newest, dead, rollups)


def note_deletion(connection: Connection, run: str) -> None:
    """In the transaction that deletes a run: its rows in ClickHouse count no longer, and are to be removed."""
    given = batches_of(connection).given
    if given:
        connection.execute(insert(sample_deletion).values(run=run, batch=given))
