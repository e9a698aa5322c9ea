"""The outbox: sends what the deliveries table says is due, until it arrived, over restarts.

One scheduling thread and some sending ones. Each channel has its own share of them, and one only while its newest try
failed: a dead receiver delays nobody else, as long as no 64 of them begin to hang at once. A delivery keeps its id
(webhook-id) over all tries and kills; it leaves the table's waiting rows only when a 2xx was seen, so a receiver may get
the same id again if we are killed in just that moment, and never misses one.

What is due, and in which messages, is decided in batches.py; what a try means, in retries.py. The messages of one alert
arrive in their order: "resolved" waits until "firing" has arrived, and "firing" again until "resolved" has.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import httpcore
from sqlalchemy import Connection, RowMapping, select

from perfagent.errors import PerfagentError
from perfagent_server.alerts import retries
from perfagent_server.alerts.batches import Batch, Later, put_off, what_is_due
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.alerts.senders import Post, send
from perfagent_server.alerts.waits import AT_ONCE, overlong
from perfagent_server.database import Database, StorageError
from perfagent_server.security.outbound import Guard, post
from perfagent_server.store.tables import alert, delivery

__all__ = ["Chore", "Outbox"]

log = logging.getLogger("perfagent.server")

_THREADS = 256  # made as they are needed
_STANDS_S = 60.0
"""So long the scheduling thread may take for one look: no wait for the database is as long."""
_LONGEST_PAUSE_S = 60.0
_IDLE_S = 5.0
_LOOK_S = 0.5
_UNWRITTEN_S = 1.0  # between two tries to write down what became of a message
_CHORES_S = 5.0
_KEPT_S = 30 * 86400.0  # delivered and failed rows are kept that long
_SET_BACK_S = 30.0  # less makes a wait no longer than anybody minds

Chore = Callable[[float], object]
"""Writes what is to be sent for another reason than that an alert changed, at this time."""


class Outbox:
    """Sends the deliveries that are due. start() and stop() control its threads. wake() tells them of new deliveries, and wait()
    returns the outcome of one. Without threads, call send_due().

    allow: receivers that may be used although they are loopback or private. chores: what to carry out every few
    seconds. is_mine: whether this server sends; where several share a database, one of them does. clock: Unix seconds;
    monotonic: shows when it was set back. send: one POST; the guarded one unless a test drives it.
    """

    def __init__(
        self,
        database: Database,
        allow: Iterable[str] = (),
        *,
        guard: Guard | None = None,
        is_mine: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        send: Post = post,
    ) -> None:
        self._is_mine = is_mine
        self._database, self.guard = database, guard or Guard(allow)
        self.chores: list[Chore] = []
        self._clock, self._monotonic, self._post = clock, monotonic, send
        self._offset = clock() - monotonic()
        self._event = threading.Event()
        self._done = threading.Condition()  # one more try is finished; guards what follows
        self._flying: dict[str, str] = {}  # delivery -> channel
        self._stopped = threading.Event()
        self._moved_at = self._looked_at = monotonic()
        self._error = ""
        self._unwritten: dict[str, int] = {}  # delivery -> how often what became of it could not be written
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._cleaned = self._chores_done = self._waits_seen = 0.0
        self.counters = {
            "tries": 0,
            "delivered": 0,
            "failed_tries": 0,
            "given_up": 0,
            "disabled_channels": 0,
            "failures": 0,
        }

    def start(self) -> None:
        self._moves()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="perfagent-webhook")
        self._thread = threading.Thread(target=self._run, name="perfagent-outbox", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Starts no more tries, and waits a moment for those in the air."""
        self._stopped.set()
        self._event.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        if self._pool is not None:
            with self._done:
                self._done.wait_for(lambda: not self._flying, timeout=3)
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    @property
    def is_well(self) -> bool:
        """Whether the thread runs and moves; if not, only a restart helps."""
        return self._thread is None or (self._thread.is_alive() and self._monotonic() - self._moved_at <= _STANDS_S)

    @property
    def trouble(self) -> str:
        """Why no message is sent; empty while they are, and while the database is away. Of no lock, for any thread."""
        thread, still = self._thread, self._monotonic() - self._looked_at
        if thread is None:
            return ""
        if not thread.is_alive():
            return "the thread that sends messages to channels has ended"
        said = f" ({self._error})" if self._error else ""
        return f"for {still:.0f} s no message to a channel was looked for{said}" if still > _STANDS_S else ""

    def wake(self) -> None:
        self._event.set()

    def send_due(self) -> int:
        """One look, without the threads: sends what is due, and returns how many messages that were."""
        batches: list[Batch] = []
        self._schedule(batches.append)
        for batch in batches:
            self._deliver(batch)
        return len(batches)

    def wait(self, message_id: str, timeout_s: float) -> RowMapping | None:
        """The row of a delivery once it was tried, or what it is when the time is over."""

        def tried() -> RowMapping | None:
            with self._database.read() as connection:
                row = connection.execute(select(delivery).where(delivery.c.id == message_id)).mappings().first()
            return row if row is None or row["tries"] or row["state"] != "waiting" else None

        end = time.monotonic() + timeout_s
        with self._done:
            while (row := tried()) is None and (left := end - time.monotonic()) > 0:
                self._done.wait(min(left, _LOOK_S))  # another server may send it, and wakes nobody here
        return row

    # --- the scheduling thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause, self._moved_at = _IDLE_S, self._monotonic()
            try:
                pause = self._schedule(self._launch)
                self._moves()
                self._error = ""
            except BaseException as error:  # noqa: BLE001 - the outbox must outlive whatever is raised in it; it is counted and said
                if isinstance(error, StorageError):
                    self._moves()
                self._error = f"{type(error).__name__}: {_speakable(str(error))}"
                self._count("failures")
                log.warning("the outbox waits %.0f s: %s", pause, self._error)
            self._event.wait(pause)
            self._event.clear()

    def _schedule(self, launch: Callable[[Batch], object]) -> float:
        """Hands over what is due; seconds until there may be more."""
        if not self._is_mine():
            return _IDLE_S
        now = self._clock()
        before, self._offset = self._offset, now - self._monotonic()
        self._keep_house(now, was_set_back=self._offset < before - _SET_BACK_S)
        with self._done:
            flying = dict(self._flying)
        with self._database.read() as connection:
            due = what_is_due(connection, now, flying)
        if due.later:
            self._put_off(due.later)
        for error in due.errors:
            self._count("failures")
            log.warning("what is due on a channel cannot be sent: %s: %s", type(error).__name__, error)
        for batch in due.batches:
            launch(batch)
        times = *(values["due"] for values in due.later.values()), *([] if due.following is None else [due.following])
        return min(_IDLE_S, max(0.02, min(times, default=math.inf) - now))

    def _put_off(self, later: Later) -> None:
        self._database.write(lambda connection: put_off(connection, later), essential=True)

    def _keep_house(self, now: float, *, was_set_back: bool) -> None:
        if was_set_back or abs(now - self._waits_seen) > _CHORES_S:
            self._waits_seen = now
            with self._database.read() as connection:
                over = overlong(connection, now, was_set_back=was_set_back)
            if over:
                self._put_off({name: {"due": AT_ONCE, "ready": AT_ONCE} for name in over})
        if abs(now - self._cleaned) > 3600:
            self._cleaned = now
            self._database.write(lambda connection: _clean(connection, now - _KEPT_S), essential=True)
        if self.chores and abs(now - self._chores_done) > _CHORES_S:
            self._chores_done = now
            for chore in self.chores:
                self._do(chore, now)

    def _moves(self) -> None:
        self._moved_at = self._looked_at = self._monotonic()

    def _do(self, chore: Chore, now: float) -> None:
        """What a chore cannot do now, such as a digest while the disk is full, must not keep alerts back."""
        self._moves()
        try:
            chore(now)
        except BaseException as error:  # noqa: BLE001 - counted and said
            self._count("failures")
            log.warning("a report could not be written, and is tried again: %s", error)

    def _launch(self, batch: Batch) -> None:
        if self._pool is None or self._stopped.is_set():
            return
        with self._done:
            self._flying.update({row["id"]: row["channel"] for row in batch.rows})
        self._pool.submit(self._deliver, batch)

    # --- the sending threads ------------------------------------------------------------------------------------------

    def _deliver(self, batch: Batch) -> None:
        """One try, and what it means, written down. Never raises: the rows are then still waiting and come again."""
        named = batch.rows[0]["id"]
        try:
            outcome = self._try(batch)
            if self._write_down(batch, outcome, self._clock()):
                self._count("tries")
                self._count("delivered" if outcome.delivered else "failed_tries")
                self._unwritten.pop(named, None)
        except BaseException:
            self._count("failures")
            log.exception("the outcome of webhook %s could not be written", named)
            failures = self._unwritten[named] = self._unwritten.get(named, 0) + 1
            self._stopped.wait(min(2.0 ** min(failures, 10), _LONGEST_PAUSE_S))  # else its receiver is flooded
        finally:
            with self._done:
                for row in batch.rows:
                    self._flying.pop(row["id"], None)
                self._done.notify_all()
            self._event.set()

    def _write_down(self, batch: Batch, outcome: Outcome, now: float) -> bool:
        """Writes the outcome of a sent message. Tries again until it is stored or the server stops: without the stored outcome
        the message would be sent again. False if the server stopped first."""
        told = False
        while True:
            try:
                self._database.write(
                    lambda connection: retries.write_down(connection, batch.rows, outcome, now, self._count),
                    essential=True,
                )
            except StorageError as error:
                self._count("failures")
                if self._stopped.is_set():
                    return False
                if not told:
                    log.warning("the outcome of webhook %s cannot be written yet: %s", batch.rows[0]["id"], error)
                told = True
                time.sleep(_UNWRITTEN_S)
            else:
                return True

    def _count(self, name: str) -> None:
        self.counters[name] += 1

    def _try(self, batch: Batch) -> Outcome:
        """What became of one try. Whatever is raised is a failed try, which is waited for before the next."""
        try:
            return send(self.guard, batch, self._clock(), self._post)
        except PerfagentError as error:
            return Outcome(None, _speakable(str(error)))
        except (
            OSError,
            httpcore.NetworkError,
            httpcore.TimeoutException,
            httpcore.ProtocolError,
            httpcore.ConnectionNotAvailable,
        ) as error:
            return Outcome(None, _speakable(f"{type(error).__name__}: {error}"))
        except BaseException as error:
            self._count("failures")
            log.exception("delivery %s could not be tried", batch.rows[0]["id"])
            return Outcome(None, _speakable(f"the server failed on this delivery: {type(error).__name__}: {error}"))


def _speakable(text: str) -> str:
    """An error's text as a database can hold it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:500]


def _clean(connection: Connection, before: float) -> None:
    """Of an alert that still fires everything stays: it says who must be told that it is resolved."""
    is_open = select(alert.c.id).where(alert.c.id == delivery.c.alert, alert.c.state == "firing").exists()
    old = delivery.c.state != "waiting", delivery.c.created < before
    connection.execute(delivery.delete().where(*old, ~is_open))
