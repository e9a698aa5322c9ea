"""Tells that the rules have stopped: a thread of its own that needs neither theirs nor their lock.

It writes `rules_stopped` to every channel straight into the outbox, once, and that it is over when they judge again. What
is open is kept beside the cursors, so that a server that was restarted for it says that it is over.

While the database is away nothing can be written, and the rules fail for that alone. Then nothing is told, and the rules
have some time after its return to judge again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from sqlalchemy import Connection, delete, select

from perfagent.wire import Finding
from perfagent_server.alerts.kinds import HEARTBEAT
from perfagent_server.alerts.webhooks import alert_body, delivery_id
from perfagent_server.database import Database, StorageError
from perfagent_server.engine.scheduler import Engine
from perfagent_server.engine.set_aside import RULES_STOPPED
from perfagent_server.store.changes import note_change
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.statements import insert_for, put
from perfagent_server.store.tables import channel, cursor, delivery
from perfagent_server.timestamps import rfc3339

__all__ = ["Watchdog"]

log = logging.getLogger("perfagent.server")

_EVERY_S = 5.0
_STANDS_S = 60.0
"""A frame that waits for so long, while the rules say that they judge, is one that they do not get past."""
_SETTLED_S = 60.0  # without trouble, before it is over
_RETURN_S = 40.0
"""After the database came back: the rules try again within 30 s."""


class _Open(msgspec.Struct):
    """An alert of this server that is told. since: Unix seconds."""

    alert: str
    why: str
    since: float


class Watchdog:
    """start() and stop() the thread; look() by hand. server: the address of this one, of several on one database; link: to
    the overview, in messages; on_deliveries: wakes the outbox; outbox_trouble: why that sends nothing."""

    def __init__(
        self, database: Database, store: MetricStore, engine: Engine, *, server: str, link: str,
        on_deliveries: Callable[[], object], clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic, outbox_trouble: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        self.outbox_trouble = outbox_trouble
        self._database, self._store, self._engine, self._server, self._link = database, store, engine, server, link
        self._on_deliveries, self._clock, self._monotonic = on_deliveries, clock, monotonic
        self._row = "stopped/" + hashlib.sha256(server.encode()).hexdigest()[:16]
        self._waiting: tuple[int, float] | None = None  # a frame that was not judged yet, and since when that is seen
        self._stands = ""
        self._reached_since = -math.inf  # the database; infinity: it was not reached since it failed
        self._waits_for_database = False  # the rules, at the last look
        self._well_since = math.inf
        self._was_seen = False  # trouble, at the last look
        self._open: _Open | None = None
        self._is_loaded = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="perfagent-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    @property
    def trouble(self) -> str:
        """Why no alert is raised, or sent; empty while they are, and while it is the database that does not."""
        if self._engine.waits_for_database and not (self._waits_for_database and self._is_reached()):
            return ""
        return self._engine.trouble() or self._stands or self.outbox_trouble()

    def finding(self) -> Finding | None:
        """What pages show of it."""
        why = self.trouble
        if not why:
            return None
        return _finding(self._server, why, self._clock() if self._open is None else self._open.since)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self.look()
            except StorageError as error:
                log.warning("nothing can be told of the rules: %s", error)
            except Exception:
                log.exception("a look at the rules failed")

    def look(self) -> None:
        """Tells what has changed. Raises StorageError while nothing can be written."""
        try:
            self._look(self._monotonic())
        except StorageError:
            self._reached_since = math.inf
            raise

    def _look(self, now: float) -> None:
        waits = self._engine.waits_for_database
        if waits and not self._waits_for_database:
            self._reached_since = math.inf
        self._waits_for_database = waits
        if self._reached_since == math.inf:
            self._database.write(lambda _connection: None, essential=True)
            self._reached_since = now
        if not self._is_loaded:
            self._load()
        self._look_for_standing(now)
        why = self.trouble
        # Two looks: a process that was stopped for a minute finds its rules standing still at the first one.
        was_seen, self._was_seen = self._was_seen, bool(why)
        if why or waits:
            self._well_since = math.inf
            if why and was_seen and self._open is None and self._is_reached():
                self._tell(why)
            return
        self._well_since = min(self._well_since, now)
        if self._open is not None and now - self._well_since >= _SETTLED_S:
            self._resolve(self._open)

    def _is_reached(self) -> bool:
        """Whether the database was there for long enough to blame the rules."""
        return self._monotonic() - self._reached_since >= _RETURN_S

    def _look_for_standing(self, now: float) -> None:
        upto, shards = self._engine.judged()
        if self._waiting is not None and (upto >= self._waiting[0] or not shards):
            self._waiting = None
        if self._waiting is None and shards:
            came = self._store.since(upto, 1, shards=shards)
            self._waiting = (came[0].id, now) if came else None
        waited = 0.0 if self._waiting is None else now - self._waiting[1]
        self._stands = f"frames wait, and none was judged for {waited:.0f} s" if waited > _STANDS_S else ""

    # --- alerts -------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        with self._database.read() as connection:
            row = connection.execute(select(cursor.c.extra).where(cursor.c.name == self._row)).first()
        self._is_loaded = True
        if row is not None:
            try:
                self._open = msgspec.msgpack.decode(row.extra, type=_Open)
            except (msgspec.DecodeError, TypeError):
                log.warning("what was told of the rules before the start cannot be read")

    def _tell(self, why: str) -> None:
        now = self._clock()
        told = _Open("al_" + delivery_id(RULES_STOPPED, self._server, str(now))[4:24], why, now)
        found = _finding(self._server, why, now)

        def job(connection: Connection) -> None:
            put(connection, cursor, {"name": self._row, "tail_id": 0, "extra": msgspec.msgpack.encode(told)})
            self._write(connection, "alert.firing", told, found, now)

        self._database.write(job, essential=True)
        self._open = told
        log.error("the rules have stopped: %s", why)
        self._on_deliveries()

    def _resolve(self, told: _Open) -> None:
        now = self._clock()
        found = _finding(self._server, told.why, told.since)
        found = replace(found, evidence={**found.evidence, "resolved": "the rules judge again"})

        def job(connection: Connection) -> None:
            connection.execute(delete(cursor).where(cursor.c.name == self._row))
            channels = connection.execute(select(channel.c.id)).scalars()
            firing = [delivery_id(told.alert, "alert.firing", one) for one in channels]
            unsent = delivery.c.id.in_(firing), delivery.c.state == "waiting"
            connection.execute(delete(delivery).where(*unsent))  # it must not come behind the word that it is over
            self._write(connection, "alert.resolved", told, found, now)

        self._database.write(job, essential=True)
        self._open = None
        log.warning("the rules judge again")
        self._on_deliveries()

    def _write(self, connection: Connection, event: str, told: _Open, found: Finding, now: float) -> None:
        """To every channel: whatever runs it is about, none of them is judged."""
        body = alert_body(
            event, now, alert=told.alert, state=event.removeprefix("alert."), finding=found, run=None, run_name=None,
            project=None, url=self._link,
        )  # fmt: skip
        insert = insert_for(connection.dialect.name)(delivery)
        wanted = channel.c.enabled.is_(True), channel.c.kind != HEARTBEAT
        for one in connection.execute(select(channel.c.id).where(*wanted)).scalars().all():
            values = {
                "id": delivery_id(told.alert, event, one), "channel": one, "alert": None, "event": event, "body": body,
                "state": "waiting", "tries": 0, "created": now, "due": 0.0, "error": "", "urgent": True,
            }  # fmt: skip
            connection.execute(insert.values(**values).on_conflict_do_nothing(index_elements=["id"]))
        note_change(connection, "delivery")


def _finding(server: str, why: str, since: float) -> Finding:
    return Finding(
        rule=RULES_STOPPED,
        severity="critical",
        title="The alerts of the server have stopped",
        message=f"The alerts of the server at {server} have stopped: {why}. No alert of a run that it judges fires, or is "
        "sent, until then. Samples are stored, and judged then.",
        since=rfc3339(since),
        evidence={"server": server, "why": why},
        fix="Look at the server's log, and restart it. If they stop again, upgrade perfagent, or report it with that log.",
    )
