"""The two threads of the agent, and the deque by which the training thread hands them what it measured.

    training thread          perfagent-sender (every 200 ms)                      perfagent-courier
    rows.append(row)  ──►    poll sources, drain rows, pack columns,       ──►    one HTTP request at a time,
    event(...)               spool (CRC), cut a frame a second             ◄──    its answer; NVML between requests

Between threads there are deques and Events only, never queue.Queue or a lock that the training thread could meet: a fork while
such a lock is held hangs the child for good (20 of 20 tries), and a signal handler that logs deadlocks on it. A forked child is
inert: its `disabled` is True, its files and its socket are let go without a word, and nothing is started in it.

The sender thread owns the spool and all decisions; the courier only carries. So a server that is stopped, slow or far away
delays nothing but delivery: what was measured is in the spool within 200 ms in any case.

Order of trust: a frame is written down before it is sent, sent until the server answers with our own reply, and only then
forgotten (spool.py). Nothing is given up by time; what had to be dropped for space is in `counters`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perfagent.delivery.columns import Columns, is_urgent
from perfagent.delivery.spool import Header, Outgoing, Spool, SpoolBusyError, folders
from perfagent.delivery.transport import Answer, HttpTransport, judge, packed
from perfagent.errors import ServerUnreachable, WireError
from perfagent.identity import process_start
from perfagent.redaction import redacted
from perfagent.wire import Event, encode

if TYPE_CHECKING:
    from perfagent.config import AgentConfig
    from perfagent.delivery.columns import AnyRow
    from perfagent.delivery.transport import Transport
    from perfagent.identity import Identity

__all__ = ["Deferred", "Sender"]

_log = logging.getLogger("perfagent")

MAX_ROWS = 50_000
HEARTBEAT_S = 5.0
DEFERRED_S = 60.0
LAST_ROWS_S = 0.25
ORPHAN_AGE_S = 7 * 86400.0
COURIER_STUCK_S = 25.0
URGENT = ("alert", "finding", "state")


class Deferred(Protocol):
    """A row whose values are still on the device."""

    def ready(self) -> bool:
        """Whether the values have arrived; never blocks."""

    def row(self) -> AnyRow:
        """The row, once it is ready."""


@dataclass(slots=True)
class _Job:
    """One request for the courier. spool is None for a sign of life, which nobody repeats."""

    body: bytes
    encoding: str | None
    outgoing: Outgoing
    spool: Spool | None


@dataclass(slots=True)
class _Flush:
    until: float
    done: threading.Event
    drained: bool = False
    delivered: bool = False


class Sender:
    """Delivers the samples and events of one process.

    rows: the training thread appends and does nothing else. A row is `(step, Unix time, monotonic, names, values)` with one
    tuple object of names per shape, or `(step, Unix time, monotonic, metrics)` with what a user logged (a dict that nobody
    changes afterwards; its values are checked here), or a `Deferred`.
    counters: rows, samples, dropped, spooled, sent, acked, rejected, failed, ... all since the start.
    on_command: called on the sender thread with each command of a reply.
    """

    def __init__(self, config: AgentConfig, identity: Identity, *, transport: Transport | None = None) -> None:
        self.config, self.identity = config, identity
        self.rows: deque[AnyRow | Deferred] = deque(maxlen=MAX_ROWS)
        self.counters: dict[str, int] = Counter()
        self.on_command: list[Callable[[Mapping[str, Any]], None]] = []
        self.disabled = config.disabled
        self.cpu_s = 0.0
        """CPU seconds that both threads have used so far (for the governor)."""
        self._events: deque[Event] = deque(maxlen=10_000)
        self._sources: list[_Source] = []
        self._slow_sources: list[_Source] = []
        self._flushes: deque[_Flush] = deque()
        self._columns = Columns()
        self._transport = transport
        self._random = random.Random()  # noqa: S311 - jitter; its own, so that the user's random state is left alone
        self._wake, self._closed = threading.Event(), threading.Event()
        self._closing: float | None = None
        self._final = ""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        root = config.record if config.record is not None else config.state_dir / "spool"
        self.spool = Spool(
            root / identity.source,
            Header(
                source=identity.source,
                project=identity.project,
                rank=identity.rank,
                server=None if config.record is not None else config.server,
                run=identity.run if identity.known else None,
                attempt=identity.attempt,
                name=identity.name,
                pid=os.getpid(),
                pid_start=process_start(os.getpid()),
                started=time.time(),
            ),
            max_bytes=config.max_spool_bytes,
            max_memory_bytes=config.max_memory_bytes,
            recording=config.record is not None,
        )
        self._courier: _Courier | None = None
        self._orphan: Spool | None = None
        self._orphans: list[Any] | None = None
        self._busy: _Job | None = None
        self._urgent = False
        self._identified = False
        self._failures = 0
        self._retry_at = 0.0
        self._last_cut = 0.0
        self._last_sent = 0.0
        self._last_sync = 0.0
        self._deferred_since = 0.0
        self._said: set[str] = set()
        forget = weakref.WeakMethod(self._in_forked_child)  # register_at_fork cannot be undone, so it must not keep us alive
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    # ---- called by the session, on any thread

    def start(self) -> None:
        """Starts the sender thread, once. Does nothing in a forked child or when disabled; never raises."""
        if self.disabled or self._thread is not None or os.getpid() != self._pid:
            return
        if self.config.record is None:
            self.spool.create()
        thread = threading.Thread(target=self._run, name="perfagent-sender", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had: at interpreter shutdown, or at the limit of the user's processes
            self._disable(f"its thread could not be started ({error})")
            return
        self._thread = thread

    def event(self, kind: str, data: dict[str, Any], *, step: int | None = None) -> None:
        """Something that happened once; redacted and made encodable on the sender thread. kind: one of wire.EVENT_KINDS."""
        if not self.disabled:
            self._events.append(Event(kind=kind, time=time.time(), step=step, monotonic=time.monotonic(), data=data))

    def add_source(self, poll: Callable[[], None]) -> None:
        """`poll` is called on the sender thread on every tick, before draining. It must not block."""
        self._sources.append(_Source(poll))

    def add_slow_source(self, poll: Callable[[], None]) -> None:
        """`poll` is called on the courier thread about twice a second between and during requests. It may block for a moment."""
        self._slow_sources.append(_Source(poll))

    def flush(self, timeout_s: float) -> bool:
        """Asks for delivery of all that was handed in before; True when the server has acknowledged it within the time."""
        if self.disabled or self._thread is None or not self._thread.is_alive():
            return False
        request = _Flush(time.monotonic() + timeout_s, threading.Event())
        self._flushes.append(request)
        self._wake.set()
        request.done.wait(timeout_s)
        return request.delivered

    def close(self, state: str, reason: str = "", timeout_s: float = 1.5, **more: Any) -> None:
        """The last event, everything into the spool, one bounded attempt to deliver. Returns within timeout_s."""
        if self.disabled or self._closing is not None:
            return
        self._final = state
        if state:
            self.event("state", {"state": state, **({"reason": reason} if reason else {}), **more})
        self._closing = time.monotonic() + timeout_s
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._closed.wait(timeout_s)
        self.disabled = True

    @property
    def recording_to(self) -> str:
        """Where the samples are while the server is away."""
        return str(self.spool.folder)

    # ---- forked child

    def _in_forked_child(self) -> None:
        """No lock, no logging, no thread: other threads may have held any lock at the moment of the fork."""
        self.disabled = True
        self.rows.clear()
        self._events.clear()
        self._sources.clear()
        self._slow_sources.clear()
        self.spool.forked()
        if self._orphan is not None:
            self._orphan.forked()
        if self._transport is not None:
            self._transport.abandon()

    # ---- the sender thread

    def _run(self) -> None:
        """The one place where this thread's own errors end: counted, told once, begun again once, then the agent is off."""
        for attempt in (1, 2):
            try:
                self._loop()
                break
            except Exception as error:  # noqa: BLE001 - the training must go on whatever is wrong with us
                self.counters["errors"] += 1
                if attempt == 2:
                    self._disable(f"{type(error).__name__}: {error}")
                else:
                    self._once(
                        "error", logging.WARNING, f"perfagent: internal error, starting over: {type(error).__name__}: {error}"
                    )
        self._closed.set()

    def _disable(self, why: str) -> None:
        self.disabled = True
        self.rows.clear()
        self._once("disabled", logging.WARNING, f"perfagent: switched off for this process: {why}; training goes on unmonitored")

    def _loop(self) -> None:
        next_tick = self._last_sent = time.monotonic()
        while not self.disabled:
            now = time.monotonic()
            if self._closing is not None:
                self._finish(now)
                return
            if now >= next_tick:
                next_tick = max(next_tick + self.config.spool_tick_s, now)
                self._tick(now)
            self._advance(now)
            self.cpu_s = time.thread_time() + (self._courier.cpu_s if self._courier is not None else 0.0)
            self._wake.wait(max(0.0, next_tick - time.monotonic()))
            self._wake.clear()

    def _tick(self, now: float) -> None:
        for source in [*self._sources]:
            if not source.poll():
                self._sources.remove(source)
                self._once(
                    f"source {source.name}",
                    logging.WARNING,
                    f"perfagent: {source.name} failed three times and is off: {source.error}",
                )
        self._drain(now)
        for request in self._flushes:
            request.drained = True
        if now - self._last_sync >= 1.0 and (self._failures or self.config.record is not None):
            self._last_sync = now
            self.spool.sync()  # while the server takes everything within a second, power loss is its concern

    def _drain(self, now: float, *, last: bool = False) -> None:
        """last: rows that are still on the device are given up."""
        if len(self.rows) == MAX_ROWS:
            self.counters["overflows"] += 1
            self._once(
                "overflow", logging.WARNING, "perfagent: rows came faster than they could be stored; the oldest were dropped"
            )
        rows: list[Any] = []
        for _ in range(len(self.rows)):
            head = self.rows[0]
            if isinstance(head, tuple):
                rows.append(head)
            else:
                try:
                    if head.ready():
                        rows.append(head.row())
                    else:
                        self._deferred_since = self._deferred_since or now
                        if now - self._deferred_since < DEFERRED_S and not last:
                            break
                        self.counters["dropped"] += 1
                except Exception:  # noqa: BLE001 - a device that was lost answers every query with its own error
                    self.counters["dropped"] += 1
                self._deferred_since = 0.0
            self.rows.popleft()
        events: list[Event] = []
        while self._events:
            event = self._events.popleft()
            event.data = redacted(event.data)
            events.append(event)
            self._urgent = self._urgent or event.kind in URGENT
        if not rows and not events:
            return
        groups = self._columns.groups(rows)
        self._tell_refused()
        samples = sum(group.samples for group in groups)
        self.counters["rows"] += len(rows)
        self.counters["samples"] += samples
        self.counters["events"] += len(events)
        self._urgent = self._urgent or any(is_urgent(group) for group in groups)
        if groups or events:
            if self.spool.append(groups, events, now=now):
                self.counters["spooled"] += samples
            elif self.spool.error is not None:
                self._once(
                    "disk",
                    logging.WARNING,
                    f"perfagent: the spool {self.spool.folder} cannot be written ({_cause(self.spool.error)}); "
                    f"keeping up to {self.config.max_memory_bytes >> 20} MB in memory",
                )

    def _tell_refused(self) -> None:
        refused = self._columns.refused
        if not refused:
            return
        for reason, count in refused.items():
            self.counters[f"refused_{reason}"] += count
        if refused["series"]:
            self._once(
                "series",
                logging.WARNING,
                f"perfagent: a run may have {self._columns.max_series} series; samples of further names are left out",
            )
        if refused["kind"]:
            self._once(
                "kind",
                logging.WARNING,
                "perfagent: some logged values are no numbers and were left out (text, None, complex, arrays)",
            )
        refused.clear()

    # ---- deciding what to send

    def _advance(self, now: float) -> None:
        courier = self._courier
        if courier is not None:
            while courier.answers:
                job, answer = courier.answers.popleft()
                if job is self._busy:
                    self._busy = None
                    self._settle(job, answer, now)
            if courier.stuck(now):
                self._replace_courier(courier)
        if not self._identified and self.identity.poll():
            self._identified = True
            who = self.identity
            self.spool.identify(run=who.run or "", attempt=who.attempt, name=who.name, project=who.project)
        self._answer_flushes(now)
        if self.config.record is not None:
            self.spool.hold(now=now)
            if self._slow_sources:
                self._courier_ready()
            return
        if self._busy is not None or now < self._retry_at or not self._identified:
            if self._failures or not self._identified or self._busy is not None:
                self.spool.hold(now=now)
            if self._slow_sources:
                self._courier_ready()
            return
        due = self._urgent or self._flushes or self._closing is not None or now - self._last_cut >= self.config.flush_s
        if self.spool.backlog or (due and self.spool.has_pending):
            if not self.spool.backlog:
                self._last_cut, self._urgent = now, False
            outgoing = self.spool.next()
            if outgoing is not None:
                self._send(outgoing, self.spool, now)
                return
        if self._closing is not None:
            return
        if now - self._last_sent >= HEARTBEAT_S:
            self._send(self.spool.empty(), None, now)
        elif self._failures == 0 and self.counters["acked_frames"]:
            self._send_orphan(now)

    def _send(self, outgoing: Outgoing, spool: Spool | None, now: float) -> None:
        try:
            body = encode((spool or self.spool).frame(outgoing))
        except WireError as error:
            self._quarantine(outgoing, spool, str(error))
            return
        body, encoding = packed(body, loopback=self._courier_ready().loopback)
        self._busy = _Job(body, encoding, outgoing, spool)
        self._last_sent = now
        self.counters["sent_frames"] += 1
        self.counters["sent_bytes"] += len(body)
        self._courier_ready().carry(self._busy)

    def _courier_ready(self) -> _Courier:
        courier = self._courier
        if courier is None:
            if self._transport is None:
                self._transport = HttpTransport(self.config.server, self.config.api_key)
            courier = self._courier = _Courier(self._transport, self._slow_sources, self._wake)
        return courier

    def _replace_courier(self, stuck: _Courier) -> None:
        """Its thread hangs in a call that cannot be ended (a lost GPU's driver): leave it there, go on without what hung."""
        self.counters["couriers_lost"] += 1
        if stuck.source is not None:
            self._slow_sources[:] = [source for source in self._slow_sources if source is not stuck.source]
            self._once("stuck", logging.WARNING, f"perfagent: {stuck.source.name} does not return and is off")
        stuck.ended = True
        self._transport = None
        self._courier = None
        self._busy = None

    def _settle(self, job: _Job, answer: Answer, now: float) -> None:
        kind = answer.kind
        if kind == "acked":
            if self._failures:
                _log.info("perfagent: server %s reachable again", self.config.server)
            self._failures = 0
            self._said.discard("unreachable")
            self.counters["acked_frames"] += 1
            self.counters["acked"] += answer.stored + answer.duplicate
            self.counters["duplicate"] += answer.duplicate
            for item in answer.rejected:
                count = item.get("count")
                self.counters["rejected"] += count if isinstance(count, int) else 1
            if job.spool is not None:
                job.spool.ack(job.outgoing.seq)
            for command in answer.commands:
                self._obey(command)
            return
        self.counters["failed"] += 1
        if kind == "refused":
            self._quarantine(job.outgoing, job.spool, answer.reason)
            return
        if kind == "too_large" and job.spool is not None:
            if not job.spool.split(job.outgoing.seq):
                self._quarantine(job.outgoing, job.spool, answer.reason)
            return
        self._failures += 1
        pause = answer.pause_s if answer.pause_s is not None else self._random.uniform(1.0, min(30.0, 2.0**self._failures))
        self._retry_at = now + pause
        self.spool.hold(now=now)
        server = self.config.server
        if kind == "unauthorized":
            self._once(
                "unauthorized",
                logging.ERROR,
                f"perfagent: server {server} refused the key ({answer.reason}): set PERFAGENT_API_KEY to a key with the ingest "
                f"scope; recording to {self.spool.folder} meanwhile",
            )
        elif kind == "foreign":
            self._once(
                "foreign",
                logging.WARNING,
                f"perfagent: what answers at {server} is no perfagent server ({answer.reason}), "
                f"recording to {self.spool.folder}; will retry",
            )
        elif kind == "retry" and answer.reason.startswith("status"):
            self._once(
                "busy",
                logging.WARNING,
                f"perfagent: server {server} is busy ({answer.reason}), recording to {self.spool.folder}; will retry",
            )
        else:
            self._once(
                "unreachable",
                logging.WARNING,
                f"perfagent: server {server} unreachable, recording to {self.spool.folder}; will retry",
            )

    def _quarantine(self, outgoing: Outgoing, spool: Spool | None, reason: str) -> None:
        self.counters["quarantined_frames"] += 1
        self.counters["rejected"] += outgoing.samples
        if spool is None:
            return
        kept = spool.quarantine(outgoing.seq, reason)
        where = f"set aside in {spool.folder / 'quarantine'}" if kept else "dropped, the quarantine is full"
        self._once("quarantine", logging.WARNING, f"perfagent: the server refused samples ({reason}); they were {where}")

    def _obey(self, command: Mapping[str, Any]) -> None:
        if command.get("kind", command.get("command")) == "flush":
            self._urgent = True
        for callback in self.on_command:
            try:
                callback(command)
            except Exception as error:  # noqa: BLE001 - one bad command must not end delivery
                self.counters["errors"] += 1
                self._once(
                    "command", logging.WARNING, f"perfagent: a command of the server failed: {type(error).__name__}: {error}"
                )

    def _answer_flushes(self, now: float) -> None:
        for _ in range(len(self._flushes)):
            request = self._flushes[0]
            delivered = request.drained and self._busy is None and self.spool.waiting == 0
            if not delivered and now < request.until:
                if not request.drained:
                    self._drain(now)
                    request.drained = True
                return
            request.delivered = delivered and self.config.record is None
            self._flushes.popleft()
            request.done.set()

    # ---- what dead processes left

    def _send_orphan(self, now: float) -> None:
        """At low priority: frames of sources whose process is gone, recorded for this same server."""
        if self._orphans is None:
            self._orphans = folders(self.config.state_dir / "spool", max_age_s=ORPHAN_AGE_S)
        while self._orphan is None and self._orphans:
            folder = self._orphans.pop(0)
            if folder == self.spool.folder:
                continue
            try:
                spool = Spool.open(folder)
            except (SpoolBusyError, OSError):
                continue
            if spool.header.server != self.config.server or not spool.header.run:
                spool.close()
                continue
            self._orphan = spool
        if self._orphan is None:
            return
        outgoing = self._orphan.next()
        if outgoing is None:
            self._orphan.remove()
            self._orphan = None
            return
        self._send(outgoing, self._orphan, now)

    # ---- the end

    def _finish(self, now: float) -> None:
        """The last drain, then as much delivery as the time allows; what is left waits in the spool for the next start."""
        until = self._closing or now
        for source in self._sources:
            source.poll()
        self._drain(now)
        while self.rows and time.monotonic() < now + LAST_ROWS_S:  # copies from the device take milliseconds
            time.sleep(0.01)
            self._drain(time.monotonic())
        self._drain(time.monotonic(), last=True)
        if self.config.record is not None:
            self._identified = self._identified or self.identity.poll()
            if self._identified:
                self.spool.identify(
                    run=self.identity.run or "",
                    attempt=self.identity.attempt,
                    name=self.identity.name,
                    project=self.identity.project,
                )
            self.spool.hold(now=now, force=True)
        else:
            self._retry_at = 0.0  # one attempt now, whatever the pause was
            failures = self._failures
            while time.monotonic() < until - 0.05:
                now = time.monotonic()
                self._advance(now)
                if self._busy is None and self.spool.waiting == 0:
                    break
                if self._failures > failures:  # it was tried, in vain
                    break
                self._wake.wait(min(0.05, max(0.001, until - now)))
                self._wake.clear()
        if self._courier is not None:
            self._courier.ended = True
            self._courier.work.set()
        done = self.config.record is None and self._busy is None and self.spool.waiting == 0
        if done and not self.counters["quarantined_frames"] and not _watched():
            self.spool.remove()
        else:
            self.spool.close(final=self._final)
        if self._orphan is not None:
            self._orphan.close()
        for request in self._flushes:
            request.done.set()

    def _once(self, topic: str, level: int, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            with contextlib.suppress(Exception):  # a user's logging handler may raise what it likes
                _log.log(level, message)


def _cause(error: OSError) -> str:
    return error.strerror or str(error)


def _watched() -> bool:
    """Under `perfagent run` the watcher has the last word on how the process ended; it finds the folder and removes it."""
    options = sys.modules.get("perfagent.launch.options")
    return options is not None and options.current is not None and bool(options.current.watched)


class _Source:
    """A callable that is polled; off after three errors in a row."""

    def __init__(self, poll: Callable[[], None]) -> None:
        self._poll = poll
        self.errors = 0
        self.error = ""
        self.name = getattr(poll, "__qualname__", type(poll).__name__)

    def poll(self) -> bool:
        try:
            self._poll()
        except Exception as error:  # noqa: BLE001 - a sampler's trouble must not stop delivery
            self.errors += 1
            self.error = f"{type(error).__name__}: {error}"
            return self.errors < 3
        self.errors = 0
        return True


class _Courier:
    """The thread that waits for the network (and for NVML), so that no one else has to."""

    def __init__(self, transport: Transport, slow_sources: list[_Source], wake: threading.Event) -> None:
        self._transport, self._slow_sources, self._wake = transport, slow_sources, wake
        self.work = threading.Event()
        self.answers: deque[tuple[_Job, Answer]] = deque()
        self.ended = False
        self.cpu_s = 0.0
        self.loopback = bool(getattr(transport, "loopback", True))
        self.source: _Source | None = None
        self._job: _Job | None = None
        self._since = 0.0
        self._sampled = 0.0
        if hasattr(transport, "idle"):
            transport.idle = self._sample
        self._thread = threading.Thread(target=self._run, name="perfagent-courier", daemon=True)
        self._thread.start()

    def carry(self, job: _Job) -> None:
        self._since = time.monotonic()
        self._job = job
        self.work.set()

    def stuck(self, now: float) -> bool:
        since = self._since
        return since > 0.0 and now - since > COURIER_STUCK_S

    def _run(self) -> None:
        while not self.ended:
            self.work.wait(0.5 if self._slow_sources else None)
            self.work.clear()
            job, self._job = self._job, None
            if job is not None:
                try:
                    answer = judge(self._transport.post(job.body, encoding=job.encoding))
                except ServerUnreachable as error:
                    answer = Answer(kind="retry", reason=str(error))
                except Exception as error:  # noqa: BLE001 - a transport's own error must not end the thread that carries
                    answer = Answer(kind="retry", reason=f"{type(error).__name__}: {error}")
                self._since = 0.0
                self.answers.append((job, answer))
                self._wake.set()
            self._sample()
            self.cpu_s = time.thread_time()
        self._transport.close()

    def _sample(self) -> None:
        now = time.monotonic()
        if self.ended or now - self._sampled < 0.45:
            return
        self._sampled = now
        waiting = self._since
        for source in [*self._slow_sources]:
            self._since, self.source = time.monotonic(), source
            if not source.poll() and source in self._slow_sources:
                self._slow_sources.remove(source)
            self.source = None
        self._since = waiting
