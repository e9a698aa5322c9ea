"""What a try means for its delivery and its channel: delivered, tried again later, or given up.

Tries follow the schedule of Standard Webhooks (5 s, 5 min, 30 min, 2 h ... in all some four days), with quick ones
among the first, because most failures of receivers last a moment. A channel on which nothing arrived for five days, or
whose receiver says that it is gone for good, is disabled, and the others are told. A clock may have jumped over the five
days: something must have failed there in many tries, too, which take most of a day.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime

from sqlalchemy import Connection, RowMapping, and_, insert, select, update

from perfagent_server.alerts import channels
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.alerts.webhooks import delivery_id, notice_body
from perfagent_server.store.stored_json import stored_number
from perfagent_server.store.tables import channel, delivery

__all__ = ["DISABLE_AFTER_S", "LONGEST_WAIT_S", "RETRY_AFTER_S", "next_try", "write_down"]

log = logging.getLogger("perfagent.server")

# Seconds to wait after the first, second, ... failed try.
RETRY_AFTER_S = (
    *(1.0, 2.0, 4.0, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0, 86400.0),
)
DISABLE_AFTER_S = 5 * 86400.0
_MANY_TRIES = 12
_LONGEST_RETRY_AFTER_S = 6 * 3600.0
LONGEST_WAIT_S = 1.2 * max(RETRY_AFTER_S)
Count = Callable[[str], None]


def write_down(connection: Connection, rows: Sequence[RowMapping], outcome: Outcome, now: float, count: Count) -> None:
    """Of the deliveries that went out in one try. count: called with "given_up" and "disabled_channels"."""
    again = next_try(1 + max(_tries(row) for row in rows), now, outcome.retry_after)  # the same for all: in one message
    for row in rows:
        _write_down(connection, row, outcome, now, again, count)


def _write_down(
    connection: Connection, row: RowMapping, outcome: Outcome, now: float, again: float | None, count: Count
) -> None:
    tries = _tries(row) + 1
    values = {"tries": tries, "status": outcome.status, "error": outcome.error}
    mine = update(delivery).where(delivery.c.id == row["id"])
    if outcome.delivered:
        connection.execute(mine.values(state="delivered", delivered=now, **values))
        healed = update(channel).where(channel.c.id == row["channel"])
        if row["event"] == "channel.test":
            channels.set_enabled(connection, row["channel"], enabled=True)
        else:
            is_back = connection.execute(healed.where(channel.c.failing_since.is_not(None)).values(failing_since=None))
            if is_back.rowcount:
                _hurry(connection, row["channel"])
        return
    due = None if row["event"] in ("channel.test", "heartbeat") else again
    if outcome.status == 410:
        _disable(connection, row["channel"], now, "the receiver answered 410 Gone", count)
        due = None
    if due is None:
        connection.execute(mine.values(state="failed", **values))
        count("given_up")
    else:
        connection.execute(mine.values(due=due, ready=due, **values))
    if row["event"] == "channel.test":
        return
    failing = connection.execute(
        select(channel.c.failing_since, channel.c.enabled).where(channel.c.id == row["channel"])
    ).first()
    if failing is None or not failing.enabled:
        return
    since = stored_number(failing.failing_since)
    was_tried = tries >= _MANY_TRIES or _was_tried(connection, row, now)
    if since is None or (now - since >= DISABLE_AFTER_S and not was_tried):
        connection.execute(update(channel).where(channel.c.id == row["channel"]).values(failing_since=now))
    elif now - since >= DISABLE_AFTER_S:
        _disable(connection, row["channel"], now, f"no delivery arrived for {DISABLE_AFTER_S / 86400:.0f} days", count)


def _tries(row: RowMapping) -> int:
    tries = stored_number(row["tries"]) or 0
    return int(tries) if 0 <= tries <= len(RETRY_AFTER_S) else 0


def _was_tried(connection: Connection, row: RowMapping, now: float) -> bool:
    """Whether something else failed there again and again in these days: a channel that nothing was sent to is not dead."""
    others = delivery.c.channel == row["channel"], delivery.c.id != row["id"], delivery.c.state != "delivered"
    recent = (
        delivery.c.tries.between(_MANY_TRIES, len(RETRY_AFTER_S) + 1),
        delivery.c.created >= now - 2 * DISABLE_AFTER_S,
    )
    return connection.execute(select(delivery.c.id).where(*others, *recent).limit(1)).first() is not None


def _hurry(connection: Connection, name: str) -> None:
    """The receiver is back: what failed there before is tried now, and not by its schedule in up to a day."""
    waits = delivery.c.channel == name, delivery.c.state == "waiting", delivery.c.tries > 0
    connection.execute(update(delivery).where(*waits).values(due=0.0, ready=0.0))


def _disable(connection: Connection, name: str, now: float, why: str, count: Count) -> None:
    """Switches a channel off and notifies the others."""
    about = connection.execute(select(channel).where(channel.c.id == name)).mappings().first()
    if about is None or not about["enabled"]:
        return
    channels.set_enabled(connection, name, enabled=False, reason=why)
    connection.execute(
        update(delivery)
        .where(and_(delivery.c.channel == name, delivery.c.state == "waiting"))
        .values(state="failed", error=why)
    )
    count("disabled_channels")
    log.warning("channel %s (%s) is disabled: %s", about["name"], name, why)
    message = f"The channel {about['name']!r} is disabled: {why}. Test it to enable it again."
    others = (
        connection.execute(
            select(channel.c.id).where(channel.c.enabled.is_(True), channel.c.id != name, channel.c.kind != "heartbeat")
        )
        .scalars()
        .all()
    )
    for other in others:
        connection.execute(
            insert(delivery).values(
                id=delivery_id("channel.disabled", name, other, str(now)), channel=other, alert=None,
                event="channel.disabled",
                body=notice_body("channel.disabled", now, message, severity="warning", channel=name), state="waiting",
                tries=0, created=now, due=0.0, error="",
            )
        )  # fmt: skip


def next_try(tries: int, now: float, retry_after: str | None = None) -> float | None:
    """When to try again after `tries` failed ones; None when it is enough. A receiver's Retry-After (seconds or a date)
    is honoured within reason."""
    if tries > len(RETRY_AFTER_S):
        return None
    wait = RETRY_AFTER_S[tries - 1] * random.uniform(0.8, 1.0 if tries < 5 else 1.2)  # noqa: S311 - spreads load, hides nothing
    asked = _seconds_asked(retry_after, now)
    return now + (wait if asked is None else max(wait, min(asked, _LONGEST_RETRY_AFTER_S)))


def _seconds_asked(retry_after: str | None, now: float) -> float | None:
    if not retry_after:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():  # not "²", which is a digit to Python and no number
        return float(text[:12])
    try:
        when = parsedate_to_datetime(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):  # a year of 999999, a zone of a million hours
        return None
