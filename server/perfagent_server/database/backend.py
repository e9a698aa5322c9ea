"""The differences between SQLite and PostgreSQL: how a connection begins, what an error means, what a full disk needs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

from sqlalchemy import Connection, Engine

__all__ = ["PATIENCE_S", "REPLICA", "Backend", "Trouble", "replica_of"]

REPLICA = "perfagent_replica"
PATIENCE_S = 5.0
"""How long locks of others, and a connection, are waited for."""


def replica_of(connection: Connection) -> str | None:
    """The id of the server whose writer this connection belongs to, where several servers share the database; else
    None."""
    return connection.info.get(REPLICA)


class Trouble(Enum):
    """The kinds of driver errors that are about the database itself, not about one statement."""

    FULL = "full"
    """No space is left."""
    BUSY = "busy"
    """Another program holds a lock: trying again helps."""
    LOST = "lost"
    """The connection is gone, and the transaction with it."""


class Backend(Protocol):
    """An open database, SQLite or PostgreSQL. engine: SQLAlchemy's engine. where: its address for messages, without user and
    password. replica: the id of this server where others use the same database, else empty."""

    engine: Engine
    where: str
    replica: str

    def read(self) -> Connection:
        """A connection for one transaction that only reads. All its queries see one state of the data."""

    def writer(self) -> Connection:
        """The one connection that writes."""

    def take_turn(self, connection: Connection) -> None:
        """The first thing in each transaction of the writer. With replicas: waits until no other server writes."""

    def alone_with(self, names: Collection[str]) -> AbstractContextManager[None]:
        """No other server is in here with one of these names meanwhile."""

    def trouble(self, error: BaseException) -> Trouble | None:
        """None: the error is about what was asked, not about the database."""

    def has_room(self) -> bool:
        """Whether writes may go on after a full disk."""

    def use_reserve(self) -> None:
        """The disk is full: gives what was reserved for writes that must not fail."""

    def close(self) -> None:
        """Ends all connections."""

    @property
    def size_bytes(self) -> int:
        """Of all that is stored; 0 where that is not known."""
