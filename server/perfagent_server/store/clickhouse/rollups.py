"""Cells of 16, 256 and 4096 steps in ClickHouse, for charts of long ranges and for what retention has thinned.

They are made out of the samples when an attempt is two spans of 4096 steps further, of all its ranks and names in one
statement, and never changed: what comes late is found beside them, and goes into cells of its own with the next round. Each
round has a number of its own, and counts when SQL says so. (A materialized view would count the samples of a batch that
was sent twice, or that is not to be seen yet.)

Retention thins an attempt at once, up to a step, when all samples before it are old: first the marks say so, and at least
GRACE_S later, when no reader sees the old marks, the samples are deleted.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select, update

from perfagent_server.database import Database, StorageError
from perfagent_server.store.clickhouse.connection import ClickHouse
from perfagent_server.store.clickhouse.marks import Rollup, batches_of, keep_batches, marks_of
from perfagent_server.store.clickhouse.reading import AGGREGATES, COUNTS, LEVELS
from perfagent_server.store.clickhouse.rows import Packed
from perfagent_server.store.clickhouse.schema import cell, sample
from perfagent_server.store.interface import Check
from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.statements import put
from perfagent_server.store.tables import run as run_table
from perfagent_server.store.tables import sample_extent, sample_rollup, series

__all__ = ["GRACE_S", "Rollups"]

SPAN = LEVELS[-1]
GRACE_S = 600.0


class Rollups:
    """Used by one thread at a time."""

    def __init__(self, database: Database, clickhouse: ClickHouse) -> None:
        self._database, self._clickhouse = database, clickhouse
        self._rolled: dict[tuple[str, int], int] = {}  # (run, attempt) -> step up to which there are cells
        self._grown: dict[tuple[str, int], int] = {}  # -> last step that has come

    def note(self, packed: Packed) -> None:
        for ((run, _, _), attempt), extent in packed.extents.items():
            key = (run, attempt)
            self._grown[key] = max(self._grown.get(key, 0), extent.last_step)

    def run_when_due(self) -> None:
        for (run, attempt), last_step in list(self._grown.items()):
            rolled = self._rolled.get((run, attempt))
            if rolled is None:
                with self._database.read() as connection:
                    rolled = marks_of(connection, run).rollups.get(attempt, Rollup()).step
                self._rolled[run, attempt] = rolled
            until = (last_step + 1) // SPAN * SPAN - SPAN
            if until - rolled >= SPAN:
                self.roll(run, attempt, until)
            del self._grown[run, attempt]

    def roll(self, run: str, attempt: int, until: int) -> None:
        """Makes the cells that are missing before the step `until`, a multiple of SPAN."""
        with self._database.read() as connection:
            marks = marks_of(connection, run)
        before = marks.rollups.get(attempt, Rollup())
        until = max(until, before.step)
        generation, token = self._database.write(_next_number), uuid.uuid4().hex
        wanted = marks.parameters() | {
            "attempt": attempt, "from": before.step, "until": until, "seen": before.batch, "generation": generation,
        }  # fmt: skip
        key = "run, name, {level} AS level, rank, attempt, intDiv({step}, {level}) * {level} AS start, {{generation:UInt64}}"
        columns = "run, name, level, rank, attempt, step, generation, low, high, total, count, nonfinite, time"
        low, high, *rest = _split(AGGREGATES)
        self._insert(
            f"INSERT INTO {cell(self._clickhouse)} ({columns}) SELECT {key.format(level=LEVELS[0], step='sample.step')}, "
            f"reinterpretAsUInt64({low}), reinterpretAsUInt64({high}), {', '.join(rest)} "
            f"FROM {sample(self._clickhouse)} AS sample WHERE {COUNTS} AND attempt = {{attempt:Int64}} AND ("
            "(step >= {from:Int64} AND step < {until:Int64}) OR (step < {from:Int64} AND batch > {seen:UInt64})) "
            "GROUP BY run, name, rank, attempt, start",
            wanted,
            f"{token}-{LEVELS[0]}",
        )
        for smaller, level in itertools.pairwise(LEVELS):
            self._insert(
                f"INSERT INTO {cell(self._clickhouse)} ({columns}) SELECT {key.format(level=level, step='cell.step')}, "
                "reinterpretAsUInt64(min(reinterpretAsFloat64(cell.low))), "
                "reinterpretAsUInt64(max(reinterpretAsFloat64(cell.high))), sum(cell.total), sum(cell.count), "
                f"sum(cell.nonfinite), min(cell.time) FROM {cell(self._clickhouse)} AS cell "
                f"WHERE run = {{run:String}} AND attempt = {{attempt:Int64}} AND cell.level = {smaller} "
                "AND generation = {generation:UInt64} GROUP BY run, name, rank, attempt, start",
                wanted,
                f"{token}-{level}",
            )
        after = replace(before, step=until, batch=marks.newest, generations=(*before.generations, generation))
        self._database.write(functools.partial(_keep, run=run, attempt=attempt, rollup=after))
        self._rolled[run, attempt] = until

    def thin(
        self, scope: Scope, before: float, now: float, check: Check, should_stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Drops full resolution of what is older than `before` (Unix seconds). Answers how many attempts it has marked."""
        with self._database.read() as connection:
            marked = connection.execute(
                select(sample_rollup.c.run, sample_rollup.c.attempt, sample_rollup.c.thinned).where(
                    sample_rollup.c.thinned_at < now - GRACE_S
                )
            ).all()
            attempts = connection.execute(
                select(series.c.run, sample_extent.c.attempt, func.max(sample_extent.c.last_step))
                .join_from(sample_extent, series, series.c.id == sample_extent.c.series)
                .join(run_table, run_table.c.id == series.c.run)
                .where(scope.holds(), run_table.c.started < before)
                .group_by(series.c.run, sample_extent.c.attempt)
            ).all()
        for run, attempt, thinned in marked:
            if should_stop():
                return 0
            self._delete(run, attempt, thinned)
        found = 0
        for run, attempt, last_step in attempts:
            if should_stop():
                break
            found += self._mark_thin(scope, run, attempt, last_step, before, now, check)
        return found

    def _mark_thin(
        self, scope: Scope, run: str, attempt: int, last_step: int, before: float, now: float, check: Check
    ) -> int:
        with self._database.read() as connection:
            marks = marks_of(connection, run)
        rollup = marks.rollups.get(attempt, Rollup())
        young = self._clickhouse.rows(
            f"SELECT count(), min(step) FROM {sample(self._clickhouse)} WHERE {COUNTS} AND attempt = {{attempt:Int64}} "
            "AND (step >= {thinned:Int64} OR batch > {seen:UInt64}) AND NOT (time < {before:Float64})",
            marks.parameters()
            | {"attempt": attempt, "thinned": rollup.thinned, "seen": rollup.batch, "before": before},
            [("count", "<u8"), ("step", "<i8")],
        )[0]
        until = int(young["step"]) // SPAN * SPAN if young["count"] else (last_step // SPAN + 1) * SPAN
        if until <= rollup.thinned:
            return 0
        self.roll(run, attempt, until)

        def job(connection: Connection) -> int:
            check(connection)
            if connection.execute(select(run_table.c.id).where(run_table.c.id == run, scope.holds())).first() is None:
                return 0  # it was tagged, or deleted, while the cells were made
            _mark(connection, run, attempt, until, now)
            return 1

        return self._database.write(job, essential=True)

    def _delete(self, run: str, attempt: int, thinned: int) -> None:
        """What came later than the cells were made stays until they are made again."""
        with self._database.read() as connection:
            marks = marks_of(connection, run)
        seen = marks.rollups.get(attempt, Rollup()).batch
        self._clickhouse.run(
            f"DELETE FROM {sample(self._clickhouse)} WHERE {COUNTS} AND attempt = {{attempt:Int64}} "
            "AND step < {thinned:Int64} AND batch <= {seen:UInt64}",
            marks.parameters() | {"attempt": attempt, "thinned": thinned, "seen": seen},
            long=True,
        )
        self._database.write(functools.partial(_deleted, run=run, attempt=attempt, thinned=thinned), essential=True)

    def _insert(self, statement: str, parameters: dict[str, Any], token: str) -> None:
        settings = {"insert_deduplication_token": token, "optimize_aggregation_in_order": 1}
        self._clickhouse.run(statement, parameters, settings=settings, long=True)


