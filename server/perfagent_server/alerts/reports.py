"""What channels are sent although no alert changed, to those that asked for it:

- what became of a run, when it ended;
- a digest in even intervals, also while all is well: then a silence means that something is wrong with the channel;
- heartbeats, for a service outside that raises the alarm when they stop (a dead man's switch): they are sent while this
  server stores and judges, and only then;
- alerts that still fire, again.

Each is written once, whatever is killed: its id is made of what it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection, RowMapping, delete, select, update
from sqlalchemy.sql.expression import func

from perfagent.wire import Finding
from perfagent.wire.quantities import spell_money
from perfagent_server.alerts import reminders
from perfagent_server.alerts.kinds import HEARTBEAT
from perfagent_server.alerts.tables import finding_of, is_for
from perfagent_server.alerts.webhooks import delivery_id, notice_body
from perfagent_server.database import Database, StorageError
from perfagent_server.rules.texts import sentence
from perfagent_server.rules.texts.reader import speaking
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.spending.run_cost import spent_of
from perfagent_server.store.statements import insert_for
from perfagent_server.store.stored_json import stored_number
from perfagent_server.store.tables import alert, channel, delivery
from perfagent_server.store.tables import run as runs

__all__ = ["Reports"]

_SETTLES_S = 20.0  # after a run ended: it may be started again, and its verdict comes last
_LATE_S = 900.0  # a server that was away for longer tells nothing of what ended meanwhile
_MOST_NAMED = 10
_GO_ON = ("starting", "running")


@dataclass(slots=True, kw_only=True)
class Reports:
    """verdict_of: of a run, as people read it; is_well: whether this server does its work; link: to a run's page, to the
    overview with an empty name."""

    database: Database
    verdict_of: Callable[[str], Finding]
    is_well: Callable[[], bool]
    link: Callable[[str], str]
    _summarised: set[tuple[str, float]] = field(default_factory=set)

    def write(self, now: float) -> None:
        """Writes what is due into the outbox. What fails for one channel, or one run, is raised when the rest is written."""
        errors: list[Exception] = []
        with self.database.read() as connection:
            channels = connection.execute(select(channel).where(channel.c.enabled.is_(True))).mappings().all()
            again = reminders.due_again(connection, now)
        if again:
            self.database.write(lambda connection: reminders.repeat(connection, again, now, self.link), essential=True)
        self._summaries([one for one in channels if one["summaries"]], now, errors)
        for one in channels:
            with _apart(errors):
                every_s, told = stored_number(one["every_s"]), stored_number(one["told"]) or 0.0
                if every_s and not 0 <= now - told < every_s:
                    self.database.write(partial(self._regular, one=one, now=now))
        if errors:
            raise errors[0]

    def _regular(self, connection: Connection, one: RowMapping, now: float) -> None:
        """A heartbeat or a digest."""
        if one["kind"] != HEARTBEAT:
            self._digest(connection, one, now)
        elif self.is_well():
            self._heartbeat(connection, one, now)
        else:
            return
        connection.execute(update(channel).where(channel.c.id == one["id"]).values(told=now))

    # --- runs that ended ----------------------------------------------------------------------------------------------

    def _summaries(self, channels: list[RowMapping], now: float, errors: list[Exception]) -> None:
        if not channels:
            return
        recent = runs.c.updated.between(now - _LATE_S, now - _SETTLES_S)
        with self.database.read() as connection:
            ended = connection.execute(select(runs).where(runs.c.ended.is_not(None), recent)).mappings().all()
        new = [row for row in ended if (row["id"], row["ended"]) not in self._summarised]
        for row in new:
            with _apart(errors):
                said = {}
                for language in {one["language"] for one in channels}:
                    with speaking(language):
                        said[language] = self.verdict_of(row["id"])
                self.database.write(partial(self._summary, channels=channels, row=row, verdict=said, now=now))
        self._summarised = {(row["id"], row["ended"]) for row in ended}

    def _summary(
        self,
        connection: Connection,
        channels: list[RowMapping],
        row: RowMapping,
        verdict: Mapping[str, Finding],
        now: float,
    ) -> None:
        """verdict: by language."""
        count = func.count()
        per = select(alert.c.severity, count).where(alert.c.run == row["id"], alert.c.severity != "info")
        alerts = sorted((row[0], row[1]) for row in connection.execute(per.group_by(alert.c.severity)))
        started, ended, updated = (stored_number(row[name]) or 0.0 for name in ("started", "ended", "updated"))
        lasted = spell_duration(max(0.0, ended - started))
        spent = spent_of(connection, row["id"])
        money = None if spent.money is None else spell_money(spent.money, spent.currency)
        state, step = row["state"] if row["state"] in _ENDS else "ended", int(stored_number(row["step"]) or 0)
        for one in channels:
            if (stored_number(one["created"]) or 0.0) <= updated and is_for(one, row["project"], row["tags"]):
                language, said = one["language"], verdict[one["language"]]
                title = sentence(
                    "run_ended", language, run=row["name"] or row["id"], how=state, step=step, lasted=lasted
                )
                raised = [sentence("alerts_of", language, count=count, severity=severity) for severity, count in alerts]
                message = sentence(
                    "run_summary", language, title=title, verdict=said.title or said.message, money=money,
                    alerts=raised or [sentence("none", language)],
                )  # fmt: skip
                ident = delivery_id("run.ended", row["id"], str(row["ended"]), one["id"])
                self._send(connection, one, "run.ended", ident, title, message, now, run=row)

    # --- all is well --------------------------------------------------------------------------------------------------

    def _digest(self, connection: Connection, one: RowMapping, now: float) -> None:
        """What is open, whether its run is heard of or not, and how many runs go on and have ended."""
        since = stored_number(one["told"]) or stored_number(one["created"]) or now
        columns = runs.c.id, runs.c.name, runs.c.project, runs.c.tags, runs.c.state
        moving = runs.c.state.in_(_GO_ON) | (runs.c.ended >= since)
        rows = [
            row
            for row in connection.execute(select(*columns).where(moving)).mappings()
            if is_for(one, row["project"], row["tags"])
        ]
        is_open = alert.c.state == "firing", alert.c.severity != "info"
        query = (
            select(runs.c.name, runs.c.project, runs.c.tags, alert)
            .join(runs, runs.c.id == alert.c.run)
            .where(*is_open)
            .order_by(alert.c.since)
        )
        firing = [row for row in connection.execute(query).mappings() if is_for(one, row["project"], row["tags"])]
        goes_on, language = sum(row["state"] in _GO_ON for row in rows), one["language"]
        title = sentence("alerts_open", language, count=len(firing)) if firing else sentence("all_is_well", language)
        said = [sentence("digest", language, title=title, active=goes_on, ended=len(rows) - goes_on)]
        for row in firing[:_MOST_NAMED]:
            told = spoken(finding_of(row), language)
            title_of = told.title or told.message or told.rule
            said.append(sentence("listed", language, label=row["name"] or row["run"], title=title_of))
        if len(firing) > _MOST_NAMED:
            said.append(sentence("more", language, more=len(firing) - _MOST_NAMED))
        ident = delivery_id("digest", one["id"], str(now))
        self._send(connection, one, "digest", ident, title, "\n".join(said), now)

    def _heartbeat(self, connection: Connection, one: RowMapping, now: float) -> None:
        old = delivery.c.state != "waiting"
        connection.execute(
            delete(delivery).where(delivery.c.channel == one["id"], delivery.c.event == "heartbeat", old)
        )
        ident = delivery_id("heartbeat", one["id"], str(now))
        self._send(connection, one, "heartbeat", ident, "perfagent is alive", "perfagent is alive.", now)

    def _send(
        self, connection: Connection, one: RowMapping, event: str, ident: str, title: str, message: str, now: float,
        run: RowMapping | None = None,
    ) -> None:  # fmt: skip
        about = {} if run is None else {"run": run["id"], "run_name": run["name"], "project": run["project"]}
        body = notice_body(
            event,
            now,
            message,
            title=title,
            channel=one["id"],
            url=self.link("" if run is None else run["id"]),
            **about,
        )
        values = {
            "id": ident, "channel": one["id"], "alert": None, "event": event, "body": body, "state": "waiting", "tries": 0,
            "created": now, "due": 0.0, "error": "", "urgent": True,
        }  # fmt: skip
        insert = insert_for(connection.dialect.name)(delivery)
        connection.execute(insert.values(**values).on_conflict_do_nothing(index_elements=["id"]))


@contextmanager
def _apart(errors: list[Exception]) -> Iterator[None]:
    """What fails here is kept for later, unless it is the database that does."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # noqa: BLE001 - what one row says must not keep the reports of others back
        errors.append(error)


_ENDS = frozenset(("finished", "failed", "oom", "killed", "preempted"))


def spell_duration(seconds: float) -> str:
    """2 d 3 h, 4 h 5 min, 6 min, 7 s."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
