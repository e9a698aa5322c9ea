"""The audit log: who did what, on which thing, from where. Rows are only ever added, and deleted by age."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.engine import Connection
from starlette.requests import HTTPConnection

from perfagent_server.database import Database
from perfagent_server.security.access import address_of
from perfagent_server.security.rights import Identity
from perfagent_server.store.tables import audit

__all__ = ["AuditQuery", "listed", "read", "record", "record_of_command", "record_of_rule"]


def record(
    connection: HTTPConnection, identity: Identity, action: str, thing: str = "", detail: str = "", *, project: str = ""
) -> Callable[[Connection], None]:
    """A job that writes one row; give it to the transaction that makes the change, so that neither exists without the
    other. thing: the id or name of what it was done to; project: whose that is, empty for what is the server's."""
    return _row(identity.who, address_of(connection), action, thing, detail, project)


def record_of_command(
    action: str, thing: str = "", detail: str = "", *, project: str = ""
) -> Callable[[Connection], None]:
    """As record(), for a command that opens the database while no server runs."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run under ids without a name
        user = str(os.getuid())
    return _row(f"command line (OS user {user})", "", action, thing, detail, project)


def record_of_rule(who: str, action: str, thing: str, detail: str, project: str) -> Callable[[Connection], None]:
    """As record(), for what a rule does by itself."""
    return _row(who, "", action, thing, detail, project)


def _row(who: str, origin: str, action: str, thing: str, detail: str, project: str) -> Callable[[Connection], None]:
    values = {
        "time": time.time(), "who": who[:128], "origin": origin[:128], "action": action, "thing": thing[:256],
        "project": project[:256], "detail": detail[:2000],
    }  # fmt: skip

    def job(database: Connection) -> None:
        database.execute(insert(audit).values(**values))

    return job


def listed(values: Mapping[str, Any]) -> str:
    """What was set, as a detail that people read: `gpu_hour 3.1, currency USD`. What is None was not set."""
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items() if value is not None)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """None is any. projects: only what belongs to one of these; since, until: Unix seconds; before: only rows that are
    older than the one of this id."""

    projects: frozenset[str] | None = None
    who: str | None = None
    action: str | None = None
    thing: str | None = None
    project: str | None = None
    since: float | None = None
    until: float | None = None
    before: int | None = None
    limit: int = 100


def read(database: Database, asked: AuditQuery) -> list[Any]:
    """Rows, newest first."""
    query = select(audit).order_by(audit.c.id.desc()).limit(asked.limit)
    if asked.projects is not None:
        query = query.where(audit.c.project.in_(asked.projects))
    for column, wanted in (
        (audit.c.who, asked.who), (audit.c.action, asked.action), (audit.c.thing, asked.thing),
        (audit.c.project, asked.project),
    ):  # fmt: skip
        if wanted is not None:
            query = query.where(column == wanted)
    if asked.since is not None:
        query = query.where(audit.c.time >= asked.since)
    if asked.until is not None:
        query = query.where(audit.c.time < asked.until)
    if asked.before is not None:
        query = query.where(audit.c.id < asked.before)
    with database.read() as connection:
        return list(connection.execute(query).mappings())
