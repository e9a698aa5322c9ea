"""The compactor: turns tail rows that the rules have judged into blocks, rollups and last values, off the ack path.

It reads a rank's rows and the blocks they fall into in one read transaction, works out the blocks (block_builder.py)
and rollups (rollups.py) that they become, and hands these to the writer as one short job that writes them and removes
the rows. That a frame comes here once only is the ledger's work, and the tail rows disappear in the transaction that writes
their blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, func, select
from sqlalchemy.exc import IntegrityError

from perfagent_server.database import Database, StorageError
from perfagent_server.store.codec.blocks import BLOCK_STEPS
from perfagent_server.store.codec.rollups import rollup_rows
from perfagent_server.store.codec.tail import is_readable, last_step
from perfagent_server.store.codec.wide_blocks import Place, drop_bundles, put_bundles, whole_bundles
from perfagent_server.store.shards import AllShards, Shards, shard_of
from perfagent_server.store.statements import Prepared, compile_all, insert_for
from perfagent_server.store.tables import axis, block, cursor, last, rollup, series, tail
from perfagent_server.store.write.block_builder import KnownSeries, TailRow, Work, pack, unbundled
from perfagent_server.store.write.ledger_trim import LedgerTrim

__all__ = ["CompactionPolicy", "Compactor", "drop_unused_axes", "put_last", "thin_bundles"]

_log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """When a rank's tail is worth compacting.

    Rewriting a half-filled block costs as much as writing it: in a bulk upload each block was written up to three
    times. So with `samples` of all its series together, or `frames`, there are whole blocks to write, and frames that
    reach into the newest block stay in the tail. When the oldest is `age_s` old, everything is compacted.

    pause_s: between two looks. rows_at_once, samples_at_once: what one job of the writer may replace; ranks share it.
    Jobs of 100,000 or 200,000 samples took up to 20 % more CPU, since the two threads hand each other the interpreter
    at every row; jobs of a million made no difference.

    bytes_at_once: how much of a rank's tail, unpacked, is read and worked on together. That takes up to three times as
    much memory, and holds the writer for up to 30 ms of CPU; with 32 MB it was 50. (The newest block of 2000 names does
    not fit: a bulk upload of so many takes a third more CPU than with 32 MB.)
    """

    samples: int = 131_072
    frames: int = 240
    age_s: float = 30.0
    pause_s: float = 1.0
    rows_at_once: int = 2048
    samples_at_once: int = 400_000
    bytes_at_once: int = 16 * 2**20


@dataclass(slots=True)
class _Due:
    """A rank's rows that may be compacted. at_samples, at_frames: with so many it is worth another look."""

    at_samples: int
    at_frames: int
    frames: int = 0
    samples: int = 0
    oldest: float = float("inf")

    def add(self, samples: int, received: float) -> None:
        self.frames += 1
        self.samples += samples
        self.oldest = min(self.oldest, received)


class _GoneError(Exception):
    """Rows that were to be replaced are no longer there."""


def _over(table: Table) -> Callable[[str], Any]:
    """An INSERT that writes over the row with the same key."""

    def build(dialect: str) -> Any:
        statement = insert_for(dialect)(table)
        rest = {column.name: statement.excluded[column.name] for column in table.columns if not column.primary_key}
        return statement.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=rest)

    return build


def _newer_last(dialect: str) -> Any:
    statement = insert_for(dialect)(last)
    new = statement.excluded
    newer = (new.attempt > last.c.attempt) | (
        (new.attempt == last.c.attempt)
        & ((new.step > last.c.step) | ((new.step == last.c.step) & (new.time >= last.c.time)))
    )
    rest = {name: new[name] for name in _LAST_COLUMNS}
    return statement.on_conflict_do_update(index_elements=[last.c.series], set_=rest, where=newer)


