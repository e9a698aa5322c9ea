"""Takes detail out of what is stored: first the samples, then cells of 16 steps, then those of 256.

A block keeps its place and its format: its cells are put together, so that fewer of them remain, and every question
that was answered from it is still answered, with fewer points. What is to change is looked for and worked out on a
reader; the writer changes rows by key, some 10 ms at a time, and none that somebody else changed meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Select, bindparam, null, select, tuple_, update

from perfagent_server.store.codec.aggregates import decode_cells, encode_rows, reduced_rows
from perfagent_server.store.codec.blocks import BLOCK_STEPS, CELL_STEPS
from perfagent_server.store.codec.rollups import CHUNK_CELLS, LEVELS
from perfagent_server.store.retention.checks import CheckedDatabase, held_runs, held_series
from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.statements import Prepared, put
from perfagent_server.store.tables import block, bundle, rollup, run, run_storage, series
from perfagent_server.store.write.compaction import drop_unused_axes, thin_bundles

__all__ = ["BLOCKS_AT_ONCE", "old_blocks", "old_bundles", "roll_up_run", "thin_old", "thin_run"]

BLOCKS_AT_ONCE = 200  # some 10 ms
_BUNDLES_AT_ONCE = 50

_thin_block = Prepared(
    update(block)
    .where(
        block.c.series == bindparam("_series"),
        block.c.attempt == bindparam("_attempt"),
        block.c.block == bindparam("_block"),
        block.c.axis.is_not_distinct_from(bindparam("_axis")),
        block.c.last_time < bindparam("_before"),
    )
    .values(payload=null(), axis=null())
)
_roll_up_block = Prepared(
    update(block)
    .where(
        block.c.series == bindparam("_series"),
        block.c.attempt == bindparam("_attempt"),
        block.c.block == bindparam("_block"),
        block.c.cells == bindparam("_old"),
    )
    .values(cells=bindparam("_new"))
)
_roll_up_rollup = Prepared(
    update(rollup)
    .where(
        rollup.c.series == bindparam("_series"),
        rollup.c.attempt == bindparam("_attempt"),
        rollup.c.level == bindparam("_level"),
        rollup.c.chunk == bindparam("_chunk"),
        rollup.c.cells == bindparam("_old"),
    )
    .values(cells=bindparam("_new"))
)


# --- samples ----------------------------------------------------------------------------------------------------------


def old_blocks(scope: Scope, before: float, after: float) -> Select[Any]:
    """Blocks with samples, the newest of which is older than `before` and not older than `after`, of runs of the scope
    that began before, too: what belongs to a younger run is not so old, whatever its sender's clock said."""
    of = (
        select(series.c.id)
        .join(run, run.c.id == series.c.run)
        .where(series.c.id == block.c.series, scope.holds(), run.c.started < before)
        .exists()
    )
    return (
        select(block.c.series, block.c.attempt, block.c.block, block.c.axis, block.c.last_time)
        .where(block.c.last_time < before, block.c.last_time >= after, block.c.payload.is_not(None), of)
        .order_by(block.c.last_time)
    )


def old_bundles(scope: Scope, before: float) -> Select[Any]:
    of = select(run.c.id).where(run.c.id == bundle.c.run, scope.holds(), run.c.started < before).exists()
    return select(bundle.c.id).where(bundle.c.last_time < before, of)


def thin_old(database: CheckedDatabase, scope: Scope, before: float, stop: Any) -> int:
    """Drops the samples of what is older than `before`, Unix seconds. Answers the number of blocks."""
    thinned, after = 0, float("-inf")
    while not stop.is_set():
        with database.read() as connection:  # found here, so that the writer has only the changes to make
            old = connection.execute(old_blocks(scope, before, after).limit(BLOCKS_AT_ONCE)).all()
        if not old:
            break
        job = functools.partial(_thin_blocks, blocks=[row[:4] for row in old], before=before, scope=scope)
        changed = database.write(job)
        thinned += changed
        # Blocks of kept runs stay where they are: the next look begins behind them.
        after = old[-1].last_time if changed else float(np.nextafter(old[-1].last_time, np.inf))
    while not stop.is_set():
        with database.read() as connection:
            ids = list(connection.execute(old_bundles(scope, before).limit(_BUNDLES_AT_ONCE)).scalars())
        if not ids:
            return thinned
        thinned += database.write(functools.partial(_thin_bundles, ids=ids, scope=scope))
    return thinned


def thin_run(database: CheckedDatabase, run_id: str, now: float) -> int:
    """Drops all samples of a run. The check of `database` says whether it still may. Answers the number of blocks."""
    with database.read() as connection:
        keys = connection.execute(
            select(block.c.series, block.c.attempt, block.c.block, block.c.axis)
            .join(series, series.c.id == block.c.series)
            .where(series.c.run == run_id, block.c.payload.is_not(None))
        ).all()
        ids = list(connection.execute(select(bundle.c.id).where(bundle.c.run == run_id)).scalars())
    thinned = 0
    for some in _parts(keys, BLOCKS_AT_ONCE):
        job = functools.partial(_thin_blocks, blocks=some, before=float("inf"))
        thinned += database.write(job)
    while ids:
        some = ids[:_BUNDLES_AT_ONCE]
        thinned += database.write(functools.partial(thin_bundles, ids=some, blocks_at_once=BLOCKS_AT_ONCE))
        with database.read() as connection:  # a job leaves those that are too many for it
            left = list(connection.execute(select(bundle.c.id).where(bundle.c.id.in_(some))).scalars())
        ids = left + ids[_BUNDLES_AT_ONCE:]
    _note(database, run_id, CELL_STEPS, now)
    return thinned


