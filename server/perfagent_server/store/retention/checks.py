"""What must still be true in each transaction that deletes: a round takes as long as it takes, and what it has read at its
beginning is old by then. A run may go on, or get the tag `keep`; the settings may change; another server may have taken
over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TypeVar

from sqlalchemy import Connection, select

from perfagent_server.database import Database
from perfagent_server.store.interface import Check
from perfagent_server.store.retention.policy import Policies, Scope, stored_policies
from perfagent_server.store.statements import among
from perfagent_server.store.tables import run, series

__all__ = ["CheckedDatabase", "PoliciesChanged", "RunStays", "held_runs", "held_series", "same_policies"]

T = TypeVar("T")


class RunStays(Exception):  # noqa: N818 - a state, as those of the database
    """A run that was to lose something must not lose it now."""


class PoliciesChanged(Exception):  # noqa: N818
    """What this round goes by is no longer what is set."""


class CheckedDatabase:
    """A database in which each job of the writer is preceded by a check."""

    def __init__(self, database: Database, check: Check) -> None:
        self.database, self.check = database, check

    def read(self) -> AbstractContextManager[Connection]:
        return self.database.read()

    def write(self, job: Callable[[Connection], T]) -> T:
        """Essential: it makes room on a full disk."""

        def checked(connection: Connection) -> T:
            self.check(connection)
            return job(connection)

        inner = job.func if isinstance(job, functools.partial) else job
        return self.database.write(functools.wraps(inner)(checked), essential=True)  # the name is for measurements

    def also(self, check: Check) -> CheckedDatabase:
        def both(connection: Connection) -> None:
            self.check(connection)
            check(connection)

        return CheckedDatabase(self.database, both)


def same_policies(policies: Policies) -> Check:
    def check(connection: Connection) -> None:
        if stored_policies(connection) != policies.stored:
            raise PoliciesChanged

    return check


def held_runs(connection: Connection, scope: Scope, runs: Collection[str]) -> set[str]:
    """Those of these runs that are in the scope, and may lose something."""
    return set(connection.execute(select(run.c.id).where(among(connection, run.c.id, runs), scope.holds())).scalars())


def held_series(connection: Connection, scope: Scope, ids: Collection[int]) -> set[int]:
    """The same of series."""
    found = (
        select(series.c.id)
        .join(run, run.c.id == series.c.run)
        .where(among(connection, series.c.id, ids), scope.holds())
    )
    return set(connection.execute(found).scalars())
