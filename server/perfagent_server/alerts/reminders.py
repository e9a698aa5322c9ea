"""Tells channels again that an alert still fires: at the end of a snooze, and every repeat_s of a channel that wants it.

Not told again is an alert that somebody acknowledged, that was resolved meanwhile, that is quiet, or whose run has ended;
nor one of which something still waits to be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, case, delete, select
from sqlalchemy.sql.expression import func

from perfagent_server.alerts import quiet
from perfagent_server.alerts.tables import alert_of, wants
from perfagent_server.alerts.webhooks import alert_body, delivery_id
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.spending.finding_cost import with_money
from perfagent_server.spending.run_cost import present_rate_of
from perfagent_server.store.statements import insert_for
from perfagent_server.store.stored_json import stored_number
from perfagent_server.store.tables import alert, channel, delivery
from perfagent_server.store.tables import run as runs

__all__ = ["due_again", "forget", "remind", "repeat"]


@dataclass(frozen=True, slots=True)
class Again:
    """newest: when the newest delivery of this alert on this channel was written; None: by a clock that was ahead."""

    alert: str
    channel: str
    newest: float | None


Link = Callable[[str], str]
_REMINDER = "msg_again_"  # how the ids of those begin that wait for the end of a snooze


def remind(connection: Connection, alert_id: str, at: float, now: float, link: Link) -> None:
    """Writes what the channels that were told get at the end of a snooze."""
    for name in _have_heard(connection, alert_id):
        _write(connection, alert_id, name, at, now, link, _REMINDER + delivery_id(alert_id, name, str(at))[4:])


def forget(connection: Connection, alert_id: str) -> None:
    """Drops what waits for the end of a snooze."""
    waiting = (delivery.c.state == "waiting") & (delivery.c.tries == 0)
    its = delivery.c.id.startswith(_REMINDER, autoescape=True)
    connection.execute(delete(delivery).where(delivery.c.alert == alert_id, its, waiting))


def due_again(connection: Connection, now: float) -> list[Again]:
    """What is due again on channels that repeat."""
    newest = func.max(case((delivery.c.created <= now, delivery.c.created))).label("newest")
    waits = func.max(case((delivery.c.state == "waiting", 1), else_=0)).label("waits")
    query = (
        select(delivery.c.alert, delivery.c.channel, channel.c.repeat_s, newest, waits)
        .join(channel, channel.c.id == delivery.c.channel)
        .join(alert, alert.c.id == delivery.c.alert)
        .join(runs, runs.c.id == alert.c.run)
        .where(channel.c.repeat_s > 0, channel.c.enabled.is_(True))
        .where(alert.c.state == "firing", alert.c.acknowledged.is_(None), runs.c.ended.is_(None))
        .group_by(delivery.c.alert, delivery.c.channel, channel.c.repeat_s)
    )
    due = [
        row
        for row in connection.execute(query)
        if not row.waits and now - (row.newest or 0.0) >= (stored_number(row.repeat_s) or math.inf)
    ]
    silent = quiet.Quiet(connection, now).until({row.alert for row in due}) if due else {}
    return [
        Again(row.alert, row.channel, row.newest)
        for row in due
        if row.alert not in silent and _is_wanted(connection, row.alert, row.channel)
    ]


def _is_wanted(connection: Connection, alert_id: str, channel_id: str) -> bool:
    """Whether the channel is still for such alerts: it may have been changed since it was told."""
    one = connection.execute(select(channel).where(channel.c.id == channel_id)).mappings().one()
    query = select(alert.c.severity, runs.c.project, runs.c.tags).join(runs, runs.c.id == alert.c.run)
    about = connection.execute(query.where(alert.c.id == alert_id)).mappings().one()
    return wants(one, about, about["severity"])


def repeat(connection: Connection, again: Iterable[Again], now: float, link: Link) -> None:
    """Writes what due_again() found."""
    for one in again:
        _write(connection, one.alert, one.channel, 0.0, now, link, delivery_id(one.alert, one.channel, str(one.newest)))


def _have_heard(connection: Connection, alert_id: str) -> Iterable[str]:
    """The channels whose last word on the alert is that it fires. One that is held back still says it by itself."""
    its = select(delivery.c.channel, delivery.c.event, delivery.c.state, delivery.c.tries)
    last = {
        row.channel: row
        for row in connection.execute(its.where(delivery.c.alert == alert_id).order_by(delivery.c.created))
    }
    return [
        name for name, row in last.items() if row.event == "alert.firing" and (row.state == "delivered" or row.tries)
    ]


def _write(
    connection: Connection, alert_id: str, channel_id: str, due: float, now: float, link: Link, identifier: str
) -> None:
    row = _firing(connection, alert_id)
    if row is None:
        return
    language = connection.execute(select(channel.c.language).where(channel.c.id == channel_id)).scalar()
    if language is None:
        return
    body = alert_body(
        "alert.firing", now, alert=alert_id, state="firing",
        finding=spoken(with_money(alert_of(row), present_rate_of(connection, row["run"])), language), run=row["run"],
        run_name=row["name"], project=row["project"], url=link(row["run"]),
    )  # fmt: skip
    values: dict[str, Any] = {
        "id": identifier, "channel": channel_id, "alert": alert_id, "event": "alert.firing", "body": body, "state": "waiting",
        "tries": 0, "created": now, "ready": 0.0, "due": due, "error": "", "run": row["run"],
        "urgent": row["severity"] == "critical",
    }  # fmt: skip
    insert = insert_for(connection.dialect.name)(delivery)
    connection.execute(insert.values(**values).on_conflict_do_nothing(index_elements=["id"]))


def _firing(connection: Connection, alert_id: str) -> RowMapping | None:
    query = select(alert, runs.c.name, runs.c.project).join(runs, runs.c.id == alert.c.run)
    return connection.execute(query.where(alert.c.id == alert_id, alert.c.state == "firing")).mappings().first()
