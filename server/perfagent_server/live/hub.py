"""Live updates: sends what was just committed to every page that wants it, at most ten messages a second each.

`publish*` are called by the ingest writer and the rules engine on their own threads: they append to a bounded inbox and
return; nothing in here can raise into them or make them wait. A thread of the hub turns the inbox into messages ten
times a second, so that the event loop, which also serves the agents, only hands bytes to sockets:

    writer, rules ── publish ──► inbox ── hub's thread: topics collect, encode ──► event loop: pages' queues ──► sockets

Only the hub's thread touches what a topic collects. Only the event loop touches pages and their queues. Both read the
table of topics, which is replaced and never changed.

Pages with the same subscription share the work and the bytes, so that the two hundredth page costs a send and no more.
A page that reads too slowly loses its queue and gets {"lagged": true}: it then fetches again what it shows.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from perfagent.wire import Alert, RunSummary, to_json
from perfagent_server.live.bands import Bands
from perfagent_server.live.fleet import Fleet
from perfagent_server.live.page import LAGGED, TICK_S, Page
from perfagent_server.live.run_projects import RunProjects
from perfagent_server.live.samples import Samples
from perfagent_server.live.subscription import Subscription
from perfagent_server.store.stored import Stored

__all__ = ["Hub"]

log = logging.getLogger("perfagent.server")

_INBOX_FRAMES = 4096
_INBOX_BYTES = 64 * 2**20  # of samples; one commit alone may hold more
_NOTICES = 4096
_RUN_EVERY_S = 1.0
_FLEET_EVERY_S = 1.0
_FLEET_RUNS = 1000  # in a message; where more move, they take turns
_STOP_S = 5.0  # the database may hold up the thread
_MOVING = ("starting", "running")
_REFUSED = 1008  # a WebSocket's code for "against the policy"

Rows = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class _Topic:
    """All pages with one subscription, and what is collected for their next message."""

    collected: Samples | Bands | Fleet
    pages: set[Page] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Notice:
    """News of one run that is in no frame. of_run: that its row has changed; message: for pages of the run, or None;
    is_over: no more steps are awaited."""

    run: str
    of_run: bool
    message: bytes | None = None
    is_over: bool = False


class Hub:
    """The meeting point of what is committed and who watches.

    summaries: reads the current RunSummary of some runs; rows: what the list of runs shows of them. Both are called on
    the hub's thread, at most once a second and only while somebody watches. projects_of: reads the projects of some runs,
    there too, while somebody watches who sees some projects only. None in tests of the hub alone.
    """

    def __init__(
        self,
        summaries: Callable[[Sequence[str]], Iterable[RunSummary]] | None = None,
        rows: Callable[[Sequence[str]], Rows] | None = None,
        projects_of: Callable[[Sequence[str]], Mapping[str, str]] = lambda _runs: {},
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._summaries, self._rows, self._clock = summaries, rows, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake, self._stopping = threading.Event(), threading.Event()

        self._lock = threading.Lock()  # of the inbox
        self._inbox: list[Stored] = []
        self._inbox_bytes = 0
        self._overflow = False
        self._notices: deque[_Notice] = deque()

        self._topics: Mapping[Subscription, _Topic] = {}
        self._pages: set[Page] = set()
        self._changed = time.time()
        """When an alert or a run last changed: what a page was made before may have changed since."""
        self.watched = frozenset[str]()
        """What pages show as it comes, as Subscription.watched() has it. Replaced on the loop's thread."""

        # of the hub's thread
        self._projects = RunProjects(projects_of)
        self._outbox: list[tuple[Subscription, bytes]] = []
        self._dirty: set[str] = set()  # runs whose summary may have changed
        self._urgent = False
        self._runs_read = 0.0
        self._moved: dict[str, None] = {}  # runs that fleets are to be told of, longest waiting first
        self._fleet_told = 0.0
        self.counters = {
            "pages": 0,
            "messages": 0,
            "bytes": 0,
            "dropped_messages": 0,
            "lagged": 0,
            "inbox_overflows": 0,
            "errors": 0,
        }

    @property
    def has_pages(self) -> bool:
        """Whether anybody wants to see what is published. From any thread."""
        return bool(self._topics)

    # --- called from other threads: append and return -----------------------------------------------------------------

    def publish(self, stored: list[Stored]) -> None:
        """Frames that were just committed."""
        if not self._topics:
            return
        size = sum(group.size_bytes for frame in stored for group in frame.groups)
        with self._lock:
            is_full = len(self._inbox) + len(stored) > _INBOX_FRAMES or self._inbox_bytes + size > _INBOX_BYTES
            if is_full and self._inbox:
                self._overflows()
            else:
                self._inbox += stored
                self._inbox_bytes += size
        self._wake.set()

    def publish_alert(self, alert: Alert) -> None:
        """An alert that fired, changed or was resolved."""
        self._changed = time.time()
        if self._topics and (message := self._encoded("alert", alert.run, alert)) is not None:
            self._notify(_Notice(alert.run, False, message))

    def publish_run(self, run: RunSummary) -> None:
        """A run whose state or description changed."""
        self._changed = time.time()
        if self._topics and (message := self._encoded("run", run.run, run)) is not None:
            self._notify(_Notice(run.run, True, message, run.state not in _MOVING))

    def miss(self) -> None:
        """Something was not published: pages fetch again what they show."""
        with self._lock:
            self._overflows()
        self._wake.set()

    def forget(self, run: str) -> None:
        """The run was deleted."""
        if self._topics:
            self._notify(_Notice(run, True, is_over=True))

    def _encoded(self, kind: str, run: str, value: Alert | RunSummary) -> bytes | None:
        try:
            return to_json({kind: value})
        except Exception:
            # The callers are the ingest writer and the rules engine: a page's update must not cost them a commit.
            self.counters["errors"] += 1
            log.exception("an update of run %s could not be encoded", run)
            return None

    def _notify(self, notice: _Notice) -> None:
        with self._lock:
            if len(self._notices) < _NOTICES:
                self._notices.append(notice)
            else:
                self._overflows()
        self._wake.set()

    def _overflows(self) -> None:
        """There is no room: every page will be told that it has missed something. The lock is held."""
        self._overflow = True
        self.counters["inbox_overflows"] += 1

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="perfagent-live", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Ends the hub's thread; what it collects from then on is sent to nobody."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_S)
        self._loop = None

    # --- one page, on the loop's thread -------------------------------------------------------------------------------

    async def serve(
        self, socket: WebSocket, allowed: Callable[[], bool], projects: frozenset[str] | None = None
    ) -> None:
        """Serves an accepted WebSocket until it closes. allowed: whether it may go on; asked now and then, on another
        thread. projects: those that its viewer may see; None: all."""
        page = Page(projects)
        self._pages.add(page)
        self.counters["pages"] = len(self._pages)
        writer = asyncio.create_task(page.write(socket, self.counters), name="live page")
        reader = asyncio.create_task(self._read(page, socket), name="live page's subscriptions")
        doubter = asyncio.create_task(page.until_refused(allowed), name="live page's right")
        try:
            await asyncio.wait((reader, doubter), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            else:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                with suppress(WebSocketDisconnect, RuntimeError, OSError):  # it was gone already
                    await socket.close(_REFUSED, "what the key or session of this page may see has changed")
        finally:
            self._subscribe(page, None)
            self._pages.discard(page)
            self.counters["pages"] = len(self._pages)
            for task in (writer, reader, doubter):
                task.cancel()

    def check_pages(self) -> None:
        """A key or a session has ended: every page is asked now whether it may go on. From any thread."""

        def doubt() -> None:
            for page in self._pages:
                page.doubted.set()

        self._call_loop(doubt)

    async def _read(self, page: Page, socket: WebSocket) -> None:
        while True:
            try:
                message = await socket.receive()
            except (WebSocketDisconnect, RuntimeError):
                return
            if message["type"] == "websocket.disconnect":
                return
            raw = message.get("text") or message.get("bytes") or b""
            try:
                subscription = Subscription.from_message(msgspec.json.decode(raw), page.projects)
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                page.put(to_json({"error": {"code": "bad_request", "message": str(error)}}))
                continue
            self._subscribe(page, subscription)
            page.put(to_json({"subscribed": True, "changed": self._changed}))

    def _subscribe(self, page: Page, subscription: Subscription | None) -> None:
        """Puts the page into the topic of its subscription, and out of the one it was in."""
        topics = dict(self._topics)
        if page.subscription is not None:
            left = topics[page.subscription]
            left.pages.discard(page)
            if not left.pages:
                del topics[page.subscription]
        page.subscription = subscription
        if subscription is not None:
            topic = topics.get(subscription)
            if topic is None:
                topic = topics[subscription] = _topic(subscription)
            topic.pages.add(page)
            if isinstance(topic.collected, Fleet):
                topic.collected.tell_all()
        self._topics = topics
        self.watched = frozenset[str]().union(*(one.watched() for one in topics))

    def _deliver(self, messages: Sequence[tuple[Subscription, bytes]]) -> None:
        """Hands messages to pages."""
        for subscription, message in messages:
            topic = self._topics.get(subscription)
            if topic is None:
                continue  # its last page has left meanwhile
            if message is LAGGED:
                self.counters["lagged"] += len(topic.pages)
            for page in topic.pages:
                dropped = page.put(message)
                if dropped:
                    self.counters["dropped_messages"] += dropped
                    self.counters["lagged"] += 1
                    if isinstance(topic.collected, Fleet):
                        topic.collected.tell_all()

    def _call_loop(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: nobody watches any more
                self._loop.call_soon_threadsafe(function, *arguments)

    # --- the hub's thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping.is_set():
            if not self._waits():
                self._wake.wait()
            self._wake.clear()
            topics = self._topics
            try:
                self._turn(topics, self._clock())
            except Exception:
                # One odd frame must not end live updates for everybody; the page sees the gap as a lag and fetches
                # again.
                self.counters["errors"] += 1
                log.exception("live updates failed once")
                self._lag_all(topics)
            self._hand_over()
            self._stopping.wait(TICK_S)

    def _hand_over(self) -> None:
        """Gives the messages that are ready to the event loop."""
        if self._outbox:
            self._call_loop(self._deliver, self._outbox)
            self._outbox = []

    def _waits(self) -> bool:
        """Whether there is something to send later, with no news: steps wait for a slow rank, runs for their second."""
        collected = (topic.collected for topic in self._topics.values())
        return bool(self._dirty or self._moved) or any(not isinstance(one, Fleet) and one.waits for one in collected)

    def _turn(self, topics: Mapping[Subscription, _Topic], now: float) -> None:
        fleets = {one: topic.collected for one, topic in topics.items() if isinstance(topic.collected, Fleet)}
        others = {one: topic.collected for one, topic in topics.items() if not isinstance(topic.collected, Fleet)}
        with self._lock:
            frames, self._inbox, self._inbox_bytes = self._inbox, [], 0
            overflow, self._overflow = self._overflow, False
        if overflow:
            self._lag_all(topics)
        if any(one.projects is not None for one in topics):
            self._projects.learn({*(one.run for one in frames), *(one.run for one in list(self._notices))}, now)
        for stored in () if overflow else frames:
            if others:
                self._dirty.add(stored.run)
                self._urgent = self._urgent or any(event.kind == "state" for event in stored.events)
            if fleets:
                self._moved[stored.run] = None
            for subscription, one in others.items():
                if self._projects.sees(subscription, stored.run):
                    one.add(stored, now)
            for subscription, fleet in fleets.items():
                if self._projects.sees(subscription, stored.run):
                    fleet.add(stored)
        self._send_collected(others, now)
        self._send_notices(fleets, others)
        self._hand_over()  # before the database is read, which takes longer
        if self._dirty and (self._urgent or now - self._runs_read >= _RUN_EVERY_S):
            self._send_runs(others, now)
        if self._moved and now - self._fleet_told >= _FLEET_EVERY_S:
            self._send_fleet(fleets, now)

    def _send_collected(self, others: Mapping[Subscription, Samples | Bands], now: float) -> None:
        for subscription, collected in others.items():
            message = collected.take(now)
            if message is not None:
                self._outbox.append((subscription, message))

    def _send_notices(
        self, fleets: Mapping[Subscription, Fleet], others: Mapping[Subscription, Samples | Bands]
    ) -> None:
        while self._notices:
            notice = self._notices.popleft()
            if notice.is_over:
                for collected in others.values():
                    collected.end(notice.run)
            if notice.of_run and fleets:
                self._moved[notice.run] = None  # fleets are told once a second, however many runs change at once
            for subscription in others if notice.of_run else (*others, *fleets):
                if notice.message is not None and self._wants(subscription, notice.run):
                    self._outbox.append((subscription, notice.message))

    def _send_runs(self, others: Mapping[Subscription, Samples | Bands], now: float) -> None:
        runs, self._dirty, self._urgent, self._runs_read = sorted(self._dirty), set(), False, now
        wanted = [run for run in runs if any(self._wants(subscription, run) for subscription in others)]
        if self._summaries is None or not wanted:
            return
        over = set(wanted)  # what is not found was deleted
        for summary in self._summaries(wanted):
            if summary.state in _MOVING:
                over.discard(summary.run)
            message = to_json({"run": summary})
            self._outbox += [(one, message) for one in others if self._wants(one, summary.run)]
        for run in over:
            for collected in others.values():
                collected.end(run)

    def _send_fleet(self, fleets: Mapping[Subscription, Fleet], now: float) -> None:
        self._fleet_told = now
        runs = list(self._moved)[:_FLEET_RUNS]
        for run in runs:
            del self._moved[run]
        if self._rows is None or not fleets:
            return
        rows = self._rows(runs)
        for subscription, fleet in fleets.items():
            seen = [run for run in runs if self._projects.sees(subscription, run)]
            if seen:
                self._outbox.append((subscription, fleet.message(seen, rows)))

    def _wants(self, subscription: Subscription, run: str) -> bool:
        return subscription.wants_run(run) and self._projects.sees(subscription, run)

    def _lag_all(self, topics: Mapping[Subscription, _Topic]) -> None:
        for subscription, topic in topics.items():
            if isinstance(topic.collected, Fleet):
                topic.collected.tell_all()
            else:
                topic.collected.clear()
            self._outbox.append((subscription, LAGGED))


def _topic(subscription: Subscription) -> _Topic:
    if subscription.fleet:
        return _Topic(Fleet(subscription))
    return _Topic(Bands(subscription) if subscription.bands else Samples(subscription))
