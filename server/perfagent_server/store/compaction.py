"""The compactor: turns tail rows that the rules have judged into blocks, rollups and last values, off the ack path.

It reads a rank's rows and the blocks they fall into in one read transaction, does the arithmetic outside of any transaction,
and hands the result to the writer as one short job that writes blocks and rollups and removes the rows. Series that were sent
together share their rows, so one pass of numpy serves all of them.

Pieces may come late, twice around, or out of order: what lands in a block that exists is merged with it. That a frame comes
here once only is the ledger's work, and the tail rows disappear in the transaction that writes their blocks.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Table, bindparam, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from perfagent_server.database import Database, StorageError
from perfagent_server.store.blocks import (
    BLOCK_STEPS,
    CELL_STEPS,
    Samples,
    axis_key,
    decode_axis,
    decode_values,
    encode_axis,
    encode_values,
    merged,
)
from perfagent_server.store.prepared import Prepared
from perfagent_server.store.rollups import (
    CHUNK_CELLS,
    LEVELS,
    Cells,
    Floats,
    Grid,
    aggregate,
    concatenate,
    decode_cells,
    encode_cells,
    reduced,
)
from perfagent_server.store.sql import ROLL_BLOCKS, TailGroup, insert_for, judged_until, unpack_tail
from perfagent_server.store.tables import axis, block, last, ledger, rollup, series, source, tail

__all__ = ["CompactionPolicy", "Compactor", "drop_unused_axes", "trim_ledger"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """When a rank's tail is worth compacting. Rewriting a half-filled block costs as much as writing it, so it waits until
    there is something to merge: `samples` of all its series together, `frames`, or the oldest being `age_s` old.

    pause_s: between two looks. rows_at_once, samples_at_once: what one job of the writer may replace; ranks share it.
    """

    samples: int = 40_960
    frames: int = 120
    age_s: float = 30.0
    pause_s: float = 1.0
    rows_at_once: int = 2048
    samples_at_once: int = 400_000


@dataclass(slots=True)
class _Due:
    frames: int = 0
    samples: int = 0
    oldest: float = float("inf")


@dataclass(slots=True)
class _Work:
    """What one job will write."""

    rows: list[Any] = field(default_factory=list)  # tail rows that it replaces
    ranks: list[tuple[str, int]] = field(default_factory=list)
    newest: dict[tuple[int, int], int] = field(default_factory=dict)  # (series, attempt) -> newest block before the job
    blocks: list[tuple[Any, ...]] = field(default_factory=list)  # as _put_block takes them
    axes: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # key -> row, as _put_axis takes it
    stale: set[int] = field(default_factory=set)  # keys of axes that some block no longer has
    # (series, attempt) -> block -> its cells: as such, or as a row of a grid, since few blocks are rolled up at once
    cells: dict[tuple[int, int], dict[int, Cells | tuple[Grid, int]]] = field(default_factory=dict)
    last: dict[int, tuple[int, int, float, bytes]] = field(default_factory=dict)


class _Row(NamedTuple):
    """A tail row."""

    id: int
    attempt: int
    source: str
    received: float
    samples: int
    frame: bytes


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
        (new.attempt == last.c.attempt) & ((new.step > last.c.step) | ((new.step == last.c.step) & (new.time >= last.c.time)))
    )
    rest = {name: new[name] for name in _LAST_COLUMNS}
    return statement.on_conflict_do_update(index_elements=[last.c.series], set_=rest, where=newer)


_LAST_COLUMNS = ("attempt", "step", "time", "value")
_newest_row = Prepared(select(func.max(tail.c.id)))
# Summed up in Python: a GROUP BY goes through the index of all rows that wait, new or not.
_fresh_rows = Prepared(
    select(tail.c.run, tail.c.rank, tail.c.samples, tail.c.received).where(
        tail.c.id > bindparam("after"), tail.c.id <= bindparam("limit")
    )
)
_rows_of_rank = Prepared(
    select(*(tail.c[name] for name in _Row._fields))
    .where(tail.c.run == bindparam("run"), tail.c.rank == bindparam("rank"), tail.c.id <= bindparam("limit"))
    .order_by(tail.c.id)
    .limit(bindparam("count"))
)
_series_of_rank = Prepared(
    select(series.c.name, series.c.id).where(series.c.run == bindparam("run"), series.c.rank == bindparam("rank"))
)
_newest_block = Prepared(
    select(block.c.block)
    .where(block.c.series == bindparam("series"), block.c.attempt == bindparam("attempt"))
    .order_by(block.c.block.desc())
    .limit(1)
)
_drop_row = Prepared(delete(tail).where(tail.c.id == bindparam("_id")))
_put_axis = Prepared(lambda dialect: insert_for(dialect)(axis).on_conflict_do_nothing(), [column.name for column in axis.columns])
_put_block = Prepared(_over(block), [column.name for column in block.columns])
_put_rollup = Prepared(_over(rollup), [column.name for column in rollup.columns])
_put_last = Prepared(_newer_last, ("series", *_LAST_COLUMNS))


class Compactor:
    """rules_enabled: wait for the cursor "rules"; without an engine everything may be compacted at once."""

    def __init__(
        self,
        database: Database,
        *,
        rules_enabled: bool = True,
        policy: CompactionPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._rules_enabled, self._clock = database, rules_enabled, clock
        self.policy = policy or CompactionPolicy()
        self.counters = {"rows": 0, "samples": 0, "blocks": 0, "merged_blocks": 0, "failures": 0}
        self._due: dict[tuple[str, int], _Due] = {}
        self._looked = 0  # tail rows up to this id are counted in _due
        self._ledger: dict[str, int] = {}  # frames compacted per source since its ledger was trimmed
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

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
            except StorageError:
                continue  # full or locked: the rows stay where they are, and readable
            except Exception:  # noqa: BLE001 - the thread must live as long as the server
                self.counters["failures"] += 1
                _log.exception("compaction failed; the samples stay in the tail and it is tried again")

    def run_once(self, *, everything: bool = False) -> int:
        """Compacts what is due, or everything that may be. Answers the number of tail rows that are gone."""
        limit = self._look()
        now = self._clock()
        policy = self.policy
        before = self.counters["rows"]
        work = _Work()
        for rank, due in list(self._due.items()):
            if self._stop.is_set():
                break
            if everything or due.samples >= policy.samples or due.frames >= policy.frames or now - due.oldest >= policy.age_s:
                del self._due[rank]
                # A rank's next rows must find its blocks written, so what it adds goes out before more of it is read.
                while self._gather(work, rank, limit):
                    work = self._write(work)
                if len(work.rows) >= policy.rows_at_once or sum(row.samples for row in work.rows) >= policy.samples_at_once:
                    work = self._write(work)
        self._write(work)
        return self.counters["rows"] - before

    def _look(self) -> int:
        """Counts the tail rows that have become eligible; answers the newest eligible id."""
        with self._database.read() as connection:
            newest_id = _newest_row.all(connection, {})[0][0] or 0
            limit = min(judged_until(connection), newest_id) if self._rules_enabled else newest_id
            if limit <= self._looked:
                return limit
            rows = _fresh_rows.all(connection, {"after": self._looked, "limit": limit})
        for run, rank, samples, received in rows:
            due = self._due.get((run, rank))
            if due is None:
                due = self._due[run, rank] = _Due()
            due.frames += 1
            due.samples += samples
            due.oldest = min(due.oldest, received)
        self._looked = limit
        return limit

    def _gather(self, work: _Work, rank: tuple[str, int], limit: int) -> bool:
        """Adds a rank's rows to the work. True when there may be more of them."""
        where = {"run": rank[0], "rank": rank[1], "limit": limit, "count": self.policy.rows_at_once}
        with self._database.read() as connection:
            rows = [_Row(*row) for row in _rows_of_rank.all(connection, where)]
            if not rows:
                return False
            ids = dict(_series_of_rank.all(connection, where))
            for attempt in sorted({row.attempt for row in rows}):
                self._build(connection, [row for row in rows if row.attempt == attempt], attempt, ids, work)
        work.rows += rows
        work.ranks.append(rank)
        return len(rows) == self.policy.rows_at_once

    def _write(self, work: _Work) -> _Work:
        """Has the writer do the work; answers a fresh one."""
        if not work.rows:
            return work
        with self._database.read() as connection:
            rollups = _rollup_rows(connection, work)
        try:
            self._database.write(functools.partial(_store, work=work, rollups=rollups))
        except (_GoneError, IntegrityError):  # a run was deleted meanwhile: what is left of the work is found again
            for rank in work.ranks:
                self._due[rank] = _Due(oldest=0.0)
            return _Work()
        except BaseException:
            for rank in work.ranks:
                self._due[rank] = _Due(oldest=0.0)
            raise
        self.counters["rows"] += len(work.rows)
        self.counters["samples"] += sum(row.samples for row in work.rows)
        self.counters["blocks"] += len(work.blocks)
        self._trim_ledger(work.rows)
        return _Work()

    def _build(self, connection: Connection, rows: Sequence[Any], attempt: int, ids: dict[str, int], work: _Work) -> None:
        """Blocks of one attempt's rows. Groups with the same names are one matrix; a series that is in several kinds of groups
        is put together from all of them."""
        kinds: dict[tuple[str, ...], list[tuple[TailGroup, float]]] = {}
        for row in rows:
            if row.samples:
                for group in unpack_tail(row.frame):
                    kinds.setdefault(tuple(group.values), []).append((group, row.received))
        holders: dict[str, int] = {}
        for names in kinds:
            for name in names:
                holders[name] = holders.get(name, 0) + 1
        shared: dict[str, list[Samples]] = {}
        for names, groups in kinds.items():
            alone = [name for name in names if holders[name] == 1]
            if alone:
                self._place(connection, [ids[name] for name in alone], attempt, _matrix(groups, alone), work)
            rest = [name for name in names if holders[name] > 1]
            if rest:
                samples = _matrix(groups, rest)
                for at, name in enumerate(rest):
                    shared.setdefault(name, []).append(Samples(samples.step, samples.time, samples.value[at : at + 1]))
        # Series with the same pieces share their rows again: those of equal steps and times go together.
        together: dict[tuple[bytes, bytes], list[tuple[int, Samples]]] = {}
        for name, parts in shared.items():
            samples = merged(parts)
            together.setdefault((samples.step.tobytes(), samples.time.tobytes()), []).append((ids[name], samples))
        for found in together.values():
            samples = found[0][1]
            value = np.concatenate([item.value for _, item in found])
            self._place(
                connection, [series_id for series_id, _ in found], attempt, Samples(samples.step, samples.time, value), work
            )

    def _place(self, connection: Connection, ids: list[int], attempt: int, samples: Samples, work: _Work) -> None:
        """Cuts the samples of `ids` into blocks and merges them with the blocks that exist."""
        samples = merged([samples])
        newest = (attempt, int(samples.step[-1]), float(samples.time[-1]))
        bits = samples.value[:, -1].astype("<f8").tobytes()
        for at, series_id in enumerate(ids):
            before = work.last.get(series_id)
            if before is None or newest >= before[:3]:
                work.last[series_id] = (*newest, bits[8 * at : 8 * at + 8])
        numbers = samples.step // BLOCK_STEPS
        starts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
        ends = np.append(starts[1:], len(numbers))
        wanted = numbers[starts].tolist()
        found_blocks = _newest_block.each(connection, [{"series": series_id, "attempt": attempt} for series_id in ids])
        known = {series_id: row[0] for series_id, row in zip(ids, found_blocks, strict=True) if row is not None}
        work.newest.update({(series_id, attempt): number for series_id, number in known.items()})
        existing: dict[tuple[int, int], Any] = {}
        touched = [series_id for series_id, number in known.items() if number >= wanted[0]]
        if touched:
            columns = (block.c.series, block.c.block, block.c.payload, block.c.cells, block.c.axis)
            here = (block.c.series.in_(touched), block.c.attempt == attempt, block.c.block.in_(wanted))
            existing = {(row.block, row.series): row for row in connection.execute(select(*columns).where(*here))}
        for number, start, end in zip(wanted, starts.tolist(), ends.tolist(), strict=True):
            piece = Samples(samples.step[start:end], samples.time[start:end], samples.value[:, start:end])
            if not existing:
                _encode(ids, attempt, number, piece, work)
                continue
            by_axis: dict[int | None, list[int]] = {}
            for at, series_id in enumerate(ids):
                held_row = existing.get((number, series_id))
                if held_row is not None and held_row.payload is None:
                    _merge_cells(
                        series_id, attempt, number, held_row, Samples(piece.step, piece.time, piece.value[at : at + 1]), work
                    )
                    continue
                by_axis.setdefault(None if held_row is None else held_row.axis, []).append(at)
            for key, members in by_axis.items():
                mine = Samples(piece.step, piece.time, piece.value[members])
                if key is not None:
                    work.stale.add(key)
                    step, time_ = decode_axis(connection.execute(select(axis.c.payload).where(axis.c.key == key)).scalar_one())
                    held = np.stack([decode_values(existing[number, ids[at]].payload) for at in members])
                    mine = merged([Samples(step, time_, held), mine])
                    self.counters["merged_blocks"] += len(members)
                _encode([ids[at] for at in members], attempt, number, mine, work)

    def _trim_ledger(self, rows: Sequence[Any]) -> None:
        """Replaces a source's gapless beginning in the ledger by one number, so that the ledger does not grow with time."""
        for row in rows:
            self._ledger[row.source] = self._ledger.get(row.source, 0) + 1
        ready = [source_id for source_id in {row.source for row in rows} if self._ledger[source_id] >= 1000]
        for source_id in ready:
            del self._ledger[source_id]
            self._database.write(functools.partial(trim_ledger, source_id=source_id))
        if len(self._ledger) > 100_000:
            self._ledger.clear()


