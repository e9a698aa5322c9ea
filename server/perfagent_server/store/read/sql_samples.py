"""Compacted samples in SQL: what the readers ask of blocks, bundles, rollups and last values. See samples.py."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, bindparam, func, select

from perfagent_server.store.codec.aggregates import Cells, Floats, Ints, decode_cells, of_samples
from perfagent_server.store.codec.blocks import (
    BLOCK_STEPS,
    CELL_STEPS,
    Samples,
    decode_axis,
    decode_block,
    decode_values,
    merged,
)
from perfagent_server.store.codec.rollups import CHUNK_CELLS, LEVELS, rolled_until
from perfagent_server.store.codec.wide_blocks import Place, bundled_samples, bundles_of_rank, last_of_run
from perfagent_server.store.samples import Newest, Part, StoredSeries
from perfagent_server.store.statements import Prepared, among
from perfagent_server.store.tables import attempt as attempt_table
from perfagent_server.store.tables import axis, block, last, rollup, series

__all__ = ["SqlSamples", "last_values", "newest_row"]

_last_values = Prepared(
    select(series.c.id, series.c.rank, series.c.name, last.c.attempt, last.c.step, last.c.time, last.c.value)
    .outerjoin(last, last.c.series == series.c.id)
    .where(series.c.run == bindparam("run"))
)


class SqlSamples:
    """See SampleSnapshot: what one transaction sees."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection, self._run = connection, run

    def series(self, names: Sequence[str], rank: int | None) -> dict[str, StoredSeries]:
        ids = series_ids(self._connection, self._run, names, rank)
        ends = (
            _ends(self._connection, self._run, [each for of in ids.values() for each in of])
            if any(ids.values())
            else {}
        )
        return {name: _SqlSeries(self._connection, of, ends) for name, of in ids.items()}

    def newest(self) -> Iterator[tuple[str, int, Newest | None]]:
        keys: dict[int, tuple[str, int]] = {}
        for series_id, name, rank, found in last_values(self._connection, self._run):
            keys[series_id] = (name, rank)
            yield name, rank, found
        for series_id, found in last_of_run(self._connection, self._run):
            yield *keys[series_id], found

    def newest_up_to(self, rank: int, names: Collection[str], attempt: int, top: int) -> Iterator[tuple[str, Newest]]:
        ids = {each: name for name, of in series_ids(self._connection, self._run, names, rank).items() for each in of}
        for series_id, found in _newest_in_blocks(self._connection, list(ids), attempt, top):
            yield ids[series_id], found
        place = Place(self._run, rank, attempt)
        for series_id, found in _newest_in_bundles(self._connection, place, set(ids), top):
            yield ids[series_id], found


class _SqlSeries:
    """See StoredSeries. rank_of: by the id of its series; all_ends: as _ends() answers them, also those of other names."""

    def __init__(
        self, connection: Connection, rank_of: dict[int, int], all_ends: dict[tuple[int, int], tuple[int, int, int]]
    ) -> None:
        self._connection, self._rank_of = connection, rank_of
        self._ids = {rank: series_id for series_id, rank in rank_of.items()}
        mine = {
            (rank_of[series_id], attempt): ends
            for (series_id, attempt), ends in all_ends.items()
            if series_id in rank_of
        }
        self._last_block = {key: last_block for key, (_, _, last_block) in mine.items()}
        self.ends = {key: (low, high) for key, (low, high, _) in mine.items()}

    @property
    def ranks(self) -> Collection[int]:
        return self._ids.keys()

    def loose(self) -> dict[tuple[int, int], Samples]:
        found: dict[tuple[int, int], Samples] = {}
        for rank, attempt, samples in bundled_samples(self._connection, list(self._rank_of)) if self._rank_of else ():
            before = found.get((rank, attempt))
            found[rank, attempt] = samples if before is None else merged([before, samples])
        return found

    def cells(
        self, ranks: Collection[int], attempt: int, first: int, end: int, width: int
    ) -> Iterator[tuple[int, Cells]]:
        # Series whose newest blocks lie in the same group of blocks have been rolled up to the same step.
        together: dict[int, list[int]] = {}
        for rank in ranks:
            last_block = self._last_block.get((rank, attempt))
            if last_block is not None:
                together.setdefault(rolled_until(last_block), []).append(self._ids[rank])
        for rolled, ids in together.items():
            for series_id, cells in _stored(self._connection, ids, attempt, first, end, width, rolled):
                yield self._rank_of[series_id], cells

    def parts(self, attempt: int, first: int, end: int) -> Sequence[Part]:
        rows = _payloads(self._connection, list(self._rank_of), attempt, first, end)
        return [Part(row.block, partial(_samples_of, row)) for row in rows]

    def count(self, attempt: int, first: int, end: int) -> int:
        where = _between(self._connection, list(self._rank_of), attempt, first, end)
        whole = [block.c.first_step >= first, block.c.last_step <= end]
        query = select(func.coalesce(func.sum(block.c.samples), 0)).where(*where, *whole)
        return int(self._connection.execute(query).scalar_one())


