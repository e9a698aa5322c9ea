"""How much room runs take. A run is counted again when it has sent more, or has lost something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, func, or_, select

from perfagent_server.database import Database
from perfagent_server.store.statements import put
from perfagent_server.store.tables import (
    axis,
    block,
    bundle,
    event,
    media,
    profile_part,
    rollup,
    run,
    run_storage,
    series,
    tail,
)

__all__ = ["measure_run", "measure_runs", "total_bytes", "used_bytes"]

_ROW_BYTES = 100  # keys, times and numbers beside the blobs of a row


def measure_runs(database: Database, now: float, stop: Any) -> None:
    """Counts the runs of which the known size is out of date. now: by the server's clock."""
    with database.read() as connection:
        stale = connection.execute(
            select(run.c.id)
            .outerjoin(run_storage, run_storage.c.run == run.c.id)
            .where(or_(run_storage.c.run.is_(None), run_storage.c.measured < run.c.updated))
        )
        ids = list(stale.scalars())
    for each in ids:
        if stop.is_set():
            return
        measure_run(database, each, now)


def measure_run(database: Database, run_id: str, now: float) -> None:
    with database.read() as connection:
        found = connection.execute(
            select(run_storage.c.finest_steps, run_storage.c.thinned).where(run_storage.c.run == run_id)
        ).first()
        updated = connection.execute(select(run.c.updated).where(run.c.id == run_id)).scalar()
        if updated is None:
            return
        finest, thinned = (found.finest_steps, found.thinned) if found is not None else (1, 0.0)
        values = {
            "run": run_id,
            # What came after the samples were dropped has its own.
            "finest_steps": finest if thinned >= updated else 1,
            "thinned": thinned,
            "measured": now,
            "samples_bytes": _of_series(connection, run_id, block, [block.c.payload])
            + _of_series(connection, run_id, axis, [axis.c.payload])
            + _sum(connection, bundle, [bundle.c.payload, bundle.c.axis, bundle.c.newest, bundle.c.members], run_id),
            "cells_bytes": _of_series(connection, run_id, block, [block.c.cells], _ROW_BYTES),
            "rollups_bytes": _of_series(connection, run_id, rollup, [rollup.c.cells], _ROW_BYTES),
            "other_bytes": _sum(connection, tail, [tail.c.frame], run_id)
            + _sum(connection, event, [event.c.data], run_id)
            + _sum(connection, profile_part, [profile_part.c.data], run_id)
            + _of_media(connection, run_id),
        }  # fmt: skip

    def job(connection: Connection) -> None:
        if connection.execute(select(run.c.id).where(run.c.id == run_id)).first() is not None:
            put(connection, run_storage, values)

    database.write(job, essential=True)


def used_bytes(database: Database) -> int:
    """What is stored in the whole database: of SQLite its pages in use, of PostgreSQL the rows of all runs, because a
    table there keeps the room of deleted rows."""
    with database.read() as connection:
        if connection.dialect.name == "sqlite":
            pages, free, size = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)
                for name in ("page_count", "freelist_count", "page_size")
            )
            return (pages - free) * size
        return total_bytes(connection)


def total_bytes(connection: Connection, project: str | None = None) -> int:
    """Of the runs of a project, or of all runs, as far as they are counted."""
    parts = (run_storage.c[f"{name}_bytes"] for name in ("samples", "cells", "rollups", "other"))
    query = select(*(func.coalesce(func.sum(part), 0) for part in parts))
    if project is not None:
        query = query.join(run, run.c.id == run_storage.c.run).where(run.c.project == project)
    return sum(map(int, connection.execute(query).one()))


def _sum(connection: Connection, table: Any, columns: Sequence[Any], run_id: str) -> int:
    return _bytes(connection, lambda query: query.where(table.c.run == run_id), table, columns, _ROW_BYTES)


def _of_media(connection: Connection, run_id: str) -> int:
    """By their own count of bytes, which is in the index: their rows need not be read."""
    size = func.coalesce(func.sum(media.c.bytes + 2 * _ROW_BYTES), 0)
    return int(connection.execute(select(size).where(media.c.run == run_id)).scalar_one())


def _of_series(connection: Connection, run_id: str, table: Any, columns: Sequence[Any], row_bytes: int = 0) -> int:
    def of_run(query: Any) -> Any:
        return query.join(series, series.c.id == table.c.series).where(series.c.run == run_id)

    return _bytes(connection, of_run, table, columns, row_bytes)


def _bytes(
    connection: Connection, of_run: Callable[[Any], Any], table: Any, columns: Sequence[Any], row_bytes: int
) -> int:
    lengths = [func.coalesce(func.sum(func.length(column)), 0) for column in columns]
    count, *sums = connection.execute(of_run(select(func.count(), *lengths).select_from(table))).one()
    return int(count) * row_bytes + sum(map(int, sums))