def trim_ledger(connection: Connection, source_id: str) -> int:
    """Raises a source's `seq_floor` over all frames that follow it without a gap, and drops these from the ledger."""
    floor = connection.execute(select(source.c.seq_floor).where(source.c.id == source_id)).scalar()
    if floor is None:
        return 0
    seqs = np.array(
        connection.execute(select(ledger.c.seq).where(ledger.c.source == source_id, ledger.c.seq > floor).order_by(ledger.c.seq))
        .scalars()
        .all(),
        np.int64,
    )
    gapless = int(np.cumprod(seqs == floor + 1 + np.arange(len(seqs))).sum())
    if gapless:
        connection.execute(update(source).where(source.c.id == source_id).values(seq_floor=floor + gapless))
        connection.execute(delete(ledger).where(ledger.c.source == source_id, ledger.c.seq <= floor + gapless))
    return gapless


def _matrix(groups: Sequence[tuple[TailGroup, float]], names: Sequence[str]) -> Samples:
    """The groups below each other, values as (series, rows) float64."""
    step = np.frombuffer(b"".join([group.step for group, _ in groups]), "<i8")
    time_ = np.frombuffer(b"".join([group.time for group, _ in groups]), "<f8")
    rows = [group.rows for group, _ in groups]
    if not np.isfinite(time_).all():  # a clock that says NaN: the time at which the frame came is the next best
        time_ = np.where(np.isfinite(time_), time_, np.repeat([received for _, received in groups], rows))
    value = np.empty((len(names), len(step)))
    for at, name in enumerate(names):
        columns = [group.values[name] for group, _ in groups]
        width = len(columns[0]) // rows[0]
        joined = b"".join(columns)
        if len(joined) == width * len(step):  # 4 or 8 bytes an item: only columns of one width come to this sum
            value[at] = np.frombuffer(joined, f"<f{width}")
        else:
            value[at] = np.concatenate(
                [np.frombuffer(column, f"<f{len(column) // count}") for column, count in zip(columns, rows, strict=True)]
            )
    return Samples(step, time_, value)