def _thin_blocks(
    connection: Connection, blocks: Sequence[Sequence[Any]], before: float, scope: Scope | None = None
) -> int:
    """Takes the samples out of these blocks, but for those that new ones have reached meanwhile. scope: and only where
    the run still is in it."""
    if scope is not None:
        held = held_series(connection, scope, {row[0] for row in blocks})
        blocks = [row for row in blocks if row[0] in held]
    names = ("_series", "_attempt", "_block", "_axis")
    rows = [dict(zip(names, row, strict=True), _before=before) for row in blocks]
    thinned = _thin_block.many(connection, rows)
    drop_unused_axes(connection, {row[3] for row in blocks if row[3] is not None})
    return thinned


def _thin_bundles(connection: Connection, ids: Sequence[int], scope: Scope) -> int:
    """Those whose run still is in the scope."""
    runs = {
        row.id: row.run for row in connection.execute(select(bundle.c.id, bundle.c.run).where(bundle.c.id.in_(ids)))
    }
    held = held_runs(connection, scope, set(runs.values()))
    return thin_bundles(connection, [one for one in ids if runs.get(one) in held], BLOCKS_AT_ONCE)


# --- cells ------------------------------------------------------------------------------------------------------------


def roll_up_run(database: CheckedDatabase, run_id: str, width: int, now: float) -> None:
    """Puts the cells of a run together until each has `width` steps, 256 or 4096; its samples are dropped. (A block, of 1024
    steps, keeps one cell at least.)"""
    thin_run(database, run_id, now)
    with database.read() as connection:
        keys = connection.execute(
            select(block.c.series, block.c.attempt, block.c.block)
            .join(series, series.c.id == block.c.series)
            .where(series.c.run == run_id, block.c.payload.is_(None))
        ).all()
        chunks = connection.execute(
            select(rollup.c.series, rollup.c.attempt, rollup.c.level, rollup.c.chunk)
            .join(series, series.c.id == rollup.c.series)
            .where(series.c.run == run_id, rollup.c.level == LEVELS[0])
        ).all()
    for some in _parts(keys, BLOCKS_AT_ONCE):
        rows = _rows_of(database, (block.c.series, block.c.attempt, block.c.block), block.c.cells, some)
        origins = [row.block * BLOCK_STEPS for row in rows]
        changed = _put_together(rows, origins, CELL_STEPS, min(width, BLOCK_STEPS), ("_series", "_attempt", "_block"))
        database.write(functools.partial(_change, _roll_up_block, changed))
    for some in _parts(chunks if width > LEVELS[0] else [], BLOCKS_AT_ONCE):
        key = (rollup.c.series, rollup.c.attempt, rollup.c.level, rollup.c.chunk)
        rows = _rows_of(database, key, rollup.c.cells, some)
        origins = [row.chunk * row.level * CHUNK_CELLS for row in rows]
        changed = _put_together(rows, origins, LEVELS[0], width, ("_series", "_attempt", "_level", "_chunk"))
        database.write(functools.partial(_change, _roll_up_rollup, changed))
    _note(database, run_id, width, now)


def _rows_of(database: CheckedDatabase, key: Sequence[Any], cells: Any, keys: Sequence[Any]) -> Sequence[Any]:
    with database.read() as connection:
        return connection.execute(select(*key, cells).where(tuple_(*key).in_([tuple(one) for one in keys]))).all()


def _put_together(
    rows: Sequence[Any], origins: list[int], width: int, wanted: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    """What changes of rows with cells of `width` steps when these become `wanted` steps wide; the last column of a row is
    its cells, the others are its key."""
    if not rows:
        return []
    cells, lengths = decode_cells([row.cells for row in rows], origins, width)
    cells, owner = reduced_rows(cells, np.repeat(np.arange(len(rows)), lengths), wanted)
    blobs = encode_rows(cells, np.bincount(owner, minlength=len(rows)).tolist(), origins, width)
    return [
        dict(zip(names, row[:-1], strict=True), _old=row.cells, _new=blob)
        for row, blob in zip(rows, blobs, strict=True)
        if row.cells != blob
    ]


def _change(statement: Prepared, rows: Sequence[dict[str, Any]], connection: Connection) -> int:
    return statement.many(connection, rows) if rows else 0


def _parts(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _note(database: CheckedDatabase, run_id: str, finest_steps: int, now: float) -> None:
    """now: when, by the server's clock. What is heard of the run later has full resolution again."""

    def job(connection: Connection) -> None:
        if connection.execute(select(run.c.id).where(run.c.id == run_id)).first() is not None:
            put(connection, run_storage, {"run": run_id, "finest_steps": finest_steps, "thinned": now, "measured": 0.0})

    database.write(job)
