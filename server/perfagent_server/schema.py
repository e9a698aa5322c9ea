"""Brings a database to the schema of this version, by the migrations that travel in the package (no alembic.ini
needed)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine

from perfagent.errors import ResourceError

__all__ = ["config", "current", "head", "missing", "upgrade"]


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for our tree; env.py takes the connection from it."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    made.attributes["connection"] = connection
    return made


def head() -> str | None:
    """The newest revision that this version knows."""
    return _migrations().get_current_head()


@cache
def _migrations() -> ScriptDirectory:
    """The migrations of the package. Cached, because alembic imports a file for each."""
    return ScriptDirectory.from_config(config())


def current(connection: Connection) -> str | None:
    """The revision of the database, None when it is empty."""
    return MigrationContext.configure(connection).get_current_revision()


def missing(found: str | None, where: str) -> list[tuple[str, str]]:
    """The migrations that a database of this revision still needs: revision and what it does, oldest first. Raises
    ResourceError for a revision from a newer version."""
    scripts = _migrations()
    newest = scripts.get_current_head()
    if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
        raise ResourceError(
            f"the database {where} has schema version {found!r}, which this perfagent does not know (newest here: {newest!r}): "
            "upgrade perfagent, or restore a backup made with this version"
        )
    if found == newest:
        return []
    left = scripts.iterate_revisions("head", found or "base")
    return [(script.revision, script.doc) for script in left][::-1]


def upgrade(engine: Engine, where: str, first: Callable[[Connection], None] | None = None) -> None:
    """Runs what is missing, all in one transaction, and `first` before it. Raises ResourceError for a revision from a
    newer version."""
    with engine.connect() as connection, connection.begin():
        found = current(connection)
    if not missing(found, where):
        return
    newest = head()
    with engine.connect().execution_options(perfagent_write=True) as connection, connection.begin():
        if first is not None:
            first(connection)
        if current(connection) != newest:  # another process may have been faster
            command.upgrade(config(connection), "head")