def _encode(ids: Sequence[int], attempt: int, number: int, samples: Samples, work: _Work) -> None:
    """Block rows of series that share their rows."""
    grid = aggregate((samples.step % BLOCK_STEPS) // CELL_STEPS, samples.time, samples.value)
    cells = encode_cells(grid, grid.key)
    shared = encode_axis(samples.step, samples.time)
    key = axis_key(ids[0], attempt, number, shared)
    work.axes[key] = (key, ids[0], shared)
    payloads = encode_values(samples.value)
    nonfinite = grid.nonfinite.sum(axis=1).tolist()
    low, high = grid.min.min(axis=1).tolist(), grid.max.max(axis=1).tolist()
    with np.errstate(over="ignore", invalid="ignore"):
        total = grid.sum.sum(axis=1)
    total = np.where(np.isnan(total), 0.0, total).tolist()  # +inf and -inf of overflowing sums: a NaN cannot be stored
    rows = len(samples)
    first_step, last_step = int(samples.step[0]), int(samples.step[-1])
    first_time, last_time = float(samples.time.min()), float(samples.time.max())
    for at, series_id in enumerate(ids):
        empty = nonfinite[at] == rows
        work.blocks.append(
            (
                series_id,
                attempt,
                number,
                rows,
                first_step,
                last_step,
                nonfinite[at],
                None if empty else low[at],
                None if empty else high[at],
                total[at],
                first_time,
                last_time,
                cells[at],
                key,
                payloads[at],
            )
        )
        work.cells.setdefault((series_id, attempt), {})[number] = (grid, at)


def _cells_of(held: Cells | tuple[Grid, int], number: int) -> Cells:
    """The cells of block `number`."""
    if isinstance(held, Cells):
        return held
    grid, at = held
    step = number * BLOCK_STEPS + grid.key * CELL_STEPS
    return Cells(step, grid.min[at], grid.max[at], grid.sum[at], grid.count, grid.nonfinite[at], grid.time)


def _merge_cells(series_id: int, attempt: int, number: int, row: Any, samples: Samples, work: _Work) -> None:
    """Late samples for a block whose samples retention has dropped: its cells still take them in."""
    grid = aggregate((samples.step % BLOCK_STEPS) // CELL_STEPS, samples.time, samples.value)
    origin = number * BLOCK_STEPS
    fresh = Cells(origin + grid.key * CELL_STEPS, grid.min[0], grid.max[0], grid.sum[0], grid.count, grid.nonfinite[0], grid.time)
    cells = reduced(concatenate([decode_cells(row.cells, origin, CELL_STEPS), fresh]), CELL_STEPS)
    count, nonfinite = int(cells.count.sum()), int(cells.nonfinite.sum())
    empty = count == nonfinite
    work.blocks.append(
        (
            series_id,
            attempt,
            number,
            count,
            min(int(cells.step[0]), int(samples.step[0])),
            max(int(cells.step[-1]) + CELL_STEPS - 1, int(samples.step[-1])),
            nonfinite,
            None if empty else float(cells.min.min()),
            None if empty else float(cells.max.max()),
            float(cells.sum.sum()),
            float(cells.time.min()),
            float(samples.time.max()),
            _pack(cells, origin, CELL_STEPS),
            None,
            None,
        )
    )
    work.cells.setdefault((series_id, attempt), {})[number] = cells


def _pack(cells: Cells, origin: int, width: int) -> bytes:
    def row(values: Floats) -> Floats:
        return values[None]

    index = (cells.step - origin) // width
    return encode_cells(
        Grid(index, row(cells.min), row(cells.max), row(cells.sum), cells.count, cells.nonfinite[None], cells.time), index
    )[0]


def _rollup_rows(connection: Connection, work: _Work) -> list[dict[str, Any]]:
    """Rollup rows that change: groups of ROLL_BLOCKS blocks that are behind the newest block for the first time, and those
    in which a late piece has landed."""
    rows = []
    for (series_id, attempt), fresh in work.cells.items():
        held = work.newest.get((series_id, attempt), -1)
        now = max(held, *fresh)
        if now // ROLL_BLOCKS == 0:
            continue  # the first group is still open: the usual case, without a look-up
        closed = now // ROLL_BLOCKS
        groups = {number // ROLL_BLOCKS for number in fresh if number // ROLL_BLOCKS < closed}
        if held >= 0 and held // ROLL_BLOCKS < closed:
            groups.add(held // ROLL_BLOCKS)
        if groups:
            rows += _roll(connection, series_id, attempt, sorted(groups), fresh)
    return rows


def _roll(
    connection: Connection, series_id: int, attempt: int, groups: Sequence[int], fresh: dict[int, Cells | tuple[Grid, int]]
) -> list[dict[str, Any]]:
    """Both levels of the rows that hold these groups: the groups' cells are made anew, the rows' other cells stay."""
    numbers = [group * ROLL_BLOCKS + at for group in groups for at in range(ROLL_BLOCKS)]
    blocks = {number: _cells_of(fresh[number], number) for number in numbers if number in fresh}
    for row in connection.execute(
        select(block.c.block, block.c.cells).where(
            block.c.series == series_id, block.c.attempt == attempt, block.c.block.in_(numbers)
        )
    ):
        if row.block not in blocks:
            blocks[row.block] = decode_cells(row.cells, row.block * BLOCK_STEPS, CELL_STEPS)
    made = concatenate([blocks[number] for number in numbers if number in blocks])
    rows = []
    for level in LEVELS:
        span = level * CHUNK_CELLS
        new = reduced(made, level)
        chunks = np.unique(new.step // span).tolist()
        held = {
            row.chunk: decode_cells(row.cells, row.chunk * span, level)
            for row in connection.execute(
                select(rollup.c.chunk, rollup.c.cells).where(
                    rollup.c.series == series_id, rollup.c.attempt == attempt, rollup.c.level == level, rollup.c.chunk.in_(chunks)
                )
            )
        }
        for chunk in chunks:
            cells = new.between(chunk * span, (chunk + 1) * span - 1)
            if chunk in held:
                kept = held[chunk].take(~np.isin(held[chunk].step // (ROLL_BLOCKS * BLOCK_STEPS), groups))
                cells = reduced(concatenate([kept, cells]), level)
            rows.append(
                {
                    "series": series_id,
                    "attempt": attempt,
                    "level": level,
                    "chunk": chunk,
                    "cells": _pack(cells, chunk * span, level),
                }
            )
    return rows


def _store(connection: Connection, work: _Work, rollups: list[dict[str, Any]]) -> None:
    """The job: short, because everything is worked out already."""
    if _drop_row.many(connection, [{"_id": row.id} for row in work.rows]) != len(work.rows):
        raise _GoneError
    _put_axis.rows(connection, list(work.axes.values()))
    _put_block.rows(connection, work.blocks)
    drop_unused_axes(connection, work.stale - work.axes.keys())
    _put_rollup.many(connection, rollups)
    _put_last.rows(connection, [(series_id, *found) for series_id, found in work.last.items()])


def drop_unused_axes(connection: Connection, keys: Iterable[int]) -> None:
    """Removes those of these axes that no block has any more."""
    ordered = sorted(keys)
    for start in range(0, len(ordered), 1000):
        some = ordered[start : start + 1000]
        used = select(block.c.axis).where(block.c.axis == axis.c.key).exists()
        connection.execute(delete(axis).where(axis.c.key.in_(some), ~used))