def _split(aggregates: str) -> list[str]:
    """The expressions of a list, whose commas inside of brackets do not count."""
    found, depth = [""], 0
    for letter in aggregates:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [each.strip() for each in found]


def _next_number(connection: Connection) -> int:
    """A generation takes a number of the batches: what a run had when it was deleted is then told from what it has later."""
    batches = batches_of(connection)
    if batches.pending:  # by another server: a higher number would make it count before its tail rows are gone
        raise StorageError("samples are being sent to ClickHouse by another server; it is tried again")
    number = batches.given + 1
    batches.newest = number
    keep_batches(connection, batches)
    return number


def _keep(connection: Connection, run: str, attempt: int, rollup: Rollup) -> None:
    if connection.execute(select(run_table.c.id).where(run_table.c.id == run)).first() is None:
        return
    newest = batches_of(connection).newest
    row = connection.execute(
        select(sample_rollup.c.thinned_at).where(sample_rollup.c.run == run, sample_rollup.c.attempt == attempt)
    ).first()
    values = {
        "run": run, "attempt": attempt, "step": rollup.step, "batch": rollup.batch,
        "generations": msgspec.msgpack.encode(rollup.generations), "thinned": rollup.thinned,
        "thinned_at": None if row is None else row.thinned_at,
        # what another server sent while the cells were made may be late
        "late": newest if newest > max(rollup.generations) else 0,
    }  # fmt: skip
    put(connection, sample_rollup, values)


def _of(run: str, attempt: int) -> Any:
    return (sample_rollup.c.run == run) & (sample_rollup.c.attempt == attempt)


def _mark(connection: Connection, run: str, attempt: int, until: int, now: float) -> None:
    connection.execute(update(sample_rollup).where(_of(run, attempt)).values(thinned=until, thinned_at=now))


def _deleted(connection: Connection, run: str, attempt: int, thinned: int) -> None:
    connection.execute(
        update(sample_rollup).where(_of(run, attempt), sample_rollup.c.thinned == thinned).values(thinned_at=None)
    )
