"""Reads the samples and cells of series for one question, out of rollups, blocks and tail together.

Everything is read inside one transaction of the caller, so that no sample is missed or counted twice while the
compactor works. Steps of an attempt that a later attempt has started again are cut from view here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, func, select

from perfagent.wire import LogRow
from perfagent.wire.limits import MAX_STEP
from perfagent_server.store.codec.aggregates import Cells, concatenate, decode_cells, of_samples, reduced
from perfagent_server.store.codec.blocks import BLOCK_STEPS, CELL_STEPS, Samples, decode_block, merged
from perfagent_server.store.codec.rollups import CHUNK_CELLS, LEVELS, rolled_until
from perfagent_server.store.codec.tail import unpack_tail
from perfagent_server.store.codec.tail_columns import Arrived, matrices, rows_below_each_other
from perfagent_server.store.codec.wide_blocks import bundled_samples
from perfagent_server.store.tables import attempt as attempt_table
from perfagent_server.store.tables import axis, block, rollup, series, tail

__all__ = [
    "CUT_NEVER",
    "View",
    "cells_by_rank",
    "few_samples",
    "in_order",
    "open_view",
    "open_views",
    "stored_payloads",
    "tail_by_rank",
    "value_at",
    "visible_attempts",
]

CUT_NEVER = MAX_STEP
RANKS_AT_ONCE = 32
"""Of a question about many ranks. 20,000 points of so many take 36 MB."""
_TAIL_AT_ONCE = 1_000_000
"""Samples of a rank that are taken out of the tail at once: up to 8 MB, unpacked."""


@dataclass(slots=True)
class View:
    """What one question sees. attempts: (attempt, last visible step), oldest first; tail: samples by (rank, attempt),
    from bundles and tail."""

    ranks: dict[int, int]  # series id -> rank
    attempts: list[tuple[int, int]]
    tail: dict[tuple[int, int], Samples]
    ends: dict[tuple[int, int], tuple[int, int, int]] = field(
        default_factory=dict
    )  # (series, attempt) -> first step, last step, last block

    def extent(self) -> tuple[int, int] | None:
        """First and last visible step."""
        top = dict(self.attempts)
        spans = [
            (low, min(high, top[attempt])) for (_, attempt), (low, high, _) in self.ends.items() if low <= top[attempt]
        ]
        for (_, attempt), samples in self.tail.items():
            steps = samples.step[samples.step <= top.get(attempt, -1)]
            if len(steps):
                spans.append((int(steps.min()), int(steps.max())))
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None


def open_view(connection: Connection, run: str, name: str, rank: int | None) -> View:
    return open_views(connection, run, [name], rank)[name]


def open_views(connection: Connection, run: str, names: Sequence[str], rank: int | None) -> dict[str, View]:
    """A view of each name. The tail is read once: all names together take little longer than one of them."""
    wanted = select(series.c.id, series.c.rank, series.c.name).where(series.c.run == run, series.c.name.in_(names))
    if rank is not None:
        wanted = wanted.where(series.c.rank == rank)
    attempts = visible_attempts(connection, run)
    views = {name: View({}, attempts, {}) for name in names}
    name_of = {}
    for row in connection.execute(wanted):
        name_of[row.id] = row.name
        views[row.name].ranks[row.id] = row.rank
    if not name_of:
        return views
    for (series_id, attempt), ends in _ends(connection, run, list(name_of)).items():
        views[name_of[series_id]].ends[series_id, attempt] = ends
    in_tail = _tail_samples(connection, run, [name for name, view in views.items() if view.ranks], rank)
    for name, view in views.items():
        view.tail = _with_bundled(connection, in_tail.get(name, {}), list(view.ranks))
    return views


def _with_bundled(
    connection: Connection, found: dict[tuple[int, int], Samples], ids: list[int]
) -> dict[tuple[int, int], Samples]:
    """(rank, attempt) -> samples of one name that are in bundles or in the tail still (found), in the order in which
    they came."""
    for of, attempt, samples in bundled_samples(connection, ids) if ids else ():
        later = found.get((of, attempt))
        found[of, attempt] = samples if later is None else merged([samples, later])
    return found


def visible_attempts(connection: Connection, run: str) -> list[tuple[int, int]]:
    """(attempt, its last visible step), oldest first: a later attempt cuts every older one at its first step."""
    rows = connection.execute(
        select(attempt_table.c.attempt, attempt_table.c.start_step)
        .where(attempt_table.c.run == run)
        .order_by(attempt_table.c.attempt.desc())
    )
    top = CUT_NEVER
    found = []
    for row in rows:
        found.append((row.attempt, top))
        top = min(top, row.start_step - 1)
    return found[::-1]


def cells_by_rank(
    connection: Connection, view: View, first: int, last_step: int, width: int
) -> Iterator[tuple[int, Cells]]:
    """Rank and its cells `width` steps wide, over the visible samples of the steps first..last_step. By rank, a few
    ranks at a time: who asks need not hold the cells of all."""
    for few in _few_ranks(view):
        yield from _cells_of_ranks(connection, few, first, last_step, width)


def _few_ranks(view: View) -> Iterator[View]:
    """The view in pieces of RANKS_AT_ONCE ranks."""
    ranks = sorted({*view.ranks.values(), *(rank for rank, _ in view.tail)})
    piece_of = {rank: place // RANKS_AT_ONCE for place, rank in enumerate(ranks)}
    pieces = [View({}, view.attempts, {}) for _ in range(-(-len(ranks) // RANKS_AT_ONCE))]
    for series_id, rank in view.ranks.items():
        pieces[piece_of[rank]].ranks[series_id] = rank
    for (series_id, attempt), ends in view.ends.items():
        pieces[piece_of[view.ranks[series_id]]].ends[series_id, attempt] = ends
    for (rank, attempt), samples in view.tail.items():
        pieces[piece_of[rank]].tail[rank, attempt] = samples
    yield from pieces


def _cells_of_ranks(
    connection: Connection, view: View, first: int, last_step: int, width: int
) -> Iterator[tuple[int, Cells]]:
    parts: dict[int, list[Cells]] = {}
    for attempt, top in view.attempts:
        end = min(last_step, top)
        if end < first:
            continue
        # Series whose newest blocks lie in the same group of blocks have been rolled up to the same step.
        together: dict[int, list[int]] = {}
        for (series_id, of), (low, high, last_block) in view.ends.items():
            if of == attempt and low <= end and high >= first:
                together.setdefault(rolled_until(last_block), []).append(series_id)
        for rolled, ids in together.items():
            for series_id, cells in _stored(connection, ids, attempt, first, end, width, rolled):
                parts.setdefault(view.ranks[series_id], []).append(cells)
        for (rank, of), samples in view.tail.items():
            if of == attempt:
                cells = of_samples(samples.step, samples.time, samples.value).between(first, end)
                if len(cells):
                    parts.setdefault(rank, []).append(cells)
    for rank, of_rank in sorted(parts.items()):
        if any(len(part) for part in of_rank):
            yield rank, reduced(concatenate(of_rank), width)


def few_samples(connection: Connection, view: View, first: int, last_step: int, points: int) -> Cells | None:
    """The samples themselves, if one rank has sent them all and they are at most `points`."""
    holders = {view.ranks[series_id] for series_id, _ in view.ends} | {rank for rank, _ in view.tail}
    if len(holders) != 1:
        return None
    known = sum(len(samples) for samples in view.tail.values()) if last_step - first >= points else 0
    if known > points and _count_tail(view, first, last_step) > points:
        return None
    for attempt, top in view.attempts:
        where = _between(list(view.ranks), attempt, first, min(last_step, top))
        whole = [block.c.first_step >= first, block.c.last_step <= min(last_step, top)]
        known = connection.execute(
            select(func.coalesce(func.sum(block.c.samples), 0)).where(*where, *whole)
        ).scalar_one()
        if known > points:
            return None
    parts: list[Samples] = []
    for attempt, top in view.attempts:
        end = min(last_step, top)
        for row in stored_payloads(connection, list(view.ranks), attempt, first, end):
            if row.payload is None:
                return None  # retention took the samples; what is left of them are cells
            parts.append(decode_block(row.axis, row.payload).between(first, end))
        for (_, of), samples in view.tail.items():
            if of == attempt:
                parts.append(merged([samples]).between(first, end))
    found = merged(parts)
    if len(found) > points:
        return None
    return of_samples(found.step, found.time, found.value)


def value_at(connection: Connection, run: str, name: str, rank: int, step: int) -> float | None:
    """The visible sample of one step; None where there is none, or retention took it."""
    view = open_view(connection, run, name, rank)
    for attempt, top in reversed(view.attempts):
        if step > top:
            continue
        parts = [merged([samples]).between(step, step) for (_, of), samples in view.tail.items() if of == attempt]
        rows = stored_payloads(connection, list(view.ranks), attempt, step, step)
        parts += [decode_block(row.axis, row.payload).between(step, step) for row in rows if row.payload is not None]
        found = merged(parts)
        if len(found):
            return float(found.value[-1])
    return None


def stored_payloads(connection: Connection, ids: list[int], attempt: int, first: int, end: int) -> Sequence[Row[Any]]:
    if not ids or end < first:
        return []
    return connection.execute(
        _payload_columns().where(*_between(ids, attempt, first, end)).order_by(block.c.block)
    ).all()


def in_order(view: View, stored: dict[int, Sequence[Row[Any]]], name: str, rank: int) -> Iterator[LogRow]:
    """One series' visible samples in step order, a block's worth at a time."""
    pieces: dict[int, list[tuple[int, Any]]] = {}  # block number -> (attempt, axis and payload, or samples)
    for attempt, _ in view.attempts:
        for row in stored[attempt]:
            if row.payload is not None:
                pieces.setdefault(row.block, []).append((attempt, (row.axis, row.payload)))
        for (_, of), samples in view.tail.items():
            if of == attempt and len(samples):
                ordered = merged([samples])
                numbers = ordered.step // BLOCK_STEPS
                for number in np.unique(numbers).tolist():
                    pieces.setdefault(number, []).append(
                        (attempt, ordered.between(number * BLOCK_STEPS, (number + 1) * BLOCK_STEPS - 1))
                    )
    top = dict(view.attempts)
    for number in sorted(pieces):
        parts = [
            (decode_block(*piece) if isinstance(piece, tuple) else piece).between(0, top[attempt])
            for attempt, piece in pieces[number]
        ]
        found = merged(parts)
        for step, time, value in zip(found.step.tolist(), found.time.tolist(), found.value.tolist(), strict=True):
            yield LogRow(name=name, rank=rank, step=step, time=time, value=value)


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
            rollup.c.series.in_(ids),
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
        for row in stored_payloads(connection, ids, attempt, first, end):
            yield row.series, _visible(row, first, end)
        return
    columns = [block.c.series, block.c.block, block.c.first_step, block.c.last_step]
    summary = width >= BLOCK_STEPS
    columns += (
        [block.c.min, block.c.max, block.c.sum, block.c.samples, block.c.nonfinite, block.c.first_time]
        if summary
        else [block.c.cells]
    )
    rows = connection.execute(select(*columns).where(*_between(ids, attempt, first, end))).all()
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
            _payload_columns().where(*_between(ids, attempt, first, end), block.c.block.in_(edges))
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


def _between(ids: list[int], attempt: int, first: int, end: int) -> list[Any]:
    return [
        block.c.series.in_(ids),
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
        .where(series.c.run == run, series.c.id.in_(ids))
    )
    return {(row.id, row.attempt): (row.low, row.high, row.high // BLOCK_STEPS) for row in rows if row.low is not None}


def _tail_samples(
    connection: Connection, run: str, names: Sequence[str], rank: int | None
) -> dict[str, dict[tuple[int, int], Samples]]:
    """Name -> (rank, attempt) -> samples that are still in the tail, by step and time."""
    parts: dict[str, dict[tuple[int, int], list[Samples]]] = {name: {} for name in names}
    for of, kinds in tail_by_rank(connection, run, rank):
        for (attempt, sent), groups in kinds.items():
            wanted = [at for at, name in enumerate(sent) if name in parts]
            if not wanted:
                continue
            step, time = rows_below_each_other(groups)
            for columns, values in matrices(groups, wanted):
                for column, value in zip(columns, values, strict=True):
                    samples = Samples(step, time, value.astype("<f8", copy=False))
                    parts[sent[column]].setdefault((of, attempt), []).append(samples)
    return {name: {key: merged(pieces) for key, pieces in of_name.items()} for name, of_name in parts.items()}


def tail_by_rank(
    connection: Connection, run: str, rank: int | None = None
) -> Iterator[tuple[int, dict[tuple[int, tuple[str, ...]], list[Arrived]]]]:
    """Rank and (attempt, names) -> its groups of that kind, in the order in which they came. A rank with many samples
    comes in several pieces: who asks need not hold all that waits for the compactor. By rank, which is the order of the
    index: to sort the frames of 120 s took as long as to read them."""
    statement = select(tail.c.rank, tail.c.attempt, tail.c.received, tail.c.samples, tail.c.frame).where(
        tail.c.run == run, tail.c.samples > 0
    )
    if rank is not None:
        statement = statement.where(tail.c.rank == rank)
    kinds: dict[tuple[int, tuple[str, ...]], list[Arrived]] = {}
    held: int | None = None
    size = 0
    for of, attempt, received, samples, frame in connection.execute(statement.order_by(tail.c.rank, tail.c.id)):
        if kinds and (of != held or size >= _TAIL_AT_ONCE):
            assert held is not None
            yield held, kinds
            kinds, size = {}, 0
        held = of
        size += samples
        for group in unpack_tail(frame):
            kinds.setdefault((attempt, group.names), []).append((group, received))
    if kinds:
        assert held is not None
        yield held, kinds


def _count_tail(view: View, first: int, last_step: int) -> int:
    top = dict(view.attempts)
    return sum(
        int(((samples.step >= first) & (samples.step <= min(last_step, top.get(attempt, -1)))).sum())
        for (_, attempt), samples in view.tail.items()
    )
