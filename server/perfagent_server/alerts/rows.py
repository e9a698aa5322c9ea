"""Alerts and their deliveries as rows: changes in, one transaction's statements out; and rows back as what the API tells.

A firing alert and what is to be sent about it are written together (the outbox pattern), so that no kill can come between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.sql.expression import func

from perfagent.wire import SEVERITIES, Alert, Finding
from perfagent_server.alerts.life import Change
from perfagent_server.alerts.webhooks import alert_body, delivery_id, text_json
from perfagent_server.store.tables import alert, channel, delivery
from perfagent_server.store.tables import run as runs
from perfagent_server.timestamps import rfc3339

__all__ = ["alert_of", "apply", "as_dict"]

_UNTOLD = "user_alert"  # a point in time, which is not over later: no channel is told that it was resolved


def apply(
    connection: Connection, changes: Sequence[tuple[str, Change]], now: float, link: Callable[[str], str]
) -> tuple[list[Alert], int]:
    """Carries out changes of alerts. Gives the alerts as they are now, and how many deliveries were written."""
    book = _Book(connection, now, link, {run for run, _ in changes})
    for run, change in changes:
        book.enter(run, change)
    return book.alerts, book.deliveries


class _Book:
    def __init__(self, connection: Connection, now: float, link: Callable[[str], str], wanted: Iterable[str]) -> None:
        self.connection, self.now, self.link = connection, now, link
        self.alerts: list[Alert] = []
        self.deliveries = 0
        self.runs = {
            row["id"]: row
            for row in connection.execute(
                select(runs.c.id, runs.c.name, runs.c.project).where(runs.c.id.in_(list(wanted)))
            ).mappings()
        }
        self.channels = connection.execute(select(channel.c.id, channel.c.min_severity).where(channel.c.enabled.is_(True))).all()

    def enter(self, run: str, change: Change) -> None:
        if run not in self.runs:
            return  # deleted meanwhile
        if change.kind == "fire" and self._insert(run, change):
            self._tell(run, change, "alert.firing", [row.id for row in self.channels if _wants(row.min_severity, change.finding)])
        elif change.kind == "reopen":
            evidence = text_json(change.finding.evidence)
            self._update(change, state="firing", resolved=None, last_step=change.step, evidence=evidence)
        elif change.kind == "update":
            self._update(change, last_step=change.step, **_columns(change.finding))
            # Those who were told are not told again; those whose threshold it passes only now are told for the first time.
            self._tell(run, change, "alert.firing", [row.id for row in self.channels if _wants(row.min_severity, change.finding)])
        elif change.kind == "resolve":
            # A finding of its own: the one in the machine may fire again, and is then not resolved.
            change = replace(
                change, finding=replace(change.finding, evidence={**change.finding.evidence, "resolved": change.why})
            )
            self._update(
                change, state="resolved", resolved=self.now, last_step=change.step, evidence=text_json(change.finding.evidence)
            )
            if change.finding.rule != _UNTOLD:
                told = select(delivery.c.channel).where(delivery.c.alert == change.alert, delivery.c.event == "alert.firing")
                enabled = {row.id for row in self.channels}
                self._tell(
                    run, change, "alert.resolved", [one for one in self.connection.execute(told).scalars() if one in enabled]
                )
        row = self.connection.execute(select(alert).where(alert.c.id == change.alert)).mappings().first()
        if row is not None:
            self.alerts.append(alert_of(row))

    def _insert(self, run: str, change: Change) -> bool:
        """False when it was written before: the same data judged again."""
        found = change.finding
        values = {
            "id": change.alert, "run": run, "state": "firing", "since": _seconds(found.since, self.now), "fired": self.now,
            "last_step": change.step, **_columns(found),
        }  # fmt: skip
        return self._insert_new(alert, values)

    def _insert_new(self, table: Any, values: Mapping[str, Any]) -> bool:
        make = postgresql_insert if self.connection.dialect.name == "postgresql" else sqlite_insert
        statement = make(table).values(**values).on_conflict_do_nothing(index_elements=["id"])
        return self.connection.execute(statement).rowcount == 1

    def _update(self, change: Change, **values: Any) -> None:
        self.connection.execute(update(alert).where(alert.c.id == change.alert).values(**values))

    def _tell(self, run: str, change: Change, event: str, channels: Sequence[str]) -> None:
        if not channels or self._muted(run, change):
            return
        about = self.runs[run]
        body = alert_body(
            event, self.now, alert=change.alert, state=event.removeprefix("alert."), finding=change.finding,
            run=run, run_name=about["name"], project=about["project"], url=self.link(run),
        )  # fmt: skip
        for one in channels:
            values = {
                "id": delivery_id(change.alert, event, one), "channel": one, "alert": change.alert, "event": event, "body": body,
                "state": "waiting", "tries": 0, "created": self.now, "due": self.now, "error": "",
            }  # fmt: skip
            self.deliveries += self._insert_new(delivery, values)

    def _muted(self, run: str, change: Change) -> bool:
        muted = select(func.count()).where(
            alert.c.run == run,
            alert.c.rule == change.finding.rule,
            alert.c.muted_until.is_not(None),
            alert.c.muted_until > self.now,
        )
        return bool(self.connection.execute(muted).scalar())


def _columns(found: Finding) -> dict[str, Any]:
    return {
        "rule": found.rule, "severity": found.severity, "message": found.message, "fix": found.fix,
        "evidence": text_json(found.evidence),
        "ranks": json.dumps(found.ranks), "gain_pct": found.gain_pct, "since_step": found.since_step,
    }  # fmt: skip


def _wants(min_severity: str, found: Finding) -> bool:
    order: tuple[str, ...] = SEVERITIES
    return order.index(found.severity) >= order.index(min_severity)


def _seconds(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return otherwise


def alert_of(row: RowMapping) -> Alert:
    """An alert as the API tells it, from its row."""
    return Alert(
        id=row["id"], state=row["state"], run=row["run"], rule=row["rule"], severity=row["severity"], message=row["message"],
        since=rfc3339(row["since"]), since_step=row["since_step"], last_step=row["last_step"], ranks=json.loads(row["ranks"]),
        evidence=json.loads(row["evidence"]), fix=row["fix"], gain_pct=row["gain_pct"], resolved=rfc3339(row["resolved"]),
        acknowledged=rfc3339(row["acknowledged"]), muted_until=rfc3339(row["muted_until"]),
    )  # fmt: skip


def as_dict(row: RowMapping) -> dict[str, Any]:
    """A delivery as the API tells it."""
    return {
        "id": row["id"], "channel": row["channel"], "alert": row["alert"], "event": row["event"], "state": row["state"],
        "tries": row["tries"], "created": rfc3339(row["created"]),
        "due": rfc3339(row["due"]) if row["state"] == "waiting" else None,
        "delivered": rfc3339(row["delivered"]), "status": row["status"], "error": row["error"],
    }  # fmt: skip
