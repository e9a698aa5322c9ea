"""What is deleted by age beside samples and runs: events, profiles, alerts that are over, and the audit log.

Each kind is looked for on a reader, a few rows at a time, and deleted by key in a short job of the writer. Times of
events and profiles are their senders': what belongs to a run that began later than that is not so old, whatever its
sender's clock said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, select, text, tuple_

from perfagent_server.store.tables import (
    MAY_GO_BY_AGE,
    alert,
    audit,
    delivery,
    event,
    profile,
    profile_part,
    run,
)

__all__ = ["EXPIRIES", "Expiry"]


@dataclass(frozen=True, slots=True)
class Expiry:
    """One kind. age: the field of RetentionPolicy that says how many days it is kept; counter: of Retention; find: keys
    of some that are older than a time (Unix seconds); delete: by these keys."""

    age: str
    counter: str
    find: Callable[[float], Select[Any]]
    delete: Callable[[Sequence[Any], Connection], None]

    def some(self, connection: Connection, before: float) -> list[Any]:
        return list(connection.execute(self.find(before)).all())


def _began_before(run_of: ColumnElement[str], before: float) -> ColumnElement[bool]:
    return select(run.c.id).where(run.c.id == run_of, run.c.started < before).exists()


def _events(before: float) -> Select[Any]:
    return (
        select(event.c.id)
        .where(text(MAY_GO_BY_AGE), event.c.time < before, _began_before(event.c.run, before))
        .order_by(event.c.time)
        .limit(500)
    )


def _parts(before: float) -> Select[Any]:
    """Pieces of old traces, of up to 1 MB each: they go before their profile."""
    return (
        select(profile_part.c.run, profile_part.c.profile, profile_part.c.part)
        .join(profile, (profile.c.run == profile_part.c.run) & (profile.c.id == profile_part.c.profile))
        .where(profile.c.time < before, _began_before(profile.c.run, before))
        .limit(16)
    )


def _profiles(before: float) -> Select[Any]:
    old = select(profile.c.run, profile.c.id).where(profile.c.time < before, _began_before(profile.c.run, before))
    return old.limit(500)


def _alerts(before: float) -> Select[Any]:
    """Alerts that are over, of runs that were not heard of since: no machine of the rules holds them any more."""
    is_silent = select(run.c.id).where(run.c.id == alert.c.run, run.c.updated < before).exists()
    return select(alert.c.id).where(alert.c.state == "resolved", alert.c.resolved < before, is_silent).limit(500)


def _notices(before: float) -> Select[Any]:
    """Deliveries that belong to no alert: tests of channels."""
    old = select(delivery.c.id).where(
        delivery.c.alert.is_(None), delivery.c.state != "waiting", delivery.c.created < before
    )
    return old.limit(500)


def _audits(before: float) -> Select[Any]:
    return select(audit.c.id).where(audit.c.time < before).limit(500)


def _by_id(column: Any) -> Callable[[Sequence[Any], Connection], None]:
    def job(keys: Sequence[Any], connection: Connection) -> None:
        connection.execute(delete(column.table).where(column.in_([key[0] for key in keys])))

    return job


def _by_key(*columns: Any) -> Callable[[Sequence[Any], Connection], None]:
    def job(keys: Sequence[Any], connection: Connection) -> None:
        table = columns[0].table
        connection.execute(delete(table).where(tuple_(*columns).in_([tuple(key) for key in keys])))

    return job


EXPIRIES = (
    Expiry("events_days", "events_deleted", _events, _by_id(event.c.id)),
    Expiry(
        "profiles_days",
        "profile_parts_deleted",
        _parts,
        _by_key(profile_part.c.run, profile_part.c.profile, profile_part.c.part),
    ),
    Expiry("profiles_days", "profiles_deleted", _profiles, _by_key(profile.c.run, profile.c.id)),
    Expiry("alerts_days", "alerts_deleted", _alerts, _by_id(alert.c.id)),
    Expiry("alerts_days", "notices_deleted", _notices, _by_id(delivery.c.id)),
    Expiry("audit_days", "audit_rows_deleted", _audits, _by_id(audit.c.id)),
)
