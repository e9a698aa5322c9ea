"""Writes alerts and their deliveries as rows, in the statements of one transaction, and reads rows back in the form of
the API.

A firing alert and what is to be sent about it are written together (the outbox pattern), so that no kill can come
between.

A delivery that is due later is one that may not be wanted after all: of an alert that opened again (it may flap), of
one that is quiet (quiet.py), and of a warning on a channel that groups them. When the alert is resolved before, it is
dropped, and neither is sent.

A channel is told at once that an alert fires, that it became critical (once for each opening), and that it is resolved.
That it opened again is told ten minutes after the last message, if it is still open then; at once where it is critical,
for the channel believes that all is well. After three messages in ten minutes the next one waits, and one that is not
true any more is dropped. So the last word of a channel is wrong for ten minutes at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, delete, select, update

from perfagent.wire import SEVERITIES, Alert, Finding
from perfagent.wire.quantities import some
from perfagent_server.alerts import history, quiet
from perfagent_server.alerts.kinds import HEARTBEAT, groups
from perfagent_server.alerts.state_machine import Change, worse
from perfagent_server.alerts.waits import AT_ONCE, when_to_send
from perfagent_server.alerts.webhooks import alert_body, delivery_id, text_json
from perfagent_server.rules.rule import USER_ALERT
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.spending.finding_cost import with_money
from perfagent_server.spending.prices import prices
from perfagent_server.spending.run_cost import present_rate_of
from perfagent_server.store.statements import among, insert_for
from perfagent_server.store.stored_json import stored_list, stored_names, stored_object
from perfagent_server.store.tables import alert, channel, delivery
from perfagent_server.store.tables import run as runs
from perfagent_server.timestamps import rfc3339

__all__ = [
    "alert_of", "apply", "as_dict", "finding_of", "in_jobs", "is_for", "one_alert", "resolve_by_hand", "tell_of_deletion",
    "wants",
]  # fmt: skip

_RUNS_OF_A_JOB = 50  # written in one transaction: senders wait for no longer one

_UNTOLD = USER_ALERT  # a point in time, which is not over later: no channel is notified that it was resolved


def in_jobs(changes: Sequence[tuple[str, Change]]) -> list[list[tuple[str, Change]]]:
    """The changes of a round as they are written, those of a run together: at least one job, which may be empty."""
    place = {run: number // _RUNS_OF_A_JOB for number, run in enumerate(dict.fromkeys(run for run, _ in changes))}
    jobs: list[list[tuple[str, Change]]] = [[] for _ in range(1 + max(place.values(), default=0))]
    for run, change in changes:
        jobs[place[run]].append((run, change))
    return jobs


def apply(
    connection: Connection, changes: Sequence[tuple[str, Change]], now: float, link: Callable[[str], str]
) -> tuple[list[Alert], int]:
    """Carries out changes of alerts. Gives the alerts as they are now, and how many deliveries were written."""
    book = _Book(connection, now, link, {run for run, _ in changes})
    for run, change in changes:
        book.carry_out(run, change)
    return book.alerts, book.deliveries


def resolve_by_hand(connection: Connection, alert_id: str, now: float, link: Callable[[str], str], why: str) -> None:
    """Closes an alert that no rule holds open any more, and tells those who were told that it fires."""
    row = connection.execute(select(alert).where(alert.c.id == alert_id)).mappings().one()
    apply(connection, [(row["run"], _resolve_of(connection, row, now, why))], now, link)


def tell_of_deletion(connection: Connection, run: str, now: float, link: Callable[[str], str]) -> None:
    """Tells who was told that an alert of this run fires that it does no longer. The rows of its alerts go with the run:
    what is still to be sent names none of them."""
    rows = connection.execute(select(alert).where(alert.c.run == run, alert.c.state == "firing")).mappings().all()
    apply(connection, [(run, _resolve_of(connection, row, now, "the run was deleted")) for row in rows], now, link)
    of_run = select(alert.c.id).where(alert.c.run == run)
    waiting = delivery.c.alert.in_(of_run), delivery.c.event == "alert.resolved", delivery.c.state == "waiting"
    connection.execute(update(delivery).where(*waiting).values(alert=None))


def _resolve_of(connection: Connection, row: RowMapping, now: float, why: str) -> Change:
    opening = history.openings(connection, row["id"])
    return Change("resolve", row["id"], finding_of(row), row["last_step"] or 0, now, why, opening)


def finding_of(row: Mapping[Any, Any]) -> Finding:
    """What an alert says, from its row."""
    names = ("rule", "severity", "message", "since_step", "fix", "gain_pct", "title", "cause", "cost")
    return Finding(
        **{name: row[name] for name in names}, since=rfc3339(row["since"]), ranks=stored_list(row["ranks"]),
        evidence=stored_object(row["evidence"]),
    )  # fmt: skip


class _Book:
    def __init__(self, connection: Connection, now: float, link: Callable[[str], str], wanted: Iterable[str]) -> None:
        self.connection, self.now, self.link = connection, now, link
        self.alerts: list[Alert] = []
        self.deliveries = 0
        self.runs = {
            row["id"]: row
            for row in connection.execute(
                select(runs.c.id, runs.c.name, runs.c.project, runs.c.tags).where(among(connection, runs.c.id, wanted))
            ).mappings()
        }
        self.every_channel = connection.execute(select(channel)).mappings().all()
        self.channels = [row for row in self.every_channel if row["enabled"]]
        self.quiet = quiet.Quiet(connection, now)
        self.has_prices = bool(prices(connection))

    def carry_out(self, run: str, change: Change) -> None:
        if run not in self.runs:
            return  # deleted meanwhile
        if change.kind == "fire" and self._insert(run, change):
            self._note(change, "fired")
            self._notify_firing(run, change)
        elif change.kind == "reopen":
            since = _seconds(change.finding.since, self.now)
            self._update(
                change, state="firing", resolved=None, since=since, last_step=change.step, **_columns(change.finding)
            )
            self._note(change, "reopened")
            self._drop_resolved(change)
            self._notify_firing(run, change)
        elif change.kind == "update":
            is_worse = self._update(change, last_step=change.step, **_columns(change.finding))
            # Channels that were notified are not notified again; a channel whose threshold it passes only now is.
            self._notify_firing(run, change, is_worse=is_worse)
        elif change.kind == "resolve":
            # A finding of its own: the one in the machine may fire again, and is then not resolved.
            change = replace(
                change, finding=replace(change.finding, evidence={**change.finding.evidence, "resolved": change.why})
            )
            self._resolve(run, change)
        row = self.connection.execute(select(alert).where(alert.c.id == change.alert)).mappings().first()
        if row is not None:
            self.alerts.append(alert_of(row, self.runs[run]["name"], self.runs[run]["project"]))

    def _resolve(self, run: str, change: Change) -> None:
        """A snooze that lasts until the alert is resolved ends with it; one for a time goes on."""
        self._update(change, state="resolved", resolved=self.now, last_step=change.step, **_columns(change.finding))
        its = update(alert).where(alert.c.id == change.alert, alert.c.snoozed_until == quiet.UNTIL_UNDONE)
        self.connection.execute(its.values(snoozed_until=None))
        self._note(change, "resolved", change.why)
        told = self._notified(change)
        if change.finding.rule != _UNTOLD:
            # Quiet or not: a channel that was notified of the firing would else believe it for ever.
            self._notify(run, change, "alert.resolved", told)

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
        statement = insert(table).values(**values).on_conflict_do_nothing(index_elements=["id"]).returning(table.c.id)
        return self.connection.execute(statement).first() is not None

    def _update(self, change: Change, **values: Any) -> bool:
        """Rewrites the row, and notes a change of its severity; whether that became worse."""
        its = alert.c.id == change.alert
        before = self.connection.execute(select(alert.c.severity).where(its)).scalar()
        self.connection.execute(update(alert).where(its).values(**values))
        if before is None or before == change.finding.severity:
            return False
        is_worse = worse(change.finding.severity, before)
        self._note(
            change, "worse" if is_worse else "better",
            f"{before} became {change.finding.severity}: {change.finding.message}",
        )  # fmt: skip
        return is_worse

    def _note(self, change: Change, event: history.Happening, text: str = "") -> None:
        once = (
            f"{change.opening}\n{change.step}\n{text}" if event in history.OF_SEVERITY else f"{change.opening}\n{text}"
        )
        history.note(self.connection, change.alert, event, self.now, text=text, once=once)

    def _notified(self, change: Change) -> list[RowMapping]:
        """The channels whose last word on the alert is that it fires, or soon will be; drops what was not sent to them
        yet."""
        self.connection.execute(delete(delivery).where(delivery.c.alert == change.alert, quiet.held(self.now)))
        its = select(delivery.c.channel, delivery.c.event).where(delivery.c.alert == change.alert)
        last: dict[str, str] = {
            row.channel: row.event for row in self.connection.execute(its.order_by(delivery.c.created))
        }
        # Also those that are switched off: when they are on again, their last word must be true.
        return [row for row in self.every_channel if last.get(row["id"]) == "alert.firing"]

    def _drop_resolved(self, change: Change) -> None:
        """What still waits to say that an alert is over is not true any more."""
        waits = delivery.c.state == "waiting", delivery.c.tries == 0, delivery.c.due > self.now
        its = delivery.c.alert == change.alert, delivery.c.event == "alert.resolved"
        self.connection.execute(delete(delivery).where(*its, *waits))

    def _notify_firing(self, run: str, change: Change, *, is_worse: bool = False) -> None:
        wanting = [row for row in self.channels if wants(row, self.runs[run], change.finding.severity)]
        if not wanting:
            return
        until = self.quiet.until([change.alert]).get(change.alert, AT_ONCE)
        if is_worse and change.finding.severity == "critical":
            milder = self._notified_of_milder(change)
            self._notify(
                run, change, "alert.firing", [row for row in wanting if row["id"] in milder], until, "critical"
            )
            wanting = [row for row in wanting if row["id"] not in milder]
        self._notify(run, change, "alert.firing", wanting, until)

    def _notified_of_milder(self, change: Change) -> set[str]:
        """The channels that were told of this opening, and not yet that it is critical."""
        its = select(delivery.c.channel, delivery.c.id).where(delivery.c.alert == change.alert, ~quiet.held(self.now))
        rows = self.connection.execute(its.where(delivery.c.urgent.is_(False))).all()
        return {row.channel for row in rows if row.id == _delivery_id(change, "alert.firing", row.channel)}

    def _notify(
        self, run: str, change: Change, event: str, channels: Sequence[RowMapping], until: float = AT_ONCE, again: str = "",
    ) -> None:  # fmt: skip
        """until: when the quiet is over; again: why the same is told once more of an opening."""
        if not channels:
            return
        about = self.runs[run]
        finding = with_money(change.finding, present_rate_of(self.connection, run) if self.has_prices else None)
        names = "channel", "id", "event", "created", "due", "delivered", "urgent"
        its = select(*(delivery.c[name] for name in names)).where(
            delivery.c.alert == change.alert, ~quiet.held(self.now)
        )
        sent: dict[str, list[Row[Any]]] = {}
        for row in self.connection.execute(
            its.where(delivery.c.created <= quiet.UNTIL_UNDONE).order_by(delivery.c.created)
        ):
            sent.setdefault(row.channel, []).append(row)
        urgent = change.finding.severity == "critical"
        for one in channels:
            before = sent.get(one["id"], [])
            told = before[-1].created if before else None
            ident = _delivery_id(change, event, one["id"], again)
            if before and before[-1].event == event and before[-1].id != ident and not again:
                continue  # that it was over in between was never sent
            body = alert_body(
                event, self.now, alert=change.alert, state=event.removeprefix("alert."),
                finding=spoken(finding if told is None else self._with_what_was_held(finding, change, told), one["language"]),
                run=run, run_name=about["name"], project=about["project"], url=self.link(run),
            )  # fmt: skip
            # Their order is that of `created` (outbox.py), also within one transaction and after a jump of the clock.
            created = max(self.now, (told or 0.0) + 1e-3)
            ready = when_to_send(before, change, self.now, gathers=groups(one))
            values = {
                "id": ident, "channel": one["id"], "alert": change.alert,
                "event": event, "body": body, "state": "waiting", "tries": 0, "created": created, "ready": ready,
                "due": max(ready, until), "error": "", "run": run, "urgent": urgent,
            }  # fmt: skip
            if self._insert_new(delivery, values):
                self.deliveries += 1
            else:  # what was not sent yet is sent as it is by then
                unsent = update(delivery).where(delivery.c.id == values["id"], quiet.held(self.now))
                self.connection.execute(unsent.values(body=body))
                if urgent:  # it is gathered no longer; one that was urgent before keeps the time until it has settled
                    sooner = {name: values[name] for name in ("urgent", "ready", "due")}
                    self.connection.execute(unsent.where(delivery.c.urgent.is_(False)).values(**sooner))

    def _with_what_was_held(self, finding: Finding, change: Change, since: float) -> Finding:
        """The finding, with how often its alert was opened again since the last message about it."""
        if change.opening == 1:
            return finding
        count = history.openings(self.connection, change.alert, since=since) - 1
        if not count:
            return finding
        clock = datetime.fromtimestamp(since, UTC).strftime("%H:%M UTC")
        return replace(finding, message=f"{finding.message} Reopened {some(count, 'time')} since {clock}.")


def _delivery_id(change: Change, event: str, channel_id: str, again: str = "") -> str:
    """One for each opening of an alert: what is sent about the second is no repetition of the first."""
    opening = [str(change.opening)] if change.opening > 1 else []
    return delivery_id(change.alert, event, channel_id, *opening, *filter(None, [again]))


def wants(one: RowMapping, about: RowMapping, severity: str) -> bool:
    """Whether a channel is to be told: by severity, and by the project and the tags of the run."""
    order: tuple[str, ...] = SEVERITIES
    least = one["min_severity"] if one["min_severity"] in order else SEVERITIES[0]
    is_heard = order.index(severity) >= order.index(least)
    return one["kind"] != HEARTBEAT and is_heard and is_for(one, about["project"], about["tags"])


def is_for(one: RowMapping, project: str, tags: str) -> bool:
    """Whether a channel is told about runs of this project with these tags, a JSON list. One whose own lists cannot be
    read is told nothing: it may be another project's."""
    projects, wanted = stored_names(one["projects"]), stored_names(one["tags"])
    if (not projects and one["projects"] != "[]") or (not wanted and one["tags"] != "[]"):
        return False
    return (not projects or project in projects) and (not wanted or not set(wanted).isdisjoint(stored_names(tags)))


