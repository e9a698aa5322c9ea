"""What happened to an alert: rows that the rules and people add.

A level that jumps around a threshold changes the severity of its alert for hours. So of the changes of severity, the
newest MOST_OF_SEVERITY are kept of each alert; all other rows stay.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

from sqlalchemy import Connection, delete, func, select

from perfagent_server.alerts.webhooks import delivery_id
from perfagent_server.store.statements import insert_for
from perfagent_server.store.tables import alert_history
from perfagent_server.timestamps import rfc3339

__all__ = ["MOST_OF_SEVERITY", "OF_SEVERITY", "Happening", "history_of", "note", "openings"]

Happening = Literal[
    "fired", "reopened", "worse", "better", "resolved",
    "acknowledged", "unacknowledged", "muted", "unmuted", "snoozed", "unsnoozed",
]  # fmt: skip
OF_SEVERITY = ("worse", "better")
MOST_OF_SEVERITY = 50


def note(
    connection: Connection, alert: str, event: Happening, time: float, *, who: str = "", text: str = "", once: str = ""
) -> None:
    """Adds a row. who: empty for a rule. once: a row of this alert, event and text is written once, however often the
    same data is judged."""
    identifier = "hi_" + (delivery_id(alert, event, once) if once else uuid.uuid4().hex)
    insert = insert_for(connection.dialect.name)(alert_history)
    values = {"id": identifier, "alert": alert, "time": time, "event": event, "who": who[:256], "note": text}
    connection.execute(insert.values(**values).on_conflict_do_nothing(index_elements=["id"]))
    if event in OF_SEVERITY:
        its = alert_history.c.alert == alert, alert_history.c.event.in_(OF_SEVERITY)
        newest_first = alert_history.c.time.desc(), alert_history.c.id
        older = select(alert_history.c.id).where(*its).order_by(*newest_first).offset(MOST_OF_SEVERITY)
        connection.execute(delete(alert_history).where(alert_history.c.id.in_(older)))


def openings(connection: Connection, alert: str, *, since: float = 0.0) -> int:
    """How many times the alert was open, this time included. since: counted from that time on."""
    reopened = select(func.count()).where(alert_history.c.alert == alert, alert_history.c.event == "reopened")
    reopened = reopened.where(alert_history.c.time >= since)
    return 1 + (connection.execute(reopened).scalar() or 0)


def history_of(connection: Connection, alert: str) -> list[dict[str, Any]]:
    """Oldest first."""
    its = select(alert_history).where(alert_history.c.alert == alert)
    rows = connection.execute(its.order_by(alert_history.c.time, alert_history.c.id)).mappings()
    return [
        {"time": rfc3339(row["time"]), "event": row["event"], "who": row["who"], "note": row["note"]} for row in rows
    ]
