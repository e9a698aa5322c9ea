"""Reads what other servers have written to the shared database: frames for the live pages, and rows of the table `change`.

Each commit of a server sends a NOTIFY (database/postgresql.py). It says that there is something to read, and no more. The
follower reads the tables in the order of their ids, and looks every POLL_S without a NOTIFY, too. So a lost NOTIFY delays
an update and loses nothing. Several NOTIFYs at once cause one reading.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import psycopg
from sqlalchemy.exc import DBAPIError

from perfagent.wire import Group
from perfagent_server.database import Database, StorageError
from perfagent_server.database.postgresql import CHANNEL
from perfagent_server.store.changes import Change, changes_since
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.stored import FromTail, Stored

__all__ = ["Audience", "Follower"]

log = logging.getLogger("perfagent.server")

POLL_S = 1.0
_GATHER_S = 0.05  # from one reading to the next, at least
_FRAMES, _BYTES = 512, 8 * 2**20  # of one reading
_LATE_S = 10.0  # after so long without a reading, frames may have left the tail unread
_PAUSE_S = 1.0  # between two tries to connect


class Audience(Protocol):
    """Who shows frames live (live.Hub)."""

    @property
    def has_pages(self) -> bool: ...
    def publish(self, stored: list[Stored]) -> None: ...
    def miss(self) -> None: ...


class Follower:
    """start() and stop() the thread. handlers: by kind of change, called with each change by another server. since: the newest
    change that was there before caches were filled. on_news: called when another server may have stored frames."""

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        audience: Audience,
        handlers: Mapping[str, Callable[[Change], object]],
        *,
        since: int,
        on_news: Callable[[], object],
    ) -> None:
        self._database, self._store, self._audience = database, store, audience
        self._handlers, self._on_news = handlers, on_news
        self._me = database.backend.replica
        self._change = since
        self._frame = store.newest_id()
        self._read_at = time.monotonic()
        self.counters = {"hints": 0, "changes": 0, "frames": 0, "failures": 0}
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="perfagent-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                with contextlib.closing(self._listening()) as listening:
                    while not self._stopping:
                        begun = time.monotonic()
                        if self._hinted(listening):
                            self._on_news()
                        self.read()
                        time.sleep(max(0.0, _GATHER_S - (time.monotonic() - begun)))
            except (StorageError, DBAPIError, psycopg.Error) as error:
                self.counters["failures"] += 1
                log.warning("what other servers write is not heard for the moment: %s", error)
            except Exception:
                self.counters["failures"] += 1
                log.exception("what other servers write is not heard for the moment")
            if not self._stopping:
                time.sleep(_PAUSE_S)

    def _listening(self) -> psycopg.Connection:
        pooled = self._database.engine.raw_connection()
        driver = pooled.driver_connection
        assert isinstance(driver, psycopg.Connection)
        pooled.detach()  # it does not go back to the readers
        driver.autocommit = True
        driver.execute(f"LISTEN {CHANNEL}")
        return driver

    def _hinted(self, listening: psycopg.Connection) -> bool:
        """Waits for a hint, at most POLL_S; whether it is of another server."""
        hints = [hint.payload for hint in listening.notifies(timeout=POLL_S, stop_after=1)]
        self.counters["hints"] += len(hints)
        return any(hint != self._me for hint in hints)

    def read(self) -> None:
        """Reads what is new, and passes it on."""
        moment = time.monotonic()
        if moment - self._read_at > _LATE_S:
            self._audience.miss()
        self._read_at = moment
        self._read_frames()
        self._read_changes()

    def _read_frames(self) -> None:
        newest = self._store.newest_id()  # before: a page that comes now gets what is newer
        if not self._audience.has_pages:
            self._frame = newest
            return
        while not self._stopping and (frames := self._store.since(self._frame, _FRAMES, _BYTES)):
            self._frame = frames[-1].id
            self.counters["frames"] += len(frames)
            self._audience.publish([_stored(frame) for frame in frames])

    def _read_changes(self) -> None:
        with self._database.read() as connection:
            changes = changes_since(connection, self._change)
        for change in changes:
            self._change = change.id
            if change.server == self._me:
                continue
            self.counters["changes"] += 1
            handler = self._handlers.get(change.kind)
            if handler is None:
                continue
            try:
                handler(change)
            except StorageError:
                self._change = change.id - 1  # heard once more, when the database is back
                raise
            except Exception:
                self.counters["failures"] += 1
                log.exception("a change by another server (%s %s) is passed over", change.kind, change.subject)


def _stored(frame: FromTail) -> Stored:
    """As the server that stored it had it in its hands."""
    groups = [_group(one) for one in frame.groups]
    return Stored(
        frame.id, frame.run, frame.attempt, frame.rank, frame.source, frame.seq, frame.received, groups, frame.events
    )


def _group(group: TailGroup) -> Group:
    times = group.times.tobytes()
    return Group(
        group.steps.astype("<i8").tobytes(), times, times, dict(zip(group.names, group.columns(), strict=True))
    )
