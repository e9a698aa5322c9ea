"""What is deleted by age beside samples and runs: events, profiles, media, alerts that are over, and the audit log.

Each kind is looked for on a reader, a few rows at a time, and deleted by key in a short job of the writer. Times of
events and profiles are their senders': what belongs to a run that began later than that is not so old, whatever its
sender's clock said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, select, text, tuple_

from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.tables import (
    MAY_GO_BY_AGE,
    alert,
    audit,
    delivery,
    event,
    media,
    profile,
    profile_part,
    run,
)

__all__ = ["EXPIRIES", "Expiry"]


@dataclass(frozen=True, slots=True)
class Expiry:
    """One kind. age: the field of RetentionPolicy that says how many days it is kept; counter: of Retention; find: keys of
    those that are older than a time (Unix seconds); delete: by these keys; at_once: keys in a job; of_project: whether it
    belongs to runs, and so to projects."""

    age: str
    counter: str
    find: Callable[[float, Scope], Select[Any]]
    delete: Callable[[Sequence[Any], Connection], None]
    at_once: int = 500
    of_project: bool = True

    def some(self, connection: Connection, before: float, scope: Scope) -> list[Any]:
        return list(connection.execute(self.find(before, scope).limit(self.at_once)).all())

    def count(self, connection: Connection, before: float, scope: Scope) -> int:
        found = self.find(before, scope).order_by(None).subquery()
        return int(connection.execute(select(func.count()).select_from(found)).scalar_one())


def _of_old_run(run_of: ColumnElement[str], before: float, scope: Scope) -> ColumnElement[bool]:
    return select(run.c.id).where(run.c.id == run_of, run.c.started < before, scope.holds()).exists()


def _events(before: float, scope: Scope) -> Select[Any]:
    return (
        select(event.c.id)
        .where(text(MAY_GO_BY_AGE), event.c.time < before, _of_old_run(event.c.run, before, scope))
        .order_by(event.c.time)
    )


def _parts(before: float, scope: Scope) -> Select[Any]:
    """Pieces of old traces, of up to 1 MB each: they go before their profile."""
    return (
        select(profile_part.c.run, profile_part.c.profile, profile_part.c.part)
        .join(profile, (profile.c.run == profile_part.c.run) & (profile.c.id == profile_part.c.profile))
        .where(profile.c.time < before, _of_old_run(profile.c.run, before, scope))
    )


def _profiles(before: float, scope: Scope) -> Select[Any]:
    is_old = _of_old_run(profile.c.run, before, scope)
    return select(profile.c.run, profile.c.id).where(profile.c.time < before, is_old)


def _media(before: float, scope: Scope) -> Select[Any]:
    """Of up to 2 MB each."""
    is_old = _of_old_run(media.c.run, before, scope)
    return select(media.c.id).where(media.c.time < before, is_old).order_by(media.c.time)


def _alerts(before: float, scope: Scope) -> Select[Any]:
    """Alerts that are over, of runs that were not heard of since: no machine of the rules holds them any more."""
    is_silent = select(run.c.id).where(run.c.id == alert.c.run, run.c.updated < before, scope.holds()).exists()
    return select(alert.c.id).where(alert.c.state == "resolved", alert.c.resolved < before, is_silent)


def _notices(before: float, _scope: Scope) -> Select[Any]:
    """Deliveries that belong to no alert: tests of channels."""
    return select(delivery.c.id).where(
        delivery.c.alert.is_(None), delivery.c.state != "waiting", delivery.c.created < before
    )


def _audits(before: float, _scope: Scope) -> Select[Any]:
    return select(audit.c.id).where(audit.c.time < before)


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
        at_once=16,
    ),
    Expiry("profiles_days", "profiles_deleted", _profiles, _by_key(profile.c.run, profile.c.id)),
    Expiry("media_days", "media_deleted", _media, _by_id(media.c.id), at_once=16),
    Expiry("alerts_days", "alerts_deleted", _alerts, _by_id(alert.c.id)),
    Expiry("alerts_days", "notices_deleted", _notices, _by_id(delivery.c.id), of_project=False),
    Expiry("audit_days", "audit_rows_deleted", _audits, _by_id(audit.c.id), of_project=False),
)