def series_ids(connection: Connection, run: str, names: Collection[str], rank: int | None) -> dict[str, dict[int, int]]:
    """Name -> id of each of its series -> rank."""
    wanted = select(series.c.id, series.c.rank, series.c.name).where(series.c.run == run, series.c.name.in_(names))
    if rank is not None:
        wanted = wanted.where(series.c.rank == rank)
    found: dict[str, dict[int, int]] = {name: {} for name in names}
    for row in connection.execute(wanted):
        found[row.name][row.id] = row.rank
    return found


def last_values(connection: Connection, run: str) -> Iterator[tuple[int, str, int, Newest | None]]:
    """(series id, name, rank, its row of `last`) of every series."""
    for series_id, rank, name, attempt, step, time, value in _last_values.all(connection, {"run": run}):
        found = None if attempt is None else (attempt, step, time, struct.unpack("<d", value)[0])
        yield series_id, name, rank, found


def _samples_of(row: Row[Any]) -> Samples | None:
    return None if row.payload is None else decode_block(row.axis, row.payload)


def _payloads(connection: Connection, ids: list[int], attempt: int, first: int, end: int) -> Sequence[Row[Any]]:
    if not ids or end < first:
        return []
    return connection.execute(
        _payload_columns().where(*_between(connection, ids, attempt, first, end)).order_by(block.c.block)
    ).all()


