"""Writes alerts and their deliveries as rows, in the statements of one transaction, and reads rows back in the form of
the API.

A firing alert and what is to be sent about it are written together (the outbox pattern), so that no kill can come
between.

A delivery that is due later is one that may not be wanted after all: of an alert that opened again (it may flap) and of
one that is muted. When the alert is resolved before, it is dropped, and neither is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, select, update
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.expression import func

from perfagent.wire import SEVERITIES, Alert, Finding
from perfagent_server.alerts.state_machine import Change
from perfagent_server.alerts.webhooks import alert_body, delivery_id, text_json
from perfagent_server.rules.rule import USER_ALERT
from perfagent_server.store.statements import insert_for
from perfagent_server.store.tables import alert, channel, delivery
from perfagent_server.store.tables import run as runs
from perfagent_server.timestamps import rfc3339

__all__ = ["SETTLED_S", "alert_of", "apply", "as_dict", "mute"]

SETTLED_S = 60.0
"""How long an alert that opened again must stay open before it is told again."""

_UNTOLD = USER_ALERT  # a point in time, which is not over later: no channel is notified that it was resolved


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
        self.channels = connection.execute(
            select(channel.c.id, channel.c.min_severity).where(channel.c.enabled.is_(True))
        ).all()

    def enter(self, run: str, change: Change) -> None:
        if run not in self.runs:
            return  # deleted meanwhile
        if change.kind == "fire" and self._insert(run, change):
            self._tell_firing(run, change, self.now)
        elif change.kind == "reopen":
            since = _seconds(change.finding.since, self.now)
            self._update(
                change, state="firing", resolved=None, since=since, last_step=change.step, **_columns(change.finding)
            )
            self._tell_firing(run, change, self.now + SETTLED_S)
        elif change.kind == "update":
            self._update(change, last_step=change.step, **_columns(change.finding))
            # Channels that were notified are not notified again; a channel whose threshold it passes only now is.
            self._tell_firing(run, change, self.now)
        elif change.kind == "resolve":
            # A finding of its own: the one in the machine may fire again, and is then not resolved.
            change = replace(
                change, finding=replace(change.finding, evidence={**change.finding.evidence, "resolved": change.why})
            )
            self._update(change, state="resolved", resolved=self.now, last_step=change.step, **_columns(change.finding))
            told = self._told(change)
            if change.finding.rule != _UNTOLD:
                # Muted or not: a channel that was notified of the firing would else believe it for ever.
                self._tell(run, change, "alert.resolved", told, self.now)
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
        insert = insert_for(self.connection.dialect.name)
        statement = insert(table).values(**values).on_conflict_do_nothing(index_elements=["id"])
        return self.connection.execute(statement).rowcount == 1

    def _update(self, change: Change, **values: Any) -> None:
        self.connection.execute(update(alert).where(alert.c.id == change.alert).values(**values))

    def _told(self, change: Change) -> list[str]:
        """The channels whose last word on the alert is that it fires, or soon will be; drops what was not sent to them
        yet."""
        self.connection.execute(delete(delivery).where(delivery.c.alert == change.alert, _held(self.now)))
        its = select(delivery.c.channel, delivery.c.event).where(delivery.c.alert == change.alert)
        last: dict[str, str] = {
            row.channel: row.event for row in self.connection.execute(its.order_by(delivery.c.created))
        }
        return [row.id for row in self.channels if last.get(row.id) == "alert.firing"]

    def _tell_firing(self, run: str, change: Change, due: float) -> None:
        wanting = [row.id for row in self.channels if _wants(row.min_severity, change.finding)]
        muted = _muted_until(self.connection, run, change.finding.rule, self.now)
        self._tell(run, change, "alert.firing", wanting, max(due, muted or due))

    def _tell(self, run: str, change: Change, event: str, channels: Sequence[str], due: float) -> None:
        if not channels:
            return
        about = self.runs[run]
        body = alert_body(
            event, self.now, alert=change.alert, state=event.removeprefix("alert."), finding=change.finding,
            run=run, run_name=about["name"], project=about["project"], url=self.link(run),
        )  # fmt: skip
        newest = select(delivery.c.channel, func.max(delivery.c.created)).where(delivery.c.alert == change.alert)
        last: dict[str, float] = {
            row[0]: row[1] for row in self.connection.execute(newest.group_by(delivery.c.channel))
        }
        for one in channels:
            # Their order is that of `created` (outbox.py), also within one transaction and after a jump of the clock.
            created = max(self.now, last.get(one, 0.0) + 1e-3)
            values = {
                "id": _delivery_id(change, event, one), "channel": one, "alert": change.alert, "event": event, "body": body,
                "state": "waiting", "tries": 0, "created": created, "due": due, "error": "",
            }  # fmt: skip
            if self._insert_new(delivery, values):
                self.deliveries += 1
            else:  # what was not sent yet is sent as it is by then
                unsent = update(delivery).where(delivery.c.id == values["id"], _held(self.now))
                self.connection.execute(unsent.values(body=body))


def mute(connection: Connection, alert_id: str, until: float | None, now: float) -> bool:
    """Mutes an alert, and others of its rule in its run, or ends that; what waits for the end of a mute waits for the
    new one. Whether anything is due now."""
    about = connection.execute(select(alert.c.run, alert.c.rule).where(alert.c.id == alert_id)).one()
    before = _muted_until(connection, about.run, about.rule, now)
    connection.execute(update(alert).where(alert.c.id == alert_id).values(muted_until=until))
    after = _muted_until(connection, about.run, about.rule, now) or now
    its = select(alert.c.id).where(alert.c.run == about.run, alert.c.rule == about.rule)
    waiting = update(delivery).where(delivery.c.alert.in_(its), _held(now))
    waiting = waiting.where((delivery.c.due < after) | (delivery.c.due == before))
    return bool(connection.execute(waiting.values(due=after)).rowcount) and after <= now


def _delivery_id(change: Change, event: str, channel_id: str) -> str:
    """One for each opening of an alert: what is sent about the second is no repetition of the first."""
    again = [str(change.opening)] if change.opening > 1 else []
    return delivery_id(change.alert, event, channel_id, *again)


def _held(now: float) -> ColumnElement[bool]:
    """Whether a delivery waits for its time: it was never tried, and is not about to be."""
    later = (delivery.c.tries == 0) & (delivery.c.due > now) & (delivery.c.due > delivery.c.created)
    return (delivery.c.event == "alert.firing") & (delivery.c.state == "waiting") & later


def _muted_until(connection: Connection, run: str, rule: str, now: float) -> float | None:
    last = select(func.max(alert.c.muted_until)).where(
        alert.c.run == run, alert.c.rule == rule, alert.c.muted_until > now
    )
    until: float | None = connection.execute(last).scalar()
    return until


def _columns(found: Finding) -> dict[str, Any]:
    return {
        "rule": found.rule, "severity": found.severity, "message": found.message, "fix": found.fix,
        "title": found.title, "cause": found.cause, "cost": found.cost,
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
    """An alert as the API shows it, from its row."""
    return Alert(
        id=row["id"], state=row["state"], run=row["run"], rule=row["rule"], severity=row["severity"], message=row["message"],
        since=rfc3339(row["since"]), since_step=row["since_step"], last_step=row["last_step"], ranks=json.loads(row["ranks"]),
        evidence=json.loads(row["evidence"]), fix=row["fix"], gain_pct=row["gain_pct"], resolved=rfc3339(row["resolved"]),
        acknowledged=rfc3339(row["acknowledged"]), muted_until=rfc3339(row["muted_until"]),
        title=row["title"], cause=row["cause"], cost=row["cost"],
    )  # fmt: skip


def as_dict(row: RowMapping) -> dict[str, Any]:
    """A delivery as the API shows it."""
    return {
        "id": row["id"], "channel": row["channel"], "alert": row["alert"], "event": row["event"], "state": row["state"],
        "tries": row["tries"], "created": rfc3339(row["created"]),
        "due": rfc3339(row["due"]) if row["state"] == "waiting" else None,
        "delivered": rfc3339(row["delivered"]), "status": row["status"], "error": row["error"],
    }  # fmt: skip
