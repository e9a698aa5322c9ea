"""The outbox: sends what the deliveries table says is due, until it arrived, over restarts.

One scheduling thread and a few sending ones. Each channel has its own share of them, so that a dead receiver delays
nobody else. A delivery keeps its id (webhook-id) over all tries and kills; it leaves the table's waiting rows only when
a 2xx was seen, so a receiver may get the same id again if we are killed in just that moment, and never misses one.

Tries follow the schedule of Standard Webhooks (5 s, 5 min, 30 min, 2 h ... in all some four days), with quick ones
among the first, because most failures of receivers last a moment. The messages of one alert arrive in their order:
"resolved" waits until "firing" has arrived, and "firing" again until "resolved" has.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

import httpcore
from sqlalchemy import Connection, RowMapping, and_, func, insert, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from perfagent.errors import PerfagentError
from perfagent_server.alerts import channels
from perfagent_server.alerts.webhooks import delivery_id, headers, notice_body
from perfagent_server.database import Database, QueueFull, StorageError
from perfagent_server.security.outbound import Guard, Reply, post
from perfagent_server.store.tables import channel, delivery

__all__ = ["DISABLE_AFTER_S", "RETRY_AFTER_S", "Outbox", "next_try"]

log = logging.getLogger("perfagent.server")

# Seconds to wait after the first, second, ... failed try.
RETRY_AFTER_S = (
    *(1.0, 2.0, 4.0, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0, 86400.0),
)
DISABLE_AFTER_S = 5 * 86400.0
_LONGEST_RETRY_AFTER_S = 6 * 3600.0
_PER_CHANNEL = 4
_THREADS = 32
_IDLE_S = 5.0
_KEPT_S = 30 * 86400.0  # delivered and failed rows are kept that long


@dataclass(frozen=True, slots=True)
class _Outcome:
    status: int | None
    error: str
    retry_after: str | None = None

    @property
    def delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class Outbox:
    """start() and stop() the threads; wake() when deliveries were written; wait() for the outcome of one.

    allow: receivers that may be used although they are loopback or private. clock: Unix seconds. send: one POST; the
    guarded one unless a test drives it.
    """

    def __init__(
        self,
        database: Database,
        allow: Iterable[str] = (),
        *,
        guard: Guard | None = None,
        clock: Callable[[], float] = time.time,
        send: Callable[[Guard, str, bytes, dict[str, str]], Reply] = post,
    ) -> None:
        self._database, self.guard, self._clock, self._send = database, guard or Guard(allow), clock, send
        self._event = threading.Event()
        self._done = threading.Condition()  # one more try is finished; guards what follows
        self._flying: dict[str, str] = {}  # delivery -> channel
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._cleaned = 0.0
        self.counters = {
            "tries": 0,
            "delivered": 0,
            "failed_tries": 0,
            "given_up": 0,
            "disabled_channels": 0,
            "failures": 0,
        }

    def start(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="perfagent-webhook")
        self._thread = threading.Thread(target=self._run, name="perfagent-outbox", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Starts no more tries, and waits a moment for those in the air."""
        self._stopping = True
        self._event.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        if self._pool is not None:
            with self._done:
                self._done.wait_for(lambda: not self._flying, timeout=3)
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def wake(self) -> None:
        self._event.set()

    def wait(self, message_id: str, timeout_s: float) -> RowMapping | None:
        """The row of a delivery once it was tried, or what it is when the time is over."""

        def tried() -> RowMapping | None:
            with self._database.read() as connection:
                row = connection.execute(select(delivery).where(delivery.c.id == message_id)).mappings().first()
            return row if row is None or row["tries"] or row["state"] != "waiting" else None

        end = time.monotonic() + timeout_s
        with self._done:
            while (row := tried()) is None and (left := end - time.monotonic()) > 0:
                self._done.wait(left)
        return row

    # --- the scheduling thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            pause = _IDLE_S
            try:
                pause = self._schedule()
            except Exception as error:  # noqa: BLE001 - the outbox must outlive whatever the database does; it is counted and said
                self.counters["failures"] += 1
                log.warning("the outbox waits %.0f s: %s", pause, error)
            self._event.wait(pause)
            self._event.clear()

    def _schedule(self) -> float:
        """Hands what is due to the sending threads; seconds until there may be more."""
        now = self._clock()
        if now - self._cleaned > 3600:
            self._cleaned = now
            self._database.write(lambda connection: _clean(connection, now - _KEPT_S), essential=True)
        with self._done:
            flying = dict(self._flying)
        busy: dict[str, int] = {}
        for one in flying.values():
            busy[one] = busy.get(one, 0) + 1
        blocked = _waits_for_another()
        with self._database.read() as connection:
            state = delivery.c.state == "waiting"
            ripe = (
                connection.execute(select(delivery.c.channel).where(state, delivery.c.due <= now).distinct())
                .scalars()
                .all()
            )
            # Not the earliest of all: one that waits for another delivery, or for its channel, may have been due for
            # long.
            following = connection.execute(select(func.min(delivery.c.due)).where(state, delivery.c.due > now)).scalar()
            due = []
            for name in ripe:
                free = _PER_CHANNEL - busy.get(name, 0)
                if free <= 0:
                    continue
                enabled = or_(channel.c.enabled.is_(True), delivery.c.event == "channel.test")
                query = (
                    select(delivery, channel.c.url, channel.c.secret)
                    .join(channel, channel.c.id == delivery.c.channel)
                    .where(
                        delivery.c.channel == name,
                        delivery.c.state == "waiting",
                        delivery.c.due <= now,
                        enabled,
                        ~blocked,
                    )
                    .order_by(delivery.c.due, delivery.c.created)
                    .limit(_PER_CHANNEL + len(flying))
                )
                due += [row for row in connection.execute(query).mappings() if row["id"] not in flying][:free]
        for row in due:
            self._launch(row)
        return _IDLE_S if following is None else min(_IDLE_S, max(0.02, float(following) - now))

    def _launch(self, row: RowMapping) -> None:
        if self._pool is None or self._stopping:
            return
        with self._done:
            self._flying[row["id"]] = row["channel"]
        self._pool.submit(self._deliver, row)

    # --- the sending threads ------------------------------------------------------------------------------------------

    def _deliver(self, row: RowMapping) -> None:
        """One try, and what it means, written down. Never raises: the row is then still waiting and comes again."""
        try:
            outcome = self._try(row)
            self._database.write(lambda connection: self._note(connection, row, outcome), essential=True)
            self.counters["tries"] += 1
            self.counters["delivered" if outcome.delivered else "failed_tries"] += 1
        except StorageError as error:
            self.counters["failures"] += 1
            if not isinstance(error, QueueFull) or not self._stopping:
                log.warning("the outcome of webhook %s could not be written: %s", row["id"], error)
            time.sleep(0 if self._stopping else 1)  # the row is still due: not in a hot loop
        except Exception:
            self.counters["failures"] += 1
            log.exception("the outcome of webhook %s could not be written", row["id"])
            time.sleep(0 if self._stopping else 1)
        finally:
            with self._done:
                self._flying.pop(row["id"], None)
                self._done.notify_all()
            self._event.set()

    def _try(self, row: RowMapping) -> _Outcome:
        """What became of one POST. Whatever is raised is a failed try, which is waited for before the next."""
        now = int(self._clock())
        try:
            reply = self._send(self.guard, row["url"], row["body"], headers(row["secret"], row["id"], now, row["body"]))
        except PerfagentError as error:
            return _Outcome(None, _speakable(str(error)))
        except (
            OSError,
            httpcore.NetworkError,
            httpcore.TimeoutException,
            httpcore.ProtocolError,
            httpcore.ConnectionNotAvailable,
        ) as error:
            return _Outcome(None, _speakable(f"{type(error).__name__}: {error}"))
        except Exception as error:
            self.counters["failures"] += 1
            log.exception("webhook %s could not be tried", row["id"])
            return _Outcome(None, _speakable(f"the server failed on this delivery: {type(error).__name__}: {error}"))
        if 200 <= reply.status < 300:
            return _Outcome(reply.status, "")
        what = f"the receiver answered {reply.status}"
        if 300 <= reply.status < 400:
            what += "; redirects are not followed: give the channel the final address"
        return _Outcome(reply.status, what, reply.headers.get("retry-after"))

    def _note(self, connection: Connection, row: RowMapping, outcome: _Outcome) -> None:
        now = self._clock()
        tries = row["tries"] + 1
        values = {"tries": tries, "status": outcome.status, "error": outcome.error}
        mine = update(delivery).where(delivery.c.id == row["id"])
        if outcome.delivered:
            connection.execute(mine.values(state="delivered", delivered=now, **values))
            healed = update(channel).where(channel.c.id == row["channel"])
            if row["event"] == "channel.test":
                channels.set_enabled(connection, row["channel"], enabled=True)
            else:
                connection.execute(healed.where(channel.c.failing_since.is_not(None)).values(failing_since=None))
            return
        due = None if row["event"] == "channel.test" else next_try(tries, now, outcome.retry_after)
        if outcome.status == 410:
            self._disable(connection, row["channel"], now, "the receiver answered 410 Gone")
            due = None
        if due is None:
            connection.execute(mine.values(state="failed", **values))
            self.counters["given_up"] += 1
        else:
            connection.execute(mine.values(due=due, **values))
        if row["event"] == "channel.test":
            return
        failing = connection.execute(
            select(channel.c.failing_since, channel.c.enabled).where(channel.c.id == row["channel"])
        ).first()
        if failing is None or not failing.enabled:
            return
        if failing.failing_since is None:
            connection.execute(update(channel).where(channel.c.id == row["channel"]).values(failing_since=now))
        elif now - failing.failing_since >= DISABLE_AFTER_S:
            self._disable(
                connection, row["channel"], now, f"no delivery arrived for {DISABLE_AFTER_S / 86400:.0f} days"
            )

    def _disable(self, connection: Connection, name: str, now: float, why: str) -> None:
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
        self.counters["disabled_channels"] += 1
        log.warning("channel %s (%s) is disabled: %s", about["name"], name, why)
        message = f"The channel {about['name']!r} is disabled: {why}. Test it to enable it again."
        others = (
            connection.execute(select(channel.c.id).where(channel.c.enabled.is_(True), channel.c.id != name))
            .scalars()
            .all()
        )
        for other in others:
            connection.execute(
                insert(delivery).values(
                    id=delivery_id("channel.disabled", name, other, str(now)), channel=other, alert=None,
                    event="channel.disabled",
                    body=notice_body("channel.disabled", now, message, severity="warning", channel=name), state="waiting",
                    tries=0, created=now, due=now, error="",
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


def _speakable(text: str) -> str:
    """An error's text as a database can hold it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:500]


def _waits_for_another() -> ColumnElement[bool]:
    """Whether something earlier about the same alert has not arrived on that channel yet."""
    first = delivery.alias()
    return (
        select(first.c.id)
        .where(first.c.alert == delivery.c.alert, first.c.channel == delivery.c.channel, first.c.state == "waiting")
        .where(first.c.created < delivery.c.created)
        .exists()
    )


def _clean(connection: Connection, before: float) -> None:
    connection.execute(delivery.delete().where(delivery.c.state != "waiting", delivery.c.created < before))