def _stored(
    connection: Connection, ids: list[int], attempt: int, first: int, end: int, width: int, rolled: int
) -> Iterator[tuple[int, Cells]]:
    """(series, cells) of one attempt's rollups and blocks, every cell inside one span of `width` steps."""
    level = max((level for level in LEVELS if level <= width), default=0)
    if level:
        unit = max(level, BLOCK_STEPS)  # rollups answer for whole blocks only
        low, high = -(-first // unit) * unit, min((end + 1) // unit * unit, rolled)
        if low < high:
            yield from _rollups(connection, ids, attempt, low, high - 1, level)
            if first < low:
                yield from _blocks(connection, ids, attempt, first, low - 1, width)
            if high <= end:
                yield from _blocks(connection, ids, attempt, high, end, width)
            return
    yield from _blocks(connection, ids, attempt, first, end, width)


def _rollups(
    connection: Connection, ids: list[int], attempt: int, first: int, end: int, level: int
) -> Iterator[tuple[int, Cells]]:
    span = level * CHUNK_CELLS
    rows = connection.execute(
        select(rollup.c.series, rollup.c.chunk, rollup.c.cells).where(
            among(connection, rollup.c.series, ids),
            rollup.c.attempt == attempt,
            rollup.c.level == level,
            rollup.c.chunk.between(first // span, end // span),
        )
    ).all()
    for series_id, mine in _by_series(rows):
        cells, _ = decode_cells([row.cells for row in mine], [row.chunk * span for row in mine], level)
        yield series_id, cells.between(first, end, level)


def _blocks(
    connection: Connection, ids: list[int], attempt: int, first: int, end: int, width: int
) -> Iterator[tuple[int, Cells]]:
    if width < CELL_STEPS:
        for row in _payloads(connection, ids, attempt, first, end):
            yield row.series, _visible(row, first, end)
        return
    columns = [block.c.series, block.c.block, block.c.first_step, block.c.last_step]
    summary = width >= BLOCK_STEPS
    columns += (
        [block.c.min, block.c.max, block.c.sum, block.c.samples, block.c.nonfinite, block.c.first_time]
        if summary
        else [block.c.cells]
    )
    rows = connection.execute(select(*columns).where(*_between(connection, ids, attempt, first, end))).all()
    edges = sorted({row.block for row in rows if row.first_step < first or row.last_step > end})
    whole = [row for row in rows if row.first_step >= first and row.last_step <= end]
    if summary and whole:
        yield from _summaries(whole)
    elif not summary:
        for series_id, mine in _by_series(whole):
            yield series_id, _cells_of(mine)
    if edges:
        inside = {(row.series, row.block) for row in whole}
        for row in connection.execute(
            _payload_columns().where(*_between(connection, ids, attempt, first, end), block.c.block.in_(edges))
        ):
            if (row.series, row.block) not in inside:
                yield row.series, _visible(row, first, end)


def _visible(row: Row[Any], first: int, end: int) -> Cells:
    """The samples of a block between two steps; its cells, as near as they go, where retention took the samples."""
    if row.payload is not None:
        samples = decode_block(row.axis, row.payload).between(first, end)
        return of_samples(samples.step, samples.time, samples.value)
    cells = _cells_of([row])
    return cells.take((cells.step + (CELL_STEPS - 1) >= first) & (cells.step <= end))


def _by_series(rows: Iterable[Any]) -> Iterable[tuple[int, list[Any]]]:
    found: dict[int, list[Any]] = {}
    for row in rows:
        found.setdefault(row.series, []).append(row)
    return found.items()


def _cells_of(rows: Sequence[Row[Any]]) -> Cells:
    """The cells of blocks."""
    return decode_cells([row.cells for row in rows], [row.block * BLOCK_STEPS for row in rows], CELL_STEPS)[0]


def _summaries(rows: Sequence[Row[Any]]) -> Iterator[tuple[int, Cells]]:
    """Whole blocks as one cell each."""
    for series_id, mine in _by_series(rows):
        finite = [row.min is not None for row in mine]
        yield (
            series_id,
            Cells(
                np.array([row.block * BLOCK_STEPS for row in mine], np.int64),
                np.array([row.min if some else np.inf for row, some in zip(mine, finite, strict=True)]),
                np.array([row.max if some else -np.inf for row, some in zip(mine, finite, strict=True)]),
                np.array([row.sum for row in mine], np.float64),
                np.array([row.samples for row in mine], np.int64),
                np.array([row.nonfinite for row in mine], np.int64),
                np.array([row.first_time for row in mine], np.float64),
            ),
        )


def _between(connection: Connection, ids: list[int], attempt: int, first: int, end: int) -> list[Any]:
    return [
        among(connection, block.c.series, ids),
        block.c.attempt == attempt,
        block.c.block.between(first // BLOCK_STEPS, end // BLOCK_STEPS),
    ]


def _payload_columns() -> Any:
    columns = (block.c.series, block.c.block, block.c.payload, block.c.cells, axis.c.payload.label("axis"))
    return select(*columns).outerjoin(axis, axis.c.key == block.c.axis)


def _ends(connection: Connection, run: str, ids: list[int]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(series, attempt) -> first step, last step and last block of what is in blocks. Two look-ups each, however many
    blocks."""
    mine = (block.c.series == series.c.id) & (block.c.attempt == attempt_table.c.attempt)
    oldest = select(block.c.first_step).where(mine).order_by(block.c.block).limit(1).scalar_subquery()
    highest = select(block.c.last_step).where(mine).order_by(block.c.block.desc()).limit(1).scalar_subquery()
    rows = connection.execute(
        select(series.c.id, attempt_table.c.attempt, oldest.label("low"), highest.label("high"))
        .join_from(series, attempt_table, attempt_table.c.run == series.c.run)
        .where(series.c.run == run, among(connection, series.c.id, ids))
    )
    return {(row.id, row.attempt): (row.low, row.high, row.high // BLOCK_STEPS) for row in rows if row.low is not None}


def _newest_in_blocks(
    connection: Connection, ids: Sequence[int], attempt: int, top: int
) -> Iterator[tuple[int, Newest]]:
    """(series, sample) out of each one's newest block that begins before the cut."""
    each = block.alias()
    newest = (
        select(each.c.block)
        .where(each.c.series == series.c.id, each.c.attempt == attempt, each.c.first_step <= top)
        .order_by(each.c.block.desc())
        .limit(1)
        .scalar_subquery()
    )
    rows = connection.execute(
        select(block.c.series, block.c.payload, axis.c.key, axis.c.payload.label("axis"))
        .join_from(series, block, (block.c.series == series.c.id) & (block.c.attempt == attempt))
        .join(axis, axis.c.key == block.c.axis)  # without one, retention took the samples
        .where(among(connection, series.c.id, ids), block.c.block == newest)
    )
    alike: dict[int, list[tuple[int, bytes, bytes]]] = {}
    for series_id, payload, key, axis_payload in rows:
        alike.setdefault(key, []).append((series_id, payload, axis_payload))
    for members in alike.values():
        step, time = decode_axis(members[0][2])
        at = newest_row(step, time, top)
        if at is not None:
            values = decode_values([payload for _, payload, _ in members])[:, at].tolist()
            for (series_id, _, _), value in zip(members, values, strict=True):
                yield series_id, (attempt, int(step[at]), float(time[at]), value)


def _newest_in_bundles(
    connection: Connection, place: Place, wanted: set[int], top: int
) -> Iterator[tuple[int, Newest]]:
    for bundle in bundles_of_rank(connection, place, wanted):
        at = newest_row(bundle.step, bundle.time, top)
        if at is not None:
            for series_id, value in zip(bundle.series.tolist(), bundle.value[:, at].tolist(), strict=True):
                if series_id in wanted:
                    yield series_id, (place.attempt, int(bundle.step[at]), float(bundle.time[at]), value)


def newest_row(step: Ints, time: Floats, top: int) -> int | None:
    """Of the rows up to the step `top`; the last one of equals."""
    visible = np.flatnonzero(step <= top)
    if not len(visible):
        return None
    return int(visible[np.lexsort((time[visible], step[visible]))[-1]])
