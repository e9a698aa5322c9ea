"""A server's data folder and its database with the tables made: a copy of one that was made once, for a tenth of the time
of the migrations. The database is SQLite in the folder, or with --postgresql one of a real PostgreSQL.

For tests of what a server does, not of its first start: tests/server/store/test_database.py and every `perfagent up`
make theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clickhouse_server
import postgresql_server
from sqlalchemy import Connection, NullPool, create_engine

from perfagent_server.database import open_database

__all__ = ["data_folder", "looking_into", "place_of"]

NAME = "perfagent.db"


def place_of(folder: Path) -> dict[str, Any]:
    """`data`, `database` and `metrics` of Settings."""
    metrics = clickhouse_server.address_of(folder) if clickhouse_server.is_wanted() else None
    if not postgresql_server.is_wanted():
        return {"data": data_folder(folder), "database": None, "metrics": metrics}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return {"data": folder, "database": postgresql_server.database_of(folder), "metrics": metrics}


@contextlib.contextmanager
def looking_into(folder: Path) -> Iterator[Connection]:
    """A connection to the database of a folder, past its server, which may be dead."""
    url = place_of(folder)["database"]
    address = (
        f"sqlite:///file:{folder / NAME}?mode=ro&uri=true" if url is None else url.replace("sql:", "sql+psycopg:", 1)
    )
    engine = create_engine(address, poolclass=NullPool)
    with engine.connect() as connection:
        yield connection


def data_folder(folder: Path) -> Path:
    """The folder, with an empty database of this version unless it has one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / NAME).exists():
        shutil.copy(_made_once(), folder / NAME)  # with its mode, 0600
    return folder


@functools.cache
def _made_once() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="perfagent-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    open_database(SimpleNamespace(data=folder / "first", database=None), reserve_bytes=1 << 12).close()
    copy = folder / NAME
    copy.touch(mode=0o600)
    source, target = sqlite3.connect(folder / "first" / NAME), sqlite3.connect(copy)
    with contextlib.closing(source), contextlib.closing(target):
        source.backup(target)  # whole, whatever is still in the log
    return copy
