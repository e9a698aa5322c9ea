"""One of several servers on a database, as far as it has to do with the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from sqlalchemy import Connection, select

from perfagent_server.database import Database
from perfagent_server.replicas.follower import Audience, Follower
from perfagent_server.replicas.leases import Leases
from perfagent_server.store.changes import Change, note_change
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.stored_json import stored_object
from perfagent_server.store.tables import alert

__all__ = ["Replica", "resolve_as_asked"]

_ANSWERED_S = 5.0
_LOOK_S = 0.05


class Judge(Protocol):
    """Who judges runs (engine.Engine)."""

    def judges(self, run: str) -> bool: ...
    def resolve(self, run: str, alert: str, why: str) -> bool: ...


class Replica:
    """Leases and follower together. handlers: by kind of change, see store/changes.py. on_news: called when another server
    may have stored frames."""

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        audience: Audience,
        leases: Leases,
        handlers: Mapping[str, Callable[[Change], object]],
        *,
        since: int,
        on_news: Callable[[], object],
    ) -> None:
        self._database, self.leases = database, leases
        self.follower = Follower(database, store, audience, handlers, since=since, on_news=on_news)

    def start(self) -> None:
        self.leases.start()
        self.follower.start()

    def stop(self) -> None:
        self.follower.stop()
        self.leases.stop()

    @property
    def counters(self) -> dict[str, float]:
        return {**self.leases.counters, **self.follower.counters}

    def ask_to_resolve(self, run: str, alert_id: str, why: str) -> bool:
        """Asks the server that judges a run to close an alert, and waits until it has. False if it did not within 5 s."""
        self._database.write(lambda connection: self.note_resolved(connection, run, alert_id, why))
        until = time.monotonic() + _ANSWERED_S
        while time.monotonic() < until:
            with self._database.read() as connection:
                state = connection.execute(select(alert.c.state).where(alert.c.id == alert_id)).scalar()
            if state != "firing":
                return True
            time.sleep(_LOOK_S)
        return False

    def note_resolved(self, connection: Connection, run: str, alert_id: str, why: str) -> None:
        """Tells the server that judges a run that somebody closes an alert."""
        note_change(connection, "resolve", run, json.dumps({"alert": alert_id, "why": why}))


def resolve_as_asked(judge: Judge, change: Change) -> None:
    """Does what another server asked for by ask_to_resolve(), if this one judges the run."""
    if judge.judges(change.subject):
        asked = stored_object(change.detail)
        judge.resolve(change.subject, str(asked.get("alert")), str(asked.get("why")))
