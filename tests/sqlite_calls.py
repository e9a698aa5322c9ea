"""The SQL that the writer sends to SQLite, for tests that count statements instead of seconds."""

from __future__ import annotations

from collections.abc import Callable

from perfagent_server.database import Database

__all__ = ["sqlite_calls"]


def sqlite_calls(database: Database, into: list[str]) -> Callable[[], None]:
    """Notes the statements of the writer's connection; answers what ends it."""

    def trace(callback: Callable[[str], None] | None) -> None:
        database.write(lambda connection: connection.connection.driver_connection.set_trace_callback(callback))

    trace(into.append)
    return lambda: trace(None)
