"""Copies everything from one database into another one, which must be empty: from a laptop's SQLite to PostgreSQL, or
back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Column, Connection, LargeBinary, Table, func, insert, select, text
from sqlalchemy.exc import DataError, IntegrityError

from perfagent.errors import ResourceError
from perfagent.wire.limits import MAX_COUNT
from perfagent_server.database import Database
from perfagent_server.store.tables import change, cursor, lease, metadata, server, tail

__all__ = ["copy_all"]

_ROWS, _LARGE_ROWS = 500, 16  # at once: a row of the tail, or a piece of a trace, may have megabytes

_OF_RUNNING_SERVERS = (change, lease, server)  # and of the database where they run

Progress = Callable[[str, int], None]


def copy_all(source: Database, target: Database, progress: Progress = lambda _table, _rows: None) -> int:
    """Answers how many rows were copied, all of them in one transaction: it is everything or nothing. progress: called with
    each table and its rows. Raises ResourceError where the target is not empty, or cannot hold a value."""

    tables = [table for table in metadata.sorted_tables if table not in _OF_RUNNING_SERVERS]

    def copy(into: Connection) -> int:
        for table in tables:
            if into.execute(select(table).limit(1)).first() is not None:
                raise ResourceError(
                    f"{target.backend.where} is not empty: {table.name} has rows; name an empty database"
                )
        with source.read() as connection:
            rows = sum(_copy(table, connection, into, progress) for table in tables)
            for table in tables:
                _continue_ids(table, connection, into)
            return rows

    try:
        return target.write(copy)
    except (DataError, IntegrityError) as error:
        raise ResourceError(f"{target.backend.where} cannot hold a value: {error.orig}") from error


def _copy(table: Table, connection: Connection, into: Connection, progress: Progress) -> int:
    at_once = _LARGE_ROWS if any(isinstance(column.type, LargeBinary) for column in table.columns) else _ROWS
    rows = 0
    for part in connection.execute(select(table), execution_options={"yield_per": at_once}).mappings().partitions():
        into.execute(insert(table), [_fitting(dict(row)) for row in part])
        rows += len(part)
    progress(table.name, rows)
    return rows


def _fitting(row: dict[str, Any]) -> dict[str, Any]:
    """Older versions stored counts that no 32-bit column holds."""
    for name in ("world_size", "pid"):
        if row.get(name) is not None:
            row[name] = min(row[name], MAX_COUNT)
    return row


def _continue_ids(table: Table, connection: Connection, into: Connection) -> None:
    """New rows get ids behind all that were ever given: those of rows that are gone, too. The cursor of the rules stands
    behind frames that the compactor has taken out of the tail."""
    key = table.autoincrement_column
    if key is None:
        return
    given = max(_last_id(table, key, connection), connection.execute(select(func.max(key))).scalar() or 0)
    if table is tail:
        given = max(given, connection.execute(select(func.max(cursor.c.tail_id))).scalar() or 0)
    if given == 0:
        return
    if into.dialect.name == "postgresql":
        into.execute(select(func.setval(func.pg_get_serial_sequence(table.name, key.name), given)))
    elif table.dialect_options["sqlite"]["autoincrement"]:
        into.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
        into.execute(text("INSERT INTO sqlite_sequence VALUES (:name, :seq)"), {"name": table.name, "seq": given})


def _last_id(table: Table, key: Column[Any], connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        sequence = connection.execute(select(func.pg_get_serial_sequence(table.name, key.name))).scalar_one()
        return int(connection.execute(text(f"SELECT last_value FROM {sequence}")).scalar_one())  # noqa: S608 - its own answer
    if not table.dialect_options["sqlite"]["autoincrement"]:
        return 0
    found = connection.execute(text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
    return int(found.scalar() or 0)
