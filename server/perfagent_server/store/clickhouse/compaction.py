"""The compactor of a server whose samples lie in ClickHouse: takes tail rows that the rules have judged there.

A batch: its number is noted in SQL as pending, one INSERT sends it, one SQL transaction removes its tail rows and raises the
newest number that counts (marks.py). A crash or a timeout in between leaves the samples in the tail, where they are read;
what may have arrived is dead from then on, and the samples go out again under a new number. So a sample counts once,
whatever ClickHouse makes of an INSERT. The token of the INSERT is for a second try by a proxy or the driver, and the key
of the table for one that comes later than ClickHouse remembers tokens.

While ClickHouse is away the tail grows; behind `most_waiting` samples senders have to wait.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, bindparam, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from perfagent.errors import ResourceError
from perfagent_server.database import Database, StorageError
from perfagent_server.store.clickhouse.connection import Away, ClickHouse
from perfagent_server.store.clickhouse.marks import Batches, batches_of, keep_batches
from perfagent_server.store.clickhouse.rollups import Rollups
from perfagent_server.store.clickhouse.rows import INPUT, Packed, TailRow, pack
from perfagent_server.store.clickhouse.schema import cell, ensure_schema, sample
from perfagent_server.store.codec.tail import is_readable
from perfagent_server.store.interface import Check
from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.shards import SHARDS, STORAGE, AllShards, StoreLeases
from perfagent_server.store.statements import Prepared, compile_all, insert_for
from perfagent_server.store.tables import cursor, sample_deletion, sample_extent, sample_rollup, series, tail
from perfagent_server.store.write.compaction import put_last
from perfagent_server.store.write.ledger_trim import LedgerTrim

__all__ = ["BatchPolicy", "ClickHouseCompactor"]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_DEAD_KEPT_S = 3600.0
"""An INSERT that ended in doubt may still be running that long."""

_judged = Prepared(select(cursor.c.tail_id).where(cursor.c.name.startswith("rules/")))
_newest_row = Prepared(select(func.max(tail.c.id)))
_fresh = Prepared(
    select(func.sum(tail.c.samples), func.count()).where(
        tail.c.id > bindparam("after"), tail.c.id <= bindparam("limit")
    )
)
_oldest = Prepared(
    select(tail.c.received)
    .where(tail.c.id > bindparam("after"), tail.c.id <= bindparam("limit"))
    .order_by(tail.c.id)
    .limit(1)
)
_rows = Prepared(
    select(*(tail.c[name] for name in TailRow._fields))
    .where(tail.c.id > bindparam("after"), tail.c.id <= bindparam("limit"))
    .order_by(tail.c.id)
    .limit(bindparam("count"))
)
_drop_row = Prepared(delete(tail).where(tail.c.id == bindparam("_id")))
_series_of_rank = Prepared(
    select(series.c.name, series.c.id).where(series.c.run == bindparam("run"), series.c.rank == bindparam("rank"))
)


def _grow(dialect: str) -> object:
    statement = insert_for(dialect)(sample_extent)
    new, old = statement.excluded, sample_extent.c
    least, most = (func.least, func.greatest) if dialect == "postgresql" else (func.min, func.max)
    return statement.on_conflict_do_update(
        index_elements=[old.series, old.attempt],
        set_={
            "first_step": least(old.first_step, new.first_step),
            "last_step": most(old.last_step, new.last_step),
            "samples": old.samples + new.samples,
        },
    )


_note_late = Prepared(
    update(sample_rollup)
    .where(
        sample_rollup.c.run == bindparam("_run"),
        sample_rollup.c.attempt == bindparam("_attempt"),
        sample_rollup.c.step > bindparam("first_step"),
    )
    .values(late=bindparam("number"))
)
_put_extent = Prepared(_grow, [column.name for column in sample_extent.columns])


class _GoneError(Exception):
    """Rows that were to be replaced are no longer there: their run was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """When the tail goes to ClickHouse: with so many samples, or when its oldest frame is `age_s` old. Few large INSERTs are
    what ClickHouse is made for.

    pause_s: between two looks. rows_at_once, bytes_at_once: of tail rows in one batch. most_waiting: samples in the tail
    from which on senders have to wait, some 2 to 10 bytes each. away_pause_s: between two tries when ClickHouse is away."""

    samples: int = 262_144
    age_s: float = 30.0
    pause_s: float = 1.0
    away_pause_s: float = 5.0
    rows_at_once: int = 8192
    samples_at_once: int = 500_000
    bytes_at_once: int = 16 * 2**20
    most_waiting: int = 200_000_000


