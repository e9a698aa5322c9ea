"""What the servers on one database tell each other: rows that each of them reads, a moment after they were committed.

A row is written in the transaction that makes the change. So no server misses one, also when the server that wrote it
dies at once. A server that is alone writes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, case, delete, func, insert, select

from perfagent_server.database.backend import replica_of
from perfagent_server.store.statements import Prepared
from perfagent_server.store.tables import change

__all__ = [
    "Change",
    "Kind",
    "changes_since",
    "database_clock",
    "deletions_since",
    "drop_old",
    "newest_change",
    "newest_deletion",
    "note_change",
]

_KEPT_S = 86_400.0
_DELETIONS_KEPT_S = 30 * 86_400.0  # a server that slept through one would believe in rows that are gone

database_clock = func.extract("epoch", func.clock_timestamp())
"""Unix seconds. Servers need not agree on the time, so they ask PostgreSQL."""


Kind = Literal["alert", "command", "deleted", "delivery", "key", "resolve", "rules", "run", "session"]
"""What changed. deleted: a run; resolve: an alert is to be resolved; session: of a user."""


@dataclass(frozen=True, slots=True)
class Change:
    """kind: see Kind; subject: the id of what changed, empty for all; server: the id of the server that made the change."""

    id: int
    server: str
    kind: str
    subject: str
    detail: str


_newest_deletion = Prepared(select(func.max(change.c.id)).where(change.c.kind == "deleted"))


def note_change(connection: Connection, kind: Kind, subject: str = "", detail: str = "") -> None:
    """Tells the other servers, if there are any."""
    server = replica_of(connection)
    if server is not None:
        values = {"server": server, "kind": kind, "subject": subject, "detail": detail, "created": database_clock}
        connection.execute(insert(change).values(values))


def changes_since(connection: Connection, after: int, limit: int = 1000) -> list[Change]:
    columns = change.c.id, change.c.server, change.c.kind, change.c.subject, change.c.detail
    rows = connection.execute(select(*columns).where(change.c.id > after).order_by(change.c.id).limit(limit))
    return [Change(*row) for row in rows]


def newest_change(connection: Connection) -> int:
    return connection.execute(select(func.max(change.c.id))).scalar() or 0


def newest_deletion(connection: Connection) -> int:
    """The id of the newest change that deleted a run; 0 where there is none."""
    return _newest_deletion.all(connection, {})[0][0] or 0


def deletions_since(connection: Connection, after: int) -> list[tuple[int, str]]:
    """(id of the change, run) of each deletion after this change, oldest first."""
    query = select(change.c.id, change.c.subject).where(change.c.kind == "deleted", change.c.id > after)
    return [(row.id, row.subject) for row in connection.execute(query.order_by(change.c.id))]


def drop_old(connection: Connection) -> None:
    age = database_clock - change.c.created
    connection.execute(delete(change).where(age > case((change.c.kind == "deleted", _DELETIONS_KEPT_S), else_=_KEPT_S)))
