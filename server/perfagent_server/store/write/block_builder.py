"""Packs tail rows into block rows: the frames of a rank become the blocks of its series, as the tables hold them.

Series that were sent together share their rows, so one pass of numpy serves all of them, and all whole blocks of a
frame. (One pass for the blocks of several ranks is no faster: the arrays no longer fit the caches.) Pieces may come
late, twice, or out of order: what lands in a block that exists is merged with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, select

from perfagent_server.store.codec.aggregates import (
    Cells,
    Floats,
    Grid,
    Ints,
    Values,
    aggregate,
    concatenate,
    decode_cells,
    encode_cells,
    encode_rows,
    places,
    reduced,
)
from perfagent_server.store.codec.blocks import (
    BLOCK_STEPS,
    CELL_STEPS,
    Samples,
    axis_key,
    decode_axis,
    decode_values,
    encode_axes,
    encode_values,
    merged,
    step_order,
)
from perfagent_server.store.codec.tail import TailGroup, unpack_tail
from perfagent_server.store.codec.tail_columns import Arrived, matrices, rows_below_each_other
from perfagent_server.store.codec.wide_blocks import BUNDLE_SERIES, Bundle, Place, bundle_rows, bundles_of_rank
from perfagent_server.store.statements import among
from perfagent_server.store.tables import axis, block

__all__ = ["KnownSeries", "Made", "TailRow", "Work", "pack", "unbundled"]


class TailRow(NamedTuple):
    """A tail row."""

    id: int
    attempt: int
    source: str
    received: float
    samples: int
    frame: bytes


class KnownSeries(NamedTuple):
    """A series of a rank. newest: number of its newest block in an attempt, None before the first."""

    id: int
    newest: int | None


class Made(NamedTuple):
    """The cells of blocks that were made together: `numbers` of the first series, then of the next. Few of them are
    rolled up at once, so they are not taken apart before."""

    attempt: int
    series: list[int]
    numbers: Sequence[int]
    cells: Grid | Cells  # a row a block, or the cells of the only block


@dataclass(slots=True)
class Work:
    """What one job will write."""

    rows: list[TailRow] = field(default_factory=list)  # tail rows that it replaces
    ranks: list[tuple[str, int]] = field(default_factory=list)
    newest: dict[tuple[int, int], int] = field(default_factory=dict)  # (series, attempt) -> newest block before the job
    blocks: list[tuple[Any, ...]] = field(default_factory=list)  # rows of the table
    bundles: list[tuple[Any, ...]] = field(default_factory=list)  # rows of the table
    opened: list[int] = field(default_factory=list)  # ids of the bundles whose samples are in blocks or new bundles now
    axes: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # key -> row of the table
    stale: set[int] = field(default_factory=set)  # keys of axes that some block no longer has
    made: list[Made] = field(default_factory=list)
    last: dict[int, tuple[int, int, float, bytes]] = field(default_factory=dict)
    merged_blocks: int = 0


@dataclass(slots=True)
class _Columns:
    """Values of series that share their rows. value: (series, rows)."""

    series: list[KnownSeries]
    value: Values


@dataclass(slots=True)
class _Rows:
    """Rows in step order, and the columns over them: those that fit float32 apart from the others."""

    step: Ints
    time: Floats
    columns: list[_Columns]


def pack(
    connection: Connection, rows: Sequence[TailRow], place: Place, known: dict[str, KnownSeries], work: Work
) -> None:
    """Adds the blocks of one attempt's rows to the work. Groups with the same names are one matrix; a series that is in
    several kinds of groups is put together from all of them."""
    sent: dict[tuple[str, ...], list[Arrived]] = {}
    for row in rows:
        if row.samples:
            for group in unpack_tail(row.frame):
                sent.setdefault(group.names, []).append((group, row.received))
    kinds = _with_bundles(connection, sent, place, known, work)
    holders: dict[str, int] = {}
    for names in kinds:
        for name in names:
            holders[name] = holders.get(name, 0) + 1
    shared: dict[str, list[Samples]] = {}
    for names, groups in kinds.items():
        step, time = rows_below_each_other(groups)
        alone = _Rows(step, time, [])
        for taken, value in matrices(groups, range(len(names))):
            members = [names[place] for place in taken]
            mine = [at for at, name in enumerate(members) if holders[name] == 1]
            if mine:
                whole = len(mine) == len(members)
                alone.columns.append(_Columns([known[members[at]] for at in mine], value if whole else value[mine]))
            if len(mine) < len(members):
                for at, name in enumerate(members):
                    if holders[name] > 1:
                        shared.setdefault(name, []).append(Samples(step, time, value[at : at + 1]))
        if alone.columns:
            _place(connection, alone, place, work)
    # Series with the same pieces share their rows again: those of equal steps and times go together.
    together: dict[tuple[bytes, bytes], list[tuple[KnownSeries, Samples]]] = {}
    for name, parts in shared.items():
        samples = merged(parts)
        together.setdefault((samples.step.tobytes(), samples.time.tobytes()), []).append((known[name], samples))
    for found in together.values():
        samples = found[0][1]
        columns = _Columns([item for item, _ in found], np.concatenate([item.value for _, item in found]))
        _place(connection, _Rows(samples.step, samples.time, [columns]), place, work)


def _with_bundles(
    connection: Connection,
    sent: dict[tuple[str, ...], list[Arrived]],
    place: Place,
    known: dict[str, KnownSeries],
    work: Work,
) -> dict[tuple[str, ...], list[Arrived]]:
    """The groups, and before them what some of their series have in bundles: that came earlier."""
    opened = bundles_of_rank(connection, place, {known[name].id for names in sent for name in names})
    if not opened:
        return sent
    work.opened += [each.id for each in opened]
    names_of = {item.id: name for name, item in known.items()}
    pieces: dict[tuple[int, bytes], tuple[Bundle, dict[str, bytes]]] = {}  # those of one group that has stayed together
    for each in opened:
        _, values = pieces.setdefault((each.owner, each.axis), (each, {}))
        for series_id, value in zip(each.series.tolist(), each.value, strict=True):
            values[names_of[series_id]] = value.tobytes()
    orders = {frozenset(names): names for names in sent}
    kinds: dict[tuple[str, ...], list[Arrived]] = {}
    for rows, values in pieces.values():
        names = orders.get(frozenset(values), tuple(values))
        group = TailGroup.of(rows.step.tobytes(), rows.time.tobytes(), {name: values[name] for name in names})
        kinds.setdefault(names, []).append((group, 0.0))
    for names, groups in sent.items():
        kinds.setdefault(names, []).extend(groups)
    return kinds


def unbundled(bundle: Bundle, newest: dict[int, int | None], work: Work) -> None:
    """Adds the blocks of a bundle's series to the work. newest: number of each one's newest block."""
    known = [KnownSeries(series_id, newest[series_id]) for series_id in bundle.series.tolist()]
    attempt = bundle.place.attempt
    work.newest.update({(item.id, attempt): item.newest for item in known if item.newest is not None})
    work.opened.append(bundle.id)
    rows = _Rows(bundle.step, bundle.time, [_Columns(known, bundle.value)])
    _note_last(rows, attempt, work)
    _encode(rows, attempt, [bundle.block], work)


def _place(connection: Connection, rows: _Rows, place: Place, work: Work) -> None:
    """Cuts the rows into blocks and merges them with the blocks that exist. What lies in the newest block becomes a
    bundle while that has room."""
    rows = _in_step_order(rows)
    step, attempt = rows.step, place.attempt
    numbers = step // BLOCK_STEPS
    starts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    wanted, edges = numbers[starts].tolist(), [*starts.tolist(), len(numbers)]
    everyone = [item for columns in rows.columns for item in columns.series]
    work.newest.update({(item.id, attempt): item.newest for item in everyone if item.newest is not None})
    touched = [item.id for item in everyone if item.newest is not None and item.newest >= wanted[0]]
    held = _held(connection, touched, attempt, wanted) if touched else {}
    late = {number for number, _ in held}
    gapless = int(step[-1]) - int(step[0]) == len(step) - 1 and bool((np.diff(step) == 1).all())
    pieces = list(zip(wanted, edges, edges[1:], strict=False))
    if _may_be_bundled(everyone, pieces[-1]):
        number, start, end = pieces.pop()
        owner = everyone[0].id
        for columns in rows.columns:
            ids = [item.id for item in columns.series]
            value = columns.value[:, start:end]
            work.bundles += bundle_rows(place, number, owner, step[start:end], rows.time[start:end], ids, value)
    else:
        _note_last(rows, attempt, work)
    for whole, run in itertools.groupby(
        pieces, lambda piece: gapless and piece[2] - piece[1] == BLOCK_STEPS and piece[0] not in late
    ):
        taken = list(run)
        for some in [taken] if whole else [[piece] for piece in taken]:
            number, start, end = some[0][0], some[0][1], some[-1][2]
            part = _Rows(
                step[start:end],
                rows.time[start:end],
                [_Columns(item.series, item.value[:, start:end]) for item in rows.columns],
            )
            if number in late:
                _merge(connection, part, attempt, number, held, work)
            else:
                _encode(part, attempt, [piece[0] for piece in some], work)


def _may_be_bundled(everyone: Sequence[KnownSeries], newest: tuple[int, int, int]) -> bool:
    number, start, end = newest
    if len(everyone) < BUNDLE_SERIES or end - start >= BLOCK_STEPS:
        return False
    return all(item.newest is None or item.newest < number for item in everyone)


def _note_last(rows: _Rows, attempt: int, work: Work) -> None:
    newest = (attempt, int(rows.step[-1]), float(rows.time[-1]))
    for columns in rows.columns:
        bits = columns.value[:, -1].astype("<f8").tobytes()
        for at, item in enumerate(columns.series):
            before = work.last.get(item.id)
            if before is None or newest >= before[:3]:
                work.last[item.id] = (*newest, bits[8 * at : 8 * at + 8])


def _held(
    connection: Connection, ids: Sequence[int], attempt: int, numbers: Sequence[int]
) -> dict[tuple[int, int], Any]:
    """(block, series) -> row of those blocks that exist."""
    names = ("series", "block", "payload", "cells", "axis", "first_step", "last_step")
    columns = [block.c[name] for name in names]
    here = (among(connection, block.c.series, ids), block.c.attempt == attempt, block.c.block.in_(numbers))
    return {(row.block, row.series): row for row in connection.execute(select(*columns).where(*here))}


def _merge(
    connection: Connection, rows: _Rows, attempt: int, number: int, held: dict[tuple[int, int], Any], work: Work
) -> None:
    """Rows for a block that some of the series have already."""
    by_axis: dict[int | None, list[_Columns]] = {}
    for columns in rows.columns:
        members: dict[int | None, list[int]] = {}
        for at, item in enumerate(columns.series):
            row = held.get((number, item.id))
            if row is not None and row.payload is None:
                _merge_cells(
                    item.id, attempt, number, row, Samples(rows.step, rows.time, columns.value[at : at + 1]), work
                )
            else:
                members.setdefault(None if row is None else row.axis, []).append(at)
        for key, which in members.items():
            by_axis.setdefault(key, []).append(_Columns([columns.series[at] for at in which], columns.value[which]))
    for key, mine in by_axis.items():
        if key is None:
            _encode(_Rows(rows.step, rows.time, mine), attempt, [number], work)
            continue
        work.stale.add(key)
        step, time = decode_axis(connection.execute(select(axis.c.payload).where(axis.c.key == key)).scalar_one())
        step, time = np.concatenate([step, rows.step]), np.concatenate([time, rows.time])
        for columns in mine:
            before = decode_values([held[number, item.id].payload for item in columns.series])
            columns.value = np.concatenate([before, columns.value], axis=1)
            work.merged_blocks += len(columns.series)
        _encode(_in_step_order(_Rows(step, time, mine)), attempt, [number], work)


def _in_step_order(rows: _Rows) -> _Rows:
    order = step_order(rows.step, rows.time)
    if order is None:
        return rows
    return _Rows(
        rows.step[order], rows.time[order], [_Columns(item.series, item.value[:, order]) for item in rows.columns]
    )


def _encode(rows: _Rows, attempt: int, numbers: Sequence[int], work: Work) -> None:
    """Block rows of series that share their rows: one block, or several that have no gap."""
    blocks, samples = len(numbers), len(rows.step) // len(numbers)
    step, time = rows.step.reshape(blocks, samples), rows.time.reshape(blocks, samples)
    owner = rows.columns[0].series[0].id
    keys = []
    for number, payload in zip(numbers, encode_axes(step, time), strict=True):
        key = axis_key(owner, attempt, number, payload)
        work.axes[key] = (key, owner, payload)
        keys.append(key)
    # What is the same for every series: as many items as there are blocks, over and over.
    edges = (step[:, 0], step[:, -1], time.min(axis=1), time.max(axis=1))
    first_step, last_step, first_time, last_time = (itertools.cycle(edge.tolist()) for edge in edges)
    where = places((step[0] % BLOCK_STEPS) // CELL_STEPS)
    for columns in rows.columns:
        value = columns.value.reshape(-1, samples)
        grid = aggregate(where, np.tile(time[:, where.starts], (len(columns.series), 1)), value)
        ids = [item.id for item in columns.series]
        work.blocks += zip(
            [series_id for series_id in ids for _ in numbers],
            itertools.repeat(attempt),
            itertools.cycle(numbers),
            itertools.repeat(samples),
            first_step,
            last_step,
            *_summaries(grid, samples),
            first_time,
            last_time,
            encode_cells(grid),
            itertools.cycle(keys),
            encode_values(value),
            strict=False,
        )
        work.made.append(Made(attempt, ids, numbers, grid))


def _summaries(grid: Grid, samples: int) -> tuple[list[int], list[float | None], list[float | None], list[float]]:
    """nonfinite, min, max and sum of whole rows."""
    low: list[float | None] = grid.min.min(axis=1).tolist()
    high: list[float | None] = grid.max.max(axis=1).tolist()
    with np.errstate(over="ignore", invalid="ignore"):
        total = grid.sum.sum(axis=1)
    if not np.isfinite(total).all():
        total = np.where(np.isnan(total), 0.0, total)  # +inf and -inf of overflowing sums: a NaN cannot be stored
    nonfinite = grid.nonfinite.sum(axis=1).tolist()
    if samples in nonfinite:
        for at, count in enumerate(nonfinite):
            if count == samples:
                low[at] = high[at] = None
    return nonfinite, low, high, total.tolist()


def _merge_cells(series_id: int, attempt: int, number: int, row: Any, samples: Samples, work: Work) -> None:
    """Late samples for a block whose samples retention has dropped: its cells still take them in."""
    where = places((samples.step % BLOCK_STEPS) // CELL_STEPS)
    grid = aggregate(where, samples.time[None, where.starts], samples.value)
    origin = number * BLOCK_STEPS
    before, _ = decode_cells([row.cells], [origin], CELL_STEPS)
    cells = reduced(concatenate([before, grid.row(0, origin, CELL_STEPS)]), CELL_STEPS)
    count, nonfinite = int(cells.count.sum()), int(cells.nonfinite.sum())
    empty = count == nonfinite
    work.blocks.append(
        (
            series_id,
            attempt,
            number,
            count,
            min(row.first_step, int(samples.step[0])),
            max(row.last_step, int(samples.step[-1])),
            nonfinite,
            None if empty else float(cells.min.min()),
            None if empty else float(cells.max.max()),
            float(cells.sum.sum()),
            float(cells.time.min()),
            float(samples.time.max()),
            encode_rows(cells, [len(cells)], [origin], CELL_STEPS)[0],
            None,
            None,
        )
    )
    work.made.append(Made(attempt, [series_id], [number], cells))