class ClickHouseCompactor:
    """See SampleCompactor. rules_enabled: wait for the cursors of the rules. leases: where several servers share the database,
    the one that holds STORAGE sends."""

    def __init__(
        self,
        database: Database,
        clickhouse: ClickHouse,
        *,
        rules_enabled: bool = True,
        leases: StoreLeases | None = None,
        policy: BatchPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        compile_all(database.engine)
        self._database, self._clickhouse = database, clickhouse
        self._rules_enabled, self._clock = rules_enabled, clock
        self._leases: StoreLeases = AllShards() if leases is None else leases
        self._term: int | None = 0
        self.policy = policy or BatchPolicy()
        self.counters = {
            "rows": 0, "samples": 0, "batches": 0, "dead_batches": 0, "failures": 0, "away": 0, "waiting_samples": 0,
        }  # fmt: skip
        self.rollups = Rollups(database, clickhouse)
        self._ledger = LedgerTrim(database, clock=clock)
        self._looked = 0  # tail rows up to this id are counted as waiting
        self._passed = 0  # tail rows up to this id that are still there cannot be read
        self._is_ready = False
        self._once = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_behind(self) -> bool:
        """Too much waits in the tail: senders have to wait."""
        return self.counters["waiting_samples"] >= self.policy.most_waiting

    @property
    def trouble(self) -> str:
        away = self._clickhouse.away_since
        waiting = self.counters["waiting_samples"]
        return (
            f"ClickHouse at {self._clickhouse.address} does not answer: {waiting:,} samples wait in the database"
            if away
            else ""
        )

    def thin(self, scope: Scope, before: float, check: Check) -> int:
        """Deletes the samples older than `before` (Unix seconds) in the runs of a scope; cells stay: see Rollups.thin().
        After a failure of ClickHouse the next call tries again. check: runs first in each SQL transaction that marks samples
        for deletion."""
        with self._once:
            if not self._is_mine():
                return 0
            try:
                self._prepare()
                return self.rollups.thin(scope, before, self._clock(), check, self._stop.is_set)
            except StorageError:
                return 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="perfagent-compactor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._clickhouse.close()

    def _run(self) -> None:
        pause = self.policy.pause_s
        while not self._stop.wait(pause):
            pause = self.policy.pause_s
            try:
                self._ledger.run_when_due()
                self.run_once()
            except Away:
                pause = self.policy.away_pause_s
            except StorageError:
                continue
            except Exception:  # noqa: BLE001 - the thread must live as long as the server
                self.counters["failures"] += 1
                pause = self.policy.away_pause_s
                _log.exception(
                    "samples could not be sent to ClickHouse; they stay in the database and it is tried again"
                )

    def run_once(self, *, everything: bool = False) -> int:
        """See SampleCompactor. Raises Away when ClickHouse does not answer: the rows stay in the tail, and readable."""
        before = self.counters["rows"]
        with self._once:
            if not self._is_mine():
                return 0
            limit = self._look()
            try:
                while not self._stop.is_set() and self._is_due(limit, everything) and self._batch(limit):
                    pass
                self._tidy()
            except Away:
                self.counters["away"] += 1
                raise
        return self.counters["rows"] - before

    def _is_mine(self) -> bool:
        """Whether this server does it. After another one did, the numbers that it gave are read anew."""
        term = self._leases.term(STORAGE)
        if term != self._term:
            self._is_ready, self._term, self._passed = False, term, 0
        return term is not None

    def _look(self) -> int:
        """Counts the tail rows that have become eligible; answers the newest eligible id."""
        with self._database.read() as connection:
            newest_id = _newest_row.all(connection, {})[0][0] or 0
            limit = newest_id
            if self._rules_enabled:  # a batch is of all shards
                judged = [upto for (upto,) in _judged.all(connection, {})]
                limit = min(newest_id, *judged) if len(judged) == len(SHARDS) else 0
            if limit > self._looked:
                samples, _ = _fresh.all(connection, {"after": self._looked, "limit": limit})[0]
                self.counters["waiting_samples"] += int(samples or 0)
                self._looked = limit
        return limit

    def _is_due(self, limit: int, everything: bool) -> bool:
        if everything or self.counters["waiting_samples"] >= self.policy.samples:
            return True
        with self._database.read() as connection:
            oldest = _oldest.all(connection, {"after": self._passed, "limit": limit})
        return bool(oldest) and self._clock() - oldest[0][0] >= self.policy.age_s

    def _prepare(self) -> None:
        """Before the first batch: the tables, and what a server that ended has left pending."""
        if self._is_ready:
            if (
                not self._clickhouse.answers()
            ):  # before a number is given: what is refused at the door leaves nothing dead
                raise Away(f"ClickHouse at {self._clickhouse.address} does not answer")
            return
        ensure_schema(self._clickhouse)
        self._write(functools.partial(_give_up_pending, now=self._clock()))  # first: no other server gives numbers now
        with self._database.read() as connection:
            given = batches_of(connection).given
        self._drop_unknown(given)
        self._is_ready = True

    def _drop_unknown(self, given: int) -> None:
        """Rows with numbers that this database has not given: it was restored from a backup that is older than they are.
        They do not count, and must be gone before their numbers are given again. Raises ResourceError where the
        database has given none: then the rows are another's."""
        for table, column in ((sample, "batch"), (cell, "generation")):
            newer = f"{column} > {{given:UInt64}}"
            found = self._clickhouse.run(
                f"SELECT count() FROM {table(self._clickhouse)} WHERE {newer}", {"given": given}, long=True
            )
            if not int(found):
                continue
            if not given:
                raise ResourceError(
                    f"ClickHouse at {self._clickhouse.address} holds samples of another perfagent database; name an empty one"
                )
            _log.warning(
                "%s rows in ClickHouse are newer than this database, which was restored: they are removed", found
            )
            self._clickhouse.run(f"DELETE FROM {table(self._clickhouse)} WHERE {newer}", {"given": given}, long=True)

    def _batch(self, limit: int) -> bool:
        """Sends the oldest rows. False when there are none."""
        self._prepare()
        found = self._oldest_rows(limit)
        if not found:
            self.counters["waiting_samples"] = 0
            return False
        rows, packed = self._pack(found)
        if not packed.samples:  # events only, which are kept elsewhere
            self._write(functools.partial(_store, rows=rows, packed=packed, number=0))
        else:
            number = self._write(functools.partial(_begin, address=str(self._clickhouse.address)))
            try:
                self._send(packed, number)
                self._write(functools.partial(_store, rows=rows, packed=packed, number=number))
            except (_GoneError, IntegrityError):  # what is left of the rows is found again
                self._give_up()
                return True
            except Exception:
                self._give_up()
                raise
            self.counters["batches"] += 1
        if len(rows) < len(found):
            self._passed = found[-1].id
        self.counters["rows"] += len(rows)
        self.counters["samples"] += packed.samples
        self.counters["waiting_samples"] = max(0, self.counters["waiting_samples"] - sum(row.samples for row in found))
        self.rollups.note(packed)
        return True

    def _pack(self, rows: list[TailRow]) -> tuple[list[TailRow], Packed]:
        """What can be read of these rows. The others stay in the tail, and hold up nothing."""
        try:
            return rows, pack(rows)
        except Exception:
            readable = [row for row in rows if is_readable(row.frame)]
            if len(readable) == len(rows):
                raise
            self.counters["failures"] += 1
            _log.exception("%d rows of the tail cannot be read, and stay there", len(rows) - len(readable))
            return readable, pack(readable)

    def _write(self, job: Callable[[Connection], T]) -> T:
        """Writes if this server still is the one that sends."""

        def verified(connection: Connection) -> T:
            self._leases.verify(connection, {STORAGE: -1 if self._term is None else self._term})
            return job(connection)

        return self._database.write(verified, essential=True)

    def _give_up(self) -> None:
        self.counters["dead_batches"] += 1
        self._write(functools.partial(_give_up_pending, now=self._clock()))

    def _oldest_rows(self, limit: int) -> list[TailRow]:
        rows: list[TailRow] = []
        size = samples = 0
        where = {"after": self._passed, "limit": limit, "count": self.policy.rows_at_once}
        with self._database.read() as connection:
            for found in _rows.stream(connection, where):
                row = TailRow._make(found)
                size += len(row.frame)
                samples += row.samples
                if rows and (size > self.policy.bytes_at_once or samples > self.policy.samples_at_once):
                    break
                rows.append(row)
        return rows

    def _send(self, packed: Packed, number: int) -> None:
        self._clickhouse.run(
            f"INSERT INTO {sample(self._clickhouse)} (run, name, rank, attempt, step, batch, row, time, bits) "
            f"SELECT run, name, rank, attempt, step, {number}, place, time, bits FROM input('{INPUT}') "
            "ARRAY JOIN steps AS step, times AS time, words AS bits, rows AS place FORMAT RowBinary",
            data=packed.data,
            settings={
                "insert_deduplication_token": packed.token,
                "async_insert": 0,
                "optimize_on_insert": 0,  # no row of a batch replaces another
            },
            long=True,
        )

    def _tidy(self) -> None:
        """What may wait: cells of what is long enough, rows of runs that are gone, and dead batches."""
        if not self._is_ready:
            return
        self.rollups.run_when_due()
        with self._database.read() as connection:
            gone = connection.execute(
                select(sample_deletion.c.id, sample_deletion.c.run, sample_deletion.c.batch)
            ).all()
            old = [each for each in batches_of(connection).dead if self._clock() - each.since > _DEAD_KEPT_S]
        for key, run, batch in gone:
            wanted = {"run": run, "batch": batch}
            for table, column in ((sample, "batch"), (cell, "generation")):
                self._clickhouse.run(
                    f"DELETE FROM {table(self._clickhouse)} WHERE run = {{run:String}} AND {column} <= {{batch:UInt64}}",
                    wanted,
                    long=True,
                )
            self._database.write(functools.partial(_forget_deletion, key=key))
        for each in old:
            self._clickhouse.run(
                f"DELETE FROM {sample(self._clickhouse)} WHERE batch = {{batch:UInt64}}",
                {"batch": each.number},
                long=True,
            )
        if old:
            self._database.write(functools.partial(_bury, numbers={each.number for each in old}))


def _begin(connection: Connection, address: str) -> int:
    """Gives the next number."""
    batches = batches_of(connection)
    batches.pending, batches.address = batches.given + 1, address
    keep_batches(connection, batches)
    return batches.pending


def _store(connection: Connection, rows: Sequence[TailRow], packed: Packed, number: int) -> None:
    """From now on the batch counts, and the tail no longer has it."""
    if _drop_row.many(connection, [{"_id": row.id} for row in rows]) != len(rows):
        raise _GoneError
    if not number:
        return
    ids: dict[tuple[str, int, str], int] = {}
    for run, rank in {(run, rank) for run, rank, _ in packed.last}:
        for name, series_id in _series_of_rank.all(connection, {"run": run, "rank": rank}):
            ids[run, rank, name] = series_id
    if not packed.last.keys() <= ids.keys():
        raise _GoneError
    _put_extent.rows(connection, [(ids[key], attempt, *extent) for (key, attempt), extent in packed.extents.items()])
    first_steps: dict[tuple[str, int], int] = {}
    for ((run, _, _), attempt), extent in packed.extents.items():
        first_steps[run, attempt] = min(first_steps.get((run, attempt), extent.first_step), extent.first_step)
    _note_late.many(
        connection,
        [
            {"_run": run, "_attempt": attempt, "first_step": first, "number": number}
            for (run, attempt), first in first_steps.items()
        ],
    )
    put_last(connection, [(ids[key], *found) for key, found in packed.last.items()])
    batches = batches_of(connection)
    if batches.pending != number:
        raise _GoneError
    keep_batches(connection, Batches(number, 0, batches.dead, batches.address))


def _give_up_pending(connection: Connection, now: float) -> None:
    batches = batches_of(connection)
    if batches.pending:
        batches.give_up(now)
        keep_batches(connection, batches)


def _forget_deletion(connection: Connection, key: int) -> None:
    connection.execute(delete(sample_deletion).where(sample_deletion.c.id == key))


def _bury(connection: Connection, numbers: set[int]) -> None:
    batches = batches_of(connection)
    batches.dead = [each for each in batches.dead if each.number not in numbers]
    keep_batches(connection, batches)
