"""What people do with alerts: acknowledge, mute, snooze, and the undo of each. In the statements of one transaction.

Each function raises NoResultFound for an alert that is not there. Those that change when channels are notified say
whether something is due now.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, select, update

from perfagent_server.alerts import history, quiet, reminders
from perfagent_server.store.tables import alert

__all__ = ["acknowledge", "mute", "snooze", "unacknowledge"]


def acknowledge(connection: Connection, alert_id: str, now: float, *, who: str, note: str = "") -> None:
    """Somebody has seen it, and works on it: it is not repeated any more. Its state stays."""
    reminders.forget(connection, alert_id)
    _set(connection, alert_id, acknowledged=now, acknowledged_by=who, note=note)
    history.note(connection, alert_id, "acknowledged", now, who=who, text=note)


def unacknowledge(connection: Connection, alert_id: str, now: float, *, who: str, note: str = "") -> None:
    _set(connection, alert_id, acknowledged=None, acknowledged_by="", note="")
    history.note(connection, alert_id, "unacknowledged", now, who=who, text=note)


def mute(
    connection: Connection, alert_id: str, until: float | None, now: float, *, who: str = "", note: str = ""
) -> bool:
    """Keeps the rule quiet in this run, whatever it finds; None ends that."""
    about = connection.execute(select(alert.c.run, alert.c.rule).where(alert.c.id == alert_id)).one()
    its = (alert.c.run == about.run) & (alert.c.muted_rule.in_((about.rule, "")) | (alert.c.id == alert_id))
    connection.execute(update(alert).where(its).values(muted_until=None, muted_rule=""))
    named = about.rule if until is not None else ""
    connection.execute(update(alert).where(alert.c.id == alert_id).values(muted_until=until, muted_rule=named))
    history.note(connection, alert_id, "unmuted" if until is None else "muted", now, who=who, text=note)
    return quiet.release(connection, now)


def snooze(
    connection: Connection, alert_id: str, until: float | None, now: float, link: Callable[[str], str], *, who: str = "",
    note: str = "",
) -> bool:  # fmt: skip
    """Keeps this alert quiet: for a time, after which it is told again if it still fires, or until it is resolved
    (quiet.UNTIL_UNDONE); None ends that."""
    reminders.forget(connection, alert_id)
    _set(connection, alert_id, snoozed_until=until)
    if until is not None and until < quiet.UNTIL_UNDONE:
        reminders.remind(connection, alert_id, until, now, link)
    history.note(connection, alert_id, "unsnoozed" if until is None else "snoozed", now, who=who, text=note)
    return quiet.release(connection, now)


def _set(connection: Connection, alert_id: str, **values: object) -> None:
    connection.execute(select(alert.c.id).where(alert.c.id == alert_id)).one()
    connection.execute(update(alert).where(alert.c.id == alert_id).values(**values))