_LAST_COLUMNS = ("attempt", "step", "time", "value")
_judged = Prepared(select(cursor.c.name, cursor.c.tail_id).where(cursor.c.name.startswith("rules/")))
_newest_row = Prepared(select(func.max(tail.c.id)))
# Summed up in Python: a GROUP BY goes through the index of all rows that wait, new or not.
_fresh_rows = Prepared(
    select(tail.c.id, tail.c.run, tail.c.rank, tail.c.samples, tail.c.received).where(
        tail.c.id > bindparam("after"), tail.c.id <= bindparam("limit")
    )
)
_rows_of_rank = Prepared(
    select(*(tail.c[name] for name in TailRow._fields))
    .where(tail.c.run == bindparam("run"), tail.c.rank == bindparam("rank"), tail.c.id <= bindparam("limit"))
    .order_by(tail.c.id)
    .limit(bindparam("count"))
)
_newest_block = (
    select(block.c.block)
    .where(block.c.series == series.c.id, block.c.attempt == bindparam("attempt"))
    .order_by(block.c.block.desc())
    .limit(1)
    .scalar_subquery()
)
_series_of_rank = Prepared(
    select(series.c.name, series.c.id, _newest_block.label("newest")).where(
        series.c.run == bindparam("run"), series.c.rank == bindparam("rank")
    )
)
_drop_row = Prepared(delete(tail).where(tail.c.id == bindparam("_id")))
_put_axis = Prepared(
    lambda dialect: insert_for(dialect)(axis).on_conflict_do_nothing(), [column.name for column in axis.columns]
)
_put_block = Prepared(_over(block), [column.name for column in block.columns])
_put_rollup = Prepared(_over(rollup), [column.name for column in rollup.columns])
_put_last = Prepared(_newer_last, ("series", *_LAST_COLUMNS))


