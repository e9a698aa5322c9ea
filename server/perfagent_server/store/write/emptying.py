"""Empties a run that is about to be deleted, a little at a time: what one job deletes, everybody who writes waits for.

In one job, a gigabyte of traces held the writer for 0.7 s, and the tail of 512 ranks for 0.4. Rows are looked for on a
reader and deleted by key. The run, its sources and its series stay until the deletion itself; so does what is left when
it is too little for a job of its own. Frames may come all the while, and the compactor may write: what it was about to
replace is gone then, which it takes for a deleted run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, bindparam, delete, select

from perfagent_server.database import Database
from perfagent_server.store.interface import Check, no_check
from perfagent_server.store.statements import Prepared
from perfagent_server.store.tables import block, bundle, event, last, media, profile_part, rollup, series, tail

__all__ = ["empty_run"]


class _Pieces(NamedTuple):
    """How a table is emptied. at_once: rows of a job, some 10 ms."""

    find: Prepared
    drop: Prepared
    keys: list[str]
    at_once: int


def _pieces(table: Table, at_once: int) -> _Pieces:
    keys = list(table.primary_key.columns)
    found = select(*keys)
    if "run" in table.columns:
        found = found.where(table.c.run == bindparam("of"))
    else:
        found = found.join_from(series, table, table.c.series == series.c.id).where(series.c.run == bindparam("of"))
    names = [f"_{column.name}" for column in keys]
    same = [column == bindparam(name) for column, name in zip(keys, names, strict=True)]
    return _Pieces(Prepared(found.limit(at_once)), Prepared(delete(table).where(*same)), names, at_once)


_TABLES = (
    _pieces(profile_part, 16),  # of up to 1 MB each
    _pieces(media, 16),
    _pieces(tail, 1000),
    _pieces(event, 1000),
    _pieces(bundle, 50),
    _pieces(block, 1000),
    _pieces(rollup, 1000),
    _pieces(last, 2000),
)


def empty_run(database: Database, run: str, check: Check = no_check) -> None:
    """Never called on the writer thread. check: called first in each transaction."""
    for table in _TABLES:
        while True:
            with database.read() as connection:
                found = table.find.all(connection, {"of": run})
            if len(found) < table.at_once:
                break
            database.write(functools.partial(_drop, table=table, found=found, check=check), essential=True)


def _drop(connection: Connection, table: _Pieces, found: Sequence[Sequence[Any]], check: Check) -> None:
    check(connection)
    table.drop.many(connection, [dict(zip(table.keys, row, strict=True)) for row in found])
