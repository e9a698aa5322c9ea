"""How long a message about an alert waits before it is sent, and which waits a wrong clock has made too long.

What is wanted at once has no due time at all, so that no clock can hold it back. A wait is bounded: one that ends later
than the longest wait there is was begun by a clock that was ahead, and is over. Only what people made quiet (quiet.py)
may wait for longer; that is in `due` alone, and every other wait in `ready` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, case, func, or_, select

from perfagent_server.alerts.quiet import UNTIL_UNDONE
from perfagent_server.alerts.retries import LONGEST_WAIT_S
from perfagent_server.alerts.state_machine import Change
from perfagent_server.store.stored_json import stored_number
from perfagent_server.store.tables import channel, delivery

__all__ = ["AT_ONCE", "GATHERED_S", "QUIET_S", "SETTLED_S", "overlong", "when_to_send"]

AT_ONCE = 0.0
SETTLED_S = 60.0
"""How long an alert that opened again must stay open before it is told again,"""
QUIET_S = 600.0
"""and how long after the last message about it."""
_CRITICAL_SETTLED_S = 1.0
"""Instead of both, where it is critical: what is over in the same round is not told."""
_MOST_SENT = 3
"""So often in QUIET_S a channel is told of one alert, whatever happens to it."""
GATHERED_S = 10.0
"""How long a channel that groups messages waits for more of the same run: troubles seldom come alone."""


def when_to_send(history: Sequence[Row[Any]], change: Change, now: float, *, gathers: bool) -> float:
    """When a channel may be told of a change at the earliest; AT_ONCE where nothing is waited for. history: what it was
    sent about this alert, oldest first; gathers: whether it groups messages."""
    is_critical = change.finding.severity == "critical"
    ready = now
    if change.kind == "reopen":
        ready += _CRITICAL_SETTLED_S if is_critical else SETTLED_S
    if gathers and not is_critical:
        ready += GATHERED_S
    if history and change.kind != "resolve" and change.opening > 1 and not is_critical:
        ready = max(ready, min(history[-1].created, now) + QUIET_S)
    news = _times_of_news(history)
    if len(news) >= _MOST_SENT:
        ready = max(ready, min(news[-_MOST_SENT], now) + QUIET_S)
    return ready if ready > now else AT_ONCE


def _times_of_news(history: Sequence[Row[Any]]) -> list[float]:
    """When each message that said something new was sent. What a channel asked to be told again (reminders.py) does not
    count."""
    return [
        max(stored_number(time) or 0.0 for time in (row.created, row.due, row.delivered))
        for earlier, row in zip([None, *history], history, strict=False)
        if earlier is None or row.event != earlier.event or row.urgent > earlier.urgent
    ]


def overlong(connection: Connection, now: float, *, was_set_back: bool) -> list[str]:
    """The deliveries whose wait a clock that was ahead has made too long; after the clock was set back, all that wait.
    A due time that is no number is one, too: SQLite sorts it behind all numbers."""
    group_s = select(func.coalesce(channel.c.group_s, 0.0)).where(channel.c.id == delivery.c.channel).scalar_subquery()
    longest_s = 0.0 if was_set_back else case((delivery.c.tries > 0, LONGEST_WAIT_S), else_=QUIET_S + group_s)
    query = select(delivery.c.id).where(delivery.c.state == "waiting")
    return list(
        connection.execute(
            query.where(or_(delivery.c.ready > now + longest_s, delivery.c.due > UNTIL_UNDONE))
        ).scalars()
    )
