"""The audit log: who changed keys, sessions, channels and runs, from where. Rows are only ever added."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import insert
from sqlalchemy.engine import Connection
from starlette.requests import HTTPConnection

from perfagent_server.security.access import Identity
from perfagent_server.store.tables import audit

__all__ = ["record"]


def record(
    connection: HTTPConnection, identity: Identity, action: str, detail: str = ""
) -> Callable[[Connection], None]:
    """A job that writes one row; give it to the transaction that makes the change, so that neither exists without the
    other."""
    origin = connection.client.host if connection.client else ""
    values = {"time": time.time(), "who": identity.who, "origin": origin, "action": action, "detail": detail[:2000]}

    def job(database: Connection) -> None:
        database.execute(insert(audit).values(**values))

    return job
