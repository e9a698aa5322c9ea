"""What the outbox may send now, as batches: a delivery by itself, or all that a channel is told about one run.

Webhooks get every alert by itself and at once. A channel that groups (group_s) gets what is critical at once, and the
rest of a run in one message at most every group_s. What is quiet (quiet.py) when its time has come is put off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from perfagent_server.alerts import quiet
from perfagent_server.alerts.kinds import groups
from perfagent_server.store.stored_json import stored_number
from perfagent_server.store.tables import channel, delivery

__all__ = ["Batch", "Due", "Later", "put_off", "what_is_due"]

Later = Mapping[str, Mapping[str, Any]]

_PER_CHANNEL = 4
_MOST_GROUPED = 50  # in one message


@dataclass(frozen=True, slots=True)
class Batch:
    """Deliveries of one channel that go out in one message."""

    channel: RowMapping
    rows: Sequence[RowMapping]


@dataclass(frozen=True, slots=True)
class Due:
    """What the outbox does next. batches: messages to send now. later: id of a delivery -> new values of its row; the
    delivery waits longer, or its row cannot be read. following: when the next delivery is due. errors: one for each channel
    whose deliveries could not be read."""

    batches: Sequence[Batch]
    later: Later
    following: float | None
    errors: Sequence[Exception]


def what_is_due(connection: Connection, now: float, flying: Mapping[str, str]) -> Due:
    """flying: delivery -> channel, of what is being sent."""
    waiting = delivery.c.state == "waiting"
    ripe = select(delivery.c.channel).where(waiting, delivery.c.due <= now).distinct()
    channels = connection.execute(select(channel).where(channel.c.id.in_(ripe))).mappings().all()
    # Not the earliest of all: one that waits for another delivery, or for its channel, may have been due for long.
    soonest = select(func.min(delivery.c.due)).where(waiting, delivery.c.due > now)
    following = stored_number(connection.execute(soonest).scalar())
    busy = Counter(flying.values())
    batches: list[Batch] = []
    later: dict[str, Mapping[str, Any]] = {}
    errors: list[Exception] = []
    for one in channels:
        free = (_PER_CHANNEL if one["failing_since"] is None else 1) - busy[one["id"]]
        if free <= 0:
            continue
        try:
            rows, put = _rows(connection, one, now, flying)
            put |= _quiet(connection, rows, now) | _grouped(connection, one, rows, now)
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # of what its rows say
            errors.append(error)
            continue
        later |= put
        batches += _batches(one, [row for row in rows if row["id"] not in put])[:free]
    return Due(batches, later, following, errors)


def put_off(connection: Connection, later: Later) -> None:
    """Writes down when the time of these deliveries has come."""
    for identifier, values in later.items():
        its = (delivery.c.id == identifier) & (delivery.c.state == "waiting")
        connection.execute(update(delivery).where(its).values(**values))


def _rows(
    connection: Connection, one: RowMapping, now: float, flying: Mapping[str, str]
) -> tuple[list[RowMapping], dict[str, Mapping[str, Any]]]:
    """What is due on a channel, and what is to become of the rows among it that cannot be read."""
    enabled = or_(channel.c.enabled.is_(True), delivery.c.event == "channel.test")
    query = (
        select(delivery.c.id)
        .join(channel, channel.c.id == delivery.c.channel)
        .where(delivery.c.channel == one["id"], delivery.c.state == "waiting", delivery.c.due <= now, enabled)
        .where(~_waits_for_another())
        .order_by(delivery.c.due, delivery.c.created)
        .limit(len(flying) + (_MOST_GROUPED if groups(one) else _PER_CHANNEL))
    )
    due = [name for name in connection.execute(query).scalars() if name not in flying]
    rows: list[RowMapping] = []
    unreadable: dict[str, Mapping[str, Any]] = {}
    for name in due:
        try:
            row = connection.execute(select(delivery).where(delivery.c.id == name)).mappings().one()
            memoryview(row["body"])  # what is no bytes cannot be sent
            rows.append(row)
        except (TypeError, ValueError) as error:
            unreadable[name] = {"state": "failed", "due": now, "error": f"this row cannot be read: {error}"[:500]}
    return rows, unreadable


def _batches(one: RowMapping, rows: Sequence[RowMapping]) -> list[Batch]:
    if not groups(one):
        return [Batch(one, [row]) for row in rows]
    of_runs: dict[str, list[RowMapping]] = {}
    for row in rows:
        of_runs.setdefault(row["run"] or row["id"], []).append(row)
    return [Batch(one, together[:_MOST_GROUPED]) for together in of_runs.values()]


def _quiet(connection: Connection, rows: Sequence[RowMapping], now: float) -> dict[str, Mapping[str, float]]:
    """Those that are quiet, and until when. What was tried once is not: the receiver may have it."""
    first = [row for row in rows if row["event"] == "alert.firing" and row["tries"] == 0]
    if not first:
        return {}
    until = quiet.Quiet(connection, now).until({row["alert"] for row in first})
    return {row["id"]: {"due": until[row["alert"]]} for row in first if row["alert"] in until}


def _grouped(
    connection: Connection, one: RowMapping, rows: Sequence[RowMapping], now: float
) -> dict[str, Mapping[str, float]]:
    """Those for which it is too early, because the channel was told about their run a moment ago."""
    if not groups(one):
        return {}
    patient = [row for row in rows if row["run"] and row["tries"] == 0 and not row["urgent"]]
    newest = select(delivery.c.run, func.max(delivery.c.delivered).label("at")).where(
        delivery.c.channel == one["id"], delivery.c.run.in_({row["run"] for row in patient})
    )
    newest = newest.where(delivery.c.delivered <= now)  # one of later was sent before the clock was set back
    told = {row.run: row.at for row in connection.execute(newest.group_by(delivery.c.run))}
    free = {run: at + one["group_s"] for run, at in told.items() if at + one["group_s"] > now}
    return {row["id"]: {"due": free[row["run"]], "ready": free[row["run"]]} for row in patient if row["run"] in free}


def _waits_for_another() -> ColumnElement[bool]:
    """Whether something earlier about the same alert has not arrived on that channel yet."""
    first = delivery.alias()
    return (
        select(first.c.id)
        .where(first.c.alert == delivery.c.alert, first.c.channel == delivery.c.channel, first.c.state == "waiting")
        .where(first.c.created < delivery.c.created)
        .exists()
    )
