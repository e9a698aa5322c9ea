"""The SQL that a question sends to the database, for tests that count statements instead of seconds. Rows that go straight
to the driver (store/statements.py) are in `sqlite_calls` alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Engine, event

from perfagent_server.database import Database

__all__ = ["plan_of", "sqlite_calls", "statements_of", "watched"]


@contextlib.contextmanager
def watched(engine: Any = Engine) -> Iterator[list[tuple[str, Any]]]:
    """(SQL, parameters) of an engine, or of all: those of the server's own threads, which have names, are left out."""
    seen: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if not threading.current_thread().name.startswith("perfagent"):
            seen.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


def statements_of(engine: Any, ask: Callable[[], object]) -> list[tuple[str, Any]]:
    with watched(engine) as seen:
        ask()
    return seen


def plan_of(database: Database, statement: tuple[str, Any]) -> str:
    """How SQLite would answer it: one line a step."""
    sql, parameters = statement
    with database.read() as connection:
        return "\n".join(row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters))


def sqlite_calls(database: Database, into: list[str]) -> Callable[[], None]:
    """Notes what the writer's connection sends to SQLite, rows that go straight to the driver too; answers what ends it."""

    def trace(callback: Callable[[str], None] | None) -> None:
        database.write(lambda connection: connection.connection.driver_connection.set_trace_callback(callback))

    trace(into.append)
    return lambda: trace(None)