class Compactor:
    """rules_enabled: wait for the cursors of the rules; without an engine everything may be compacted at once. shards:
    those whose runs this server compacts."""

    def __init__(
        self,
        database: Database,
        *,
        rules_enabled: bool = True,
        shards: Shards | None = None,
        policy: CompactionPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        _keep_freed_memory()
        compile_all(database.engine)
        self._database, self._rules_enabled, self._clock = database, rules_enabled, clock
        self.policy = policy or CompactionPolicy()
        self._shards: Shards = AllShards() if shards is None else shards
        self.counters = {"rows": 0, "samples": 0, "blocks": 0, "merged_blocks": 0, "bundles": 0, "failures": 0}
        self._due: dict[tuple[str, int], _Due] = {}
        self._terms: Mapping[str, int] = {}  # held shard -> its term at the newest look
        self._looked: dict[str, int] = {}  # held shard -> tail rows up to this id are counted in _due
        self._ledger = LedgerTrim(database, clock=clock)
        self._work = Work()  # what has been gathered
        self._writing: tuple[Work, Future[None]] | None = None  # what the writer has in hand
        self._is_careful = (
            False  # after a failure, rows that cannot be read are left in the tail, and hold up no others
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_behind(self) -> bool:
        return False  # blocks lie in the database of the tail: whoever can write the one can write the other

    @property
    def trouble(self) -> str:
        return ""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="perfagent-compactor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.policy.pause_s):
            try:
                self.run_once()
                self._ledger.run_when_due()
            except StorageError:
                continue  # full or locked: the rows stay where they are, and readable
            except Exception:  # noqa: BLE001 - the thread must live as long as the server
                self.counters["failures"] += 1
                _log.exception("compaction failed; the samples stay in the tail and it is tried again")

    def run_once(self, *, everything: bool = False) -> int:
        """Compacts what is due, or everything that may be. Answers the number of tail rows that are gone."""
        limits = self._look()
        now = self._clock()
        policy = self.policy
        before = self.counters["rows"]
        try:
            for rank, due in list(self._due.items()):
                if self._stop.is_set():
                    break
                old = everything or now - due.oldest >= policy.age_s
                if old or due.samples >= due.at_samples or due.frames >= due.at_frames:
                    del self._due[rank]
                    self._work.ranks.append(rank)
                    # A rank's next rows must find its blocks written, so what it adds goes out before more of it is
                    # read.
                    while self._gather(rank, limits[shard_of(rank[0])], whole_blocks=not old):
                        self._write()
                        self._settle()
                        self._work.ranks.append(rank)
                    if self._is_enough():
                        self._write()
            self._write()
            self._settle()
        except StorageError:
            raise
        except Exception:
            self._is_careful = True
            raise
        finally:
            self._abandon()
        return self.counters["rows"] - before

    def _is_enough(self) -> bool:
        rows = self._work.rows
        return len(rows) >= self.policy.rows_at_once or sum(row.samples for row in rows) >= self.policy.samples_at_once

    def _look(self) -> dict[str, int]:
        """Counts the tail rows that have become eligible; answers the newest eligible id of each shard that is held."""
        held = self._shards.held
        same = {shard for shard, term in held.items() if self._terms.get(shard) == term}
        self._terms = held
        self._looked = {shard: self._looked.get(shard, 0) if shard in same else 0 for shard in sorted(held)}
        self._due = {rank: due for rank, due in self._due.items() if shard_of(rank[0]) in same}
        if not held:
            return {}
        with self._database.read() as connection:
            newest_id = _newest_row.all(connection, {})[0][0] or 0
            limits = dict.fromkeys(held, newest_id)
            if self._rules_enabled:
                judged = {name.removeprefix("rules/"): upto for name, upto in _judged.all(connection, {})}
                limits = {shard: min(judged.get(shard, 0), newest_id) for shard in held}
            after, limit = min(self._looked.values()), max(limits.values())
            if all(limits[shard] <= looked for shard, looked in self._looked.items()):
                return limits
            rows = _fresh_rows.all(connection, {"after": after, "limit": limit})
        for id_, run, rank, samples, received in rows:
            shard = shard_of(run)
            if shard not in held or not self._looked[shard] < id_ <= limits[shard]:
                continue
            due = self._due.get((run, rank))
            if due is None:
                due = self._due[run, rank] = _Due(self.policy.samples, self.policy.frames)
            due.add(samples, received)
        self._looked = {shard: max(looked, limits[shard]) for shard, looked in self._looked.items()}
        return limits

    def _gather(self, rank: tuple[str, int], limit: int, *, whole_blocks: bool) -> bool:
        """Adds a rank's rows to the work. whole_blocks: leaves those in the tail that belong to the newest block, as
        long as that is not full. True when there may be more rows."""
        where = {"run": rank[0], "rank": rank[1], "limit": limit, "count": self.policy.rows_at_once}
        with self._database.read() as connection:
            rows, more = self._oldest_rows(_rows_of_rank.stream(connection, where))
            taken = _of_whole_blocks(rows) if whole_blocks else rows
            if more and not taken:  # nothing is whole in all that is read at once
                taken = rows
            if len(taken) < len(rows) and not more:
                left = {row.id for row in rows} - {row.id for row in taken}
                self._wait_for_more(rank, [row for row in rows if row.id in left])
            if not taken:
                return False
            for attempt in sorted({row.attempt for row in taken}):
                found = _series_of_rank.all(connection, {**where, "attempt": attempt})
                known = {name: KnownSeries(series_id, newest) for name, series_id, newest in found}
                pack(
                    connection,
                    [row for row in taken if row.attempt == attempt],
                    Place(*rank, attempt),
                    known,
                    self._work,
                )
        self._work.rows += taken
        return more

    def _oldest_rows(self, found: Iterable[Sequence[Any]]) -> tuple[list[TailRow], bool]:
        """As many of a rank's rows as are worked on at once, and whether there may be more."""
        rows: list[TailRow] = []
        count = size = 0
        for row in map(TailRow._make, found):
            count += 1
            size += len(row.frame) + 8 * row.samples
            if rows and size > self.policy.bytes_at_once:
                return rows, True
            if not self._is_careful or is_readable(row.frame):
                rows.append(row)
        return rows, count == self.policy.rows_at_once

    def _wait_for_more(self, rank: tuple[str, int], rows: Sequence[TailRow]) -> None:
        """Counts rows that stay in the tail: another look when as much again has come, or when they are old."""
        due = self._due[rank] = _Due(self.policy.samples, self.policy.frames)
        for row in rows:
            due.add(row.samples, row.received)
        due.at_samples += due.samples
        due.at_frames += due.frames

    def _write(self) -> None:
        """Hands the work to the writer. That writes while the next ranks are read and packed: one job at a time."""
        work = self._work
        if not work.rows:
            work.ranks.clear()
            return
        with self._database.read() as connection:
            rollups = rollup_rows(connection, work)
        self._settle()
        terms = {shard: self._terms.get(shard, -1) for shard in {shard_of(run) for run, _ in work.ranks}}

        def job(connection: Connection) -> None:
            self._shards.verify(connection, terms)
            _store(connection, work, rollups)

        self._writing = work, self._database.submit(job)
        self._work = Work()

    def _settle(self) -> None:
        """Waits until the writer is done with the work that it was handed."""
        if self._writing is None:
            return
        work, done = self._writing
        try:
            done.result()
        except (_GoneError, IntegrityError):  # a run was deleted meanwhile: what is left of the work is found again
            self._look_again(work)
            self._writing = None
            return
        self._writing = None
        self.counters["rows"] += len(work.rows)
        self.counters["samples"] += sum(row.samples for row in work.rows)
        self.counters["blocks"] += len(work.blocks)
        self.counters["merged_blocks"] += work.merged_blocks
        self.counters["bundles"] += len(work.bundles)

    def _abandon(self) -> None:
        """After a failure: what is not written stays in the tail and is looked at again."""
        if self._writing is not None:
            work, done = self._writing
            with contextlib.suppress(Exception):  # the failure that led here is the one to report
                done.result()
            self._look_again(work)
        self._look_again(self._work)
        self._work, self._writing = Work(), None

    def _look_again(self, work: Work) -> None:
        for rank in work.ranks:
            self._due[rank] = _Due(0, 0)


def _keep_freed_memory() -> None:
    """glibc returns what arrays of some 100 kB leave to the system at once, and takes it again page by page for the
    next ones:
    as much work as the arithmetic itself. Up to 32 MB stay with the process instead. Other C libraries are left alone.
    (A single arena for all threads made no difference.)"""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            mallopt(parameter, 32 * 2**20)


def _of_whole_blocks(rows: Sequence[TailRow]) -> list[TailRow]:
    """The rows without a step in the newest block of their attempt, unless that is full."""
    last = {row.id: last_step(row.frame) for row in rows}
    ends: dict[int, int] = {}
    for row in rows:
        ends[row.attempt] = max(ends.get(row.attempt, -1), last[row.id])
    return [row for row in rows if last[row.id] < (ends[row.attempt] + 1) // BLOCK_STEPS * BLOCK_STEPS]


def _store(connection: Connection, work: Work, rollups: list[tuple[Any, ...]]) -> None:
    """The job: short, because everything is worked out already."""
    if _drop_row.many(connection, [{"_id": row.id} for row in work.rows]) != len(work.rows):
        raise _GoneError
    if not drop_bundles(connection, work.opened):
        raise _GoneError
    put_bundles(connection, work.bundles)
    _put_axis.rows(connection, sorted(work.axes.values()))  # their keys are anything: in order they share pages
    _put_block.rows(connection, work.blocks)
    drop_unused_axes(connection, work.stale - work.axes.keys())
    _put_rollup.rows(connection, rollups)
    put_last(connection, [(series_id, *found) for series_id, found in work.last.items()])


def put_last(connection: Connection, rows: Sequence[tuple[int, int, int, float, bytes]]) -> None:
    """Rows of `last`, where they are newer than those there: (series id, attempt, step, time, value)."""
    _put_last.rows(connection, rows)


def thin_bundles(connection: Connection, ids: Sequence[int], blocks_at_once: int) -> int:
    """Turns these bundles into blocks that have cells only. Answers how many blocks these are: `blocks_at_once`, and what
    the last bundle has beyond that; bundles beyond them stay."""
    work = Work()
    for bundle in whole_bundles(connection, ids, blocks_at_once):
        where = {"run": bundle.place.run, "rank": bundle.place.rank, "attempt": bundle.place.attempt}
        newest = {series_id: number for _, series_id, number in _series_of_rank.all(connection, where)}
        unbundled(bundle, newest, work)
    rollups = rollup_rows(connection, work)
    work.axes.clear()
    work.blocks = [(*row[:-2], None, None) for row in work.blocks]  # without axis and payload, the last two columns
    _store(connection, work, rollups)
    return len(work.blocks)


def drop_unused_axes(connection: Connection, keys: Iterable[int]) -> None:
    """Removes those of these axes that no block has any more."""
    ordered = sorted(keys)
    for start in range(0, len(ordered), 1000):
        some = ordered[start : start + 1000]
        used = select(block.c.axis).where(block.c.axis == axis.c.key).exists()
        connection.execute(delete(axis).where(axis.c.key.in_(some), ~used))
