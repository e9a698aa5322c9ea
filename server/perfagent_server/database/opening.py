"""Opens the database that the settings name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol
from urllib.parse import quote

from sqlalchemy import URL, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from perfagent.errors import ConfigError, ResourceError
from perfagent_server import schema
from perfagent_server.database.backend import PATIENCE_S
from perfagent_server.database.sqlite import RESERVE_BYTES, open_sqlite
from perfagent_server.database.writer import MAX_WAITING, Database

__all__ = [
    "DatabaseSettings",
    "database_url",
    "is_sqlite",
    "open_database",
    "open_to_read",
    "revision_of",
    "sqlite_path",
]

_ADDRESSES = "sqlite:////path/perfagent.db or postgresql://user@host/perfagent"


class DatabaseSettings(Protocol):
    """The part of Settings that is needed here. data: the data folder; database: an SQLAlchemy URL, None for SQLite in
    `data`."""

    @property
    def data(self) -> Path: ...
    @property
    def database(self) -> str | None: ...


def open_database(
    settings: DatabaseSettings,
    *,
    alone: bool = False,
    replica: str = "",
    reserve_bytes: int = RESERVE_BYTES,
    max_waiting: int = MAX_WAITING,
    patience_s: float = PATIENCE_S,
) -> Database:
    """Opens, creates or upgrades the database. alone: no other server may use it. PostgreSQL guards that with a lock; for
    SQLite commands/server_lock.py does. replica: the id of this server, if others use the database, too. Raises
    ConfigError or ResourceError, which name the database and the cure. patience_s: how long others' locks, and a
    connection, are waited for."""
    url = database_url(settings)
    if url is None or is_sqlite(settings):
        if replica:
            raise ConfigError(
                "several servers on one database need PostgreSQL: --database postgresql://user@host/perfagent"
            )
        opened = open_sqlite(sqlite_path(settings), reserve_bytes=reserve_bytes, patience_s=patience_s)
        return Database(opened, max_waiting=max_waiting, patience_s=patience_s)
    backend = _postgresql().open_postgresql(url, alone=alone, replica=replica, patience_s=patience_s)
    return Database(backend, max_waiting=max_waiting, patience_s=patience_s)


def open_to_read(settings: DatabaseSettings) -> Database:
    """Opens a PostgreSQL database beside its server, and changes nothing. Raises ConfigError, or ResourceError where it does
    not have this version's tables."""
    url = database_url(settings)
    assert url is not None
    opened = _postgresql().open_postgresql(url, migrate=False)
    found, newest = _revision(opened.engine, opened.where), schema.head()
    if found != newest:
        opened.close()
        raise ResourceError(
            f"the database {opened.where} has schema version {found!r}, and this perfagent {newest!r}: use the version of its "
            "server, or bring it up to date with `perfagent db upgrade`"
        )
    return Database(opened)


def revision_of(settings: DatabaseSettings) -> str | None:
    """The schema version of a database, None where there is none or it is empty. Changes nothing, also beside a server.
    Raises ConfigError, or ResourceError where it cannot be read."""
    url = database_url(settings)
    if url is None or is_sqlite(settings):
        file = sqlite_path(settings)
        if not file.exists():
            return None
        engine = create_engine(f"sqlite:///file:{quote(str(file.resolve()))}?mode=ro&uri=true", poolclass=NullPool)
        return _revision(engine, str(file))
    opened = _postgresql().open_postgresql(url, migrate=False)
    try:
        return _revision(opened.engine, opened.where)
    finally:
        opened.close()


def _revision(engine: Engine, where: str) -> str | None:
    try:
        with engine.connect() as connection:
            return schema.current(connection)
    except DBAPIError as error:
        raise ResourceError(f"the database {where} cannot be read ({error.orig})") from error


def _postgresql() -> ModuleType:
    """With psycopg, which a server on SQLite does not load."""
    return import_module("perfagent_server.database.postgresql")


def database_url(settings: DatabaseSettings) -> URL | None:
    """Where the database is; None for SQLite in the data folder. Raises ConfigError for what is no address, or of another
    kind."""
    if settings.database is None:
        return None
    try:
        url = make_url(settings.database)
    except ArgumentError as error:  # what was given is not shown: it may hold a password
        raise ConfigError(f"the database must be an address such as {_ADDRESSES}; what was given is none") from error
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(
            f"the database must be SQLite or PostgreSQL, as {_ADDRESSES}: {url.get_backend_name()} is not supported; "
            "leave the database out to have SQLite in the data folder"
        )
    return url


def is_sqlite(settings: DatabaseSettings) -> bool:
    """Whether these settings mean SQLite. Raises ConfigError as database_url() does."""
    url = database_url(settings)
    return url is None or url.get_backend_name() == "sqlite"


def sqlite_path(settings: DatabaseSettings) -> Path:
    """The SQLite file these settings mean."""
    url = database_url(settings)
    if url is None:
        return Path(settings.data) / "perfagent.db"
    name = url.database
    if not name or name == ":memory:":
        raise ConfigError(
            f"database {settings.database!r} lives in memory and would be lost; give a file: sqlite:////path/perfagent.db"
        )
    return Path(name)