def _columns(found: Finding) -> dict[str, Any]:
    return {
        "rule": found.rule, "severity": found.severity, "message": found.message, "fix": found.fix,
        "title": found.title, "cause": found.cause, "cost": found.cost,
        "evidence": text_json(found.evidence),
        "ranks": json.dumps(found.ranks), "gain_pct": found.gain_pct, "since_step": found.since_step,
    }  # fmt: skip


def _seconds(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return otherwise


def alert_of(row: RowMapping, run_name: str = "", project: str = "") -> Alert:
    """An alert as the API shows it, from its row."""
    return Alert(
        id=row["id"], state=row["state"], run=row["run"], run_name=run_name, project=project, rule=row["rule"],
        severity=row["severity"], message=row["message"],
        since=rfc3339(row["since"]), since_step=row["since_step"], last_step=row["last_step"], ranks=stored_list(row["ranks"]),
        evidence=stored_object(row["evidence"]), fix=row["fix"], gain_pct=row["gain_pct"], resolved=rfc3339(row["resolved"]),
        acknowledged=rfc3339(row["acknowledged"]), acknowledged_by=row["acknowledged_by"], note=row["note"],
        muted_until=rfc3339(row["muted_until"] if row["muted_rule"] == row["rule"] else None),
        snoozed_until=rfc3339(row["snoozed_until"]),
        title=row["title"], cause=row["cause"], cost=row["cost"],
    )  # fmt: skip


def one_alert(connection: Connection, alert_id: str) -> Alert | None:
    query = select(alert, runs.c.name.label("run_name"), runs.c.project).join(runs, runs.c.id == alert.c.run)
    row = connection.execute(query.where(alert.c.id == alert_id)).mappings().first()
    return None if row is None else alert_of(row, row["run_name"], row["project"])


def as_dict(row: RowMapping) -> dict[str, Any]:
    """A delivery as the API shows it."""
    return {
        "id": row["id"], "channel": row["channel"], "alert": row["alert"], "event": row["event"], "state": row["state"],
        "tries": row["tries"], "created": rfc3339(row["created"]),
        "due": rfc3339(row["due"] or row["created"]) if row["state"] == "waiting" else None,
        "delivered": rfc3339(row["delivered"]), "status": row["status"], "error": row["error"],
    }  # fmt: skip
