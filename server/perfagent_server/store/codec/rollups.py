"""Rollup rows: cells of 256 and of 4096 steps, 256 to a row, for charts of long ranges.

Blocks are rolled up in groups, once a later group has begun: a row is then rewritten once in 16 blocks. Late pieces
make the groups in which they land anew. Series whose groups are due together are worked on together: series by series,
every sixteenth block cost as much as all the others, which no short benchmark shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from perfagent_server.store.codec.aggregates import (
    Cells,
    Grid,
    Ints,
    concatenate,
    decode_cells,
    encode_rows,
    reduced_rows,
)
from perfagent_server.store.codec.blocks import BLOCK_STEPS, CELL_STEPS
from perfagent_server.store.statements import among
from perfagent_server.store.tables import block, rollup
from perfagent_server.store.write.block_builder import Made, Work

__all__ = ["CHUNK_CELLS", "LEVELS", "rolled_until", "rollup_rows"]

LEVELS = (256, 4096)  # steps per cell
CHUNK_CELLS = 256  # cells per row
_GROUP_BLOCKS = 16
_SERIES_AT_ONCE = 128

# (series, attempt) -> block -> its new cells: as such, or as a row of a grid.
_Fresh = dict[tuple[int, int], dict[int, Cells | tuple[Grid, int]]]


def rolled_until(last_block: int) -> int:
    """First step that is not in the rollup rows of a series whose newest block is `last_block`."""
    return last_block // _GROUP_BLOCKS * _GROUP_BLOCKS * BLOCK_STEPS


def rollup_rows(connection: Connection, work: Work) -> list[tuple[Any, ...]]:
    """The rows of the table that change with this work: groups that are behind the newest block for the first time, and
    those in which a late piece has landed."""
    newest = max([*work.newest.values(), *(number for made in work.made for number in made.numbers)], default=0)
    if newest < _GROUP_BLOCKS:
        return []  # every first group is still open: the usual case
    fresh_cells = _by_series(work.made)
    due: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for (series_id, attempt), fresh in fresh_cells.items():
        held = work.newest.get((series_id, attempt), -1)
        closed = max(held, *fresh) // _GROUP_BLOCKS
        if closed == 0:
            continue
        groups = {number // _GROUP_BLOCKS for number in fresh if number // _GROUP_BLOCKS < closed}
        if 0 <= held // _GROUP_BLOCKS < closed:
            groups.add(held // _GROUP_BLOCKS)
        if groups:
            due.setdefault((attempt, tuple(sorted(groups))), []).append(series_id)
    rows = []
    for (attempt, ordered), ids in due.items():
        for start in range(0, len(ids), _SERIES_AT_ONCE):
            some = ids[start : start + _SERIES_AT_ONCE]
            stored = any((series_id, attempt) in work.newest for series_id in some)
            rows += _rolled(connection if stored else None, some, attempt, ordered, fresh_cells)
    return rows


def _by_series(pieces: Sequence[Made]) -> _Fresh:
    found: _Fresh = {}
    for attempt, ids, numbers, cells in pieces:
        for at, series_id in enumerate(ids):
            mine = found.setdefault((series_id, attempt), {})
            if isinstance(cells, Cells):
                mine[numbers[0]] = cells
            else:
                mine.update((number, (cells, row)) for row, number in enumerate(numbers, at * len(numbers)))
    return found


def _rolled(
    connection: Connection | None, ids: list[int], attempt: int, groups: Sequence[int], fresh_cells: _Fresh
) -> list[tuple[Any, ...]]:
    """The rows of both levels that hold these groups: the groups' cells are made anew, the rows' other cells stay.
    Without a connection none of the series has a block yet, and so nothing to look for."""
    made, owner = _blocks(connection, ids, attempt, groups, fresh_cells)
    rows = []
    for level in LEVELS:
        made, owner = reduced_rows(made, owner, level)
        span = level * CHUNK_CELLS
        held, holder = _held(connection, ids, attempt, level, sorted({*(made.step // span).tolist()}))
        kept = ~np.isin(held.step // (_GROUP_BLOCKS * BLOCK_STEPS), groups)
        cells, mine = reduced_rows(concatenate([held.take(kept), made]), np.concatenate([holder[kept], owner]), level)
        chunk = cells.step // span
        starts = np.flatnonzero(np.concatenate([[True], (chunk[1:] != chunk[:-1]) | (mine[1:] != mine[:-1])]))
        lengths = np.diff(np.append(starts, len(chunk))).tolist()
        chunks = chunk[starts].tolist()
        blobs = encode_rows(cells, lengths, [number * span for number in chunks], level)
        for at, number, blob in zip(mine[starts].tolist(), chunks, blobs, strict=True):
            rows.append((ids[at], attempt, level, number, blob))
    return rows


def _blocks(
    connection: Connection | None, ids: list[int], attempt: int, groups: Sequence[int], fresh_cells: _Fresh
) -> tuple[Cells, Ints]:
    """The cells of all blocks in these groups, and for each the place of its series in `ids`."""
    numbers = [group * _GROUP_BLOCKS + at for group in groups for at in range(_GROUP_BLOCKS)]
    parts: list[Cells] = []
    owners: list[Ints] = []
    gridded: dict[int, tuple[Grid, list[tuple[int, int, int]]]] = {}  # rows of one grid: row, first step, owner
    missing: set[int] = set()
    for at, series_id in enumerate(ids):
        fresh = fresh_cells[series_id, attempt]
        for number in numbers:
            cells = fresh.get(number)
            if cells is None:
                missing.add(number)
            elif isinstance(cells, Cells):
                parts.append(cells)
                owners.append(np.full(len(cells), at))
            else:
                gridded.setdefault(id(cells[0]), (cells[0], []))[1].append((cells[1], number * BLOCK_STEPS, at))
    for grid, places in gridded.values():
        row, origin, owner = np.array(places).T
        step = origin[:, None] + grid.index * CELL_STEPS
        mine = grid.take(row)
        count = np.broadcast_to(grid.count, step.shape)
        columns = [mine.min, mine.max, mine.sum, count, mine.nonfinite, mine.time]
        low, high, total, counts, nonfinite, time = (column.ravel() for column in columns)
        parts.append(Cells(step.ravel(), low, high, total, counts, nonfinite, time))
        owners.append(np.repeat(owner, len(grid.index)))
    if missing and connection is not None:
        rows = connection.execute(
            select(block.c.series, block.c.block, block.c.cells).where(
                among(connection, block.c.series, ids), block.c.attempt == attempt, block.c.block.in_(sorted(missing))
            )
        ).all()
        stored = [row for row in rows if row.block not in fresh_cells[row.series, attempt]]
        cells, owner = _read(stored, [row.block * BLOCK_STEPS for row in stored], CELL_STEPS, ids)
        parts.append(cells)
        owners.append(owner)
    return concatenate(parts), np.concatenate(owners)


def _held(
    connection: Connection | None, ids: list[int], attempt: int, level: int, chunks: list[int]
) -> tuple[Cells, Ints]:
    """The rollup rows that are there already."""
    if connection is None:
        return concatenate([]), np.empty(0, np.int64)
    rows = connection.execute(
        select(rollup.c.series, rollup.c.chunk, rollup.c.cells).where(
            among(connection, rollup.c.series, ids),
            rollup.c.attempt == attempt,
            rollup.c.level == level,
            rollup.c.chunk.in_(chunks),
        )
    ).all()
    return _read(rows, [row.chunk * level * CHUNK_CELLS for row in rows], level, ids)


def _read(rows: Sequence[Any], origins: list[int], width: int, ids: list[int]) -> tuple[Cells, Ints]:
    places = {series_id: at for at, series_id in enumerate(ids)}
    cells, lengths = decode_cells([row.cells for row in rows], origins, width)
    return cells, np.repeat(np.array([places[row.series] for row in rows], np.int64), lengths)
