"""Live updates: sends what was just committed to every page that wants it, at most ten messages a second each.

`publish*` are called by the ingest writer and the rules engine on their own threads: they append to a bounded inbox and
return; nothing in here can raise into them or make them wait. One task on the event loop turns the inbox into messages
ten times a second. Pages with the same subscription share the work and the bytes, so that the two hundredth page costs
a send and no more. A page that reads too slowly loses its queue and gets {"lagged": true}: it then fetches again what
it shows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.websockets import WebSocket, WebSocketDisconnect

from perfagent.wire import FAMILIES, Alert, Group, RunSummary, metric, plain, to_json, whole_of

if TYPE_CHECKING:
    from perfagent_server.store.stored import Stored

__all__ = ["Hub", "Subscription"]

log = logging.getLogger("perfagent.server")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TICK_S = 0.1  # one message of samples per tick and page
_INBOX_FRAMES = 4096
_QUEUE_BYTES = 2**20  # per page; a page that is this far behind fetches anew anyway
_QUEUE_MESSAGES = 64
_SAMPLES_PER_MESSAGE = 50_000  # more than that in a tick is no live update but a back-fill: the page fetches it
_RANK_GRACE_S = 2.0  # how long a step waits for its slowest rank before the band goes on without it
_FIRST_GRACE_S = 1.5  # how long a new band waits to learn which ranks there are
_RUN_EVERY_S = 1.0
_MAX_SUBSCRIBED = 4096
_ALLOWED_EVERY_S = 10.0  # how long a page goes on whose key expired, or was revoked by another process
_REFUSED = 1008  # a WebSocket's code for "against the policy"


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a page wants. runs, names: empty is all; a name that ends in "*" is a prefix. bands: over ranks instead of
    samples."""

    runs: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    bands: bool = False

    @classmethod
    def from_message(cls, message: object) -> Subscription:
        """From {"subscribe": {"runs": [...], "names": [...], "bands": bool}}. Raises ValueError with a sentence."""
        wanted = message.get("subscribe") if isinstance(message, dict) else None
        if not isinstance(wanted, dict):
            raise ValueError('send {"subscribe": {"runs": [...], "names": [...], "bands": true|false}}')
        return cls(_texts(wanted, "runs"), _texts(wanted, "names"), wanted.get("bands") is True)

    def wants_run(self, run: str) -> bool:
        return not self.runs or run in self.runs

    def wants_name(self, name: str) -> bool:
        """All names are all but those of layers, which are many: a page asks for them by name or prefix."""
        if name in self.names:
            return True
        if not self.names:
            return name.partition("/")[0] + "/" not in FAMILIES
        return any(name.startswith(prefix[:-1]) for prefix in self.names if prefix.endswith("*"))


def _texts(wanted: dict[str, Any], key: str) -> frozenset[str]:
    texts = wanted.get(key, [])
    if texts == "*":
        return frozenset()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'"{key}" must be a list of texts; an empty list, or "*", is all of them')
    if len(texts) > _MAX_SUBSCRIBED:
        raise ValueError(
            f'"{key}" has {len(texts)} entries; at most {_MAX_SUBSCRIBED} are allowed, and an empty list is all of them'
        )
    return frozenset() if "*" in texts else frozenset(texts)


class _Page:
    """One connected page: its queue of encoded messages, bounded by bytes."""

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self.queue: deque[bytes] = deque()
        self.bytes = 0
        self.ready = asyncio.Event()
        self.doubted = asyncio.Event()  # whether it may go on is to be asked now

    def put(self, message: bytes) -> int:
        """Queues a message; how many older ones had to go for it."""
        dropped = 0
        if self.bytes + len(message) > _QUEUE_BYTES or len(self.queue) >= _QUEUE_MESSAGES:
            dropped = len(self.queue)
            self.queue.clear()
            self.queue.append(_LAGGED)
            self.bytes = len(_LAGGED)
        self.queue.append(message)
        self.bytes += len(message)
        self.ready.set()
        return dropped

    def take(self) -> bytes:
        message = self.queue.popleft()
        self.bytes -= len(message)
        if not self.queue:
            self.ready.clear()
        return message


_LAGGED = b'{"lagged":true}'


class _Band:
    """One name of one run over its ranks. A step leaves once every rank that reports has passed it.

    of_parts: what ranks send are parts of the value: then every rank that ever reported is waited for.
    """

    def __init__(self, now: float, *, of_parts: bool = False) -> None:
        self.born = now
        self.of_parts = of_parts
        self.attempt = 0
        self.sent_step = -1
        self.reached: dict[int, tuple[int, float]] = {}  # rank -> (its last step, when it reported)
        self.pieces: list[tuple[Ints, Floats, Floats]] = []

    def add(self, attempt: int, rank: int, steps: Ints, times: Floats, values: Floats, now: float) -> None:
        if attempt < self.attempt:
            return
        if attempt > self.attempt:  # a resumed run may begin at an earlier step
            self.attempt, self.sent_step, self.pieces, self.reached = attempt, -1, [], {}
        self.reached[rank] = (max(int(steps[-1]), self.reached.get(rank, (-1, 0.0))[0]), now)
        self.pieces.append((steps, times, values))

    def take(self, name: str, now: float) -> dict[str, Any] | None:
        """The steps that are complete, or None."""
        if not self.pieces or now - self.born < _FIRST_GRACE_S:
            return None
        current = [step for step, seen in self.reached.values() if self.of_parts or now - seen < _RANK_GRACE_S]
        limit = min(current) if current else max(step for step, _ in self.reached.values())
        steps, times, values = (np.concatenate(parts) for parts in zip(*self.pieces, strict=True))
        fresh = steps > self.sent_step
        leaving = fresh & (steps <= limit)
        staying = fresh & ~leaving
        self.pieces = [(steps[staying], times[staying], values[staying])] if staying.any() else []
        if not leaving.any():
            return None
        self.sent_step = limit
        steps, times, values = steps[leaving], times[leaving], values[leaving]
        return (
            _over_parts(steps, times, values, len(current))
            if self.of_parts
            else _over_ranks(name, steps, times, values)
        )


def _over_ranks(name: str, steps: Ints, times: Floats, values: Floats) -> dict[str, Any]:
    """Per step: min and max over ranks, "mean" as the catalogue puts ranks together; NaN where no rank has a finite
    value."""
    order = np.argsort(steps, kind="stable")
    steps, times, values = steps[order], times[order], values[order]
    unique, starts = np.unique(steps, return_index=True)
    finite = np.isfinite(values)
    count = np.add.reduceat(finite, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    none = count == 0
    low[none] = high[none] = np.nan
    over = metric(name).over_ranks
    middle = {"sum": total, "max": high, "min": low}.get(over)
    if middle is None:
        middle = total / np.maximum(count, 1)
    middle = np.where(none, np.nan, middle)
    rows = np.diff(np.append(starts, len(steps)))
    return {
        "step": unique.tolist(), "time": np.maximum.reduceat(times, starts).tolist(), "min": _numbers(low), "max": _numbers(high),
        "mean": _numbers(middle), "count": rows.tolist(), "nonfinite": (rows - count).tolist(),
    }  # fmt: skip


def _over_parts(steps: Ints, times: Floats, values: Floats, ranks: int) -> dict[str, Any] | None:
    """Per step: the root of the sum of what all ranks sent of it; steps that some rank has not sent are left out."""
    unique, index, rows = np.unique(steps, return_inverse=True, return_counts=True)
    with np.errstate(over="ignore"):
        root = np.sqrt(np.bincount(index, values))
    finite = np.isfinite(root)
    keep = (rows >= ranks) | ~finite
    if not keep.any():
        return None
    time = np.full(len(unique), -np.inf)
    np.maximum.at(time, index, times)
    shown = _numbers(np.where(finite, root, np.nan)[keep])
    return {
        "step": unique[keep].tolist(), "time": time[keep].tolist(), "min": shown, "max": shown, "mean": shown,
        "count": [1] * len(shown), "nonfinite": (~finite[keep]).astype(int).tolist(),
    }  # fmt: skip


def _numbers(values: Floats) -> list[Any]:
    """A list for JSON. Checked as a whole first: nearly always every value is finite."""
    listed: list[Any] = values.tolist()
    return listed if bool(np.isfinite(values).all()) else [plain(value) for value in listed]


@dataclass(slots=True)
class _Topic:
    """All pages with one subscription, and what is collected for their next message."""

    pages: set[_Page] = field(default_factory=set)
    samples: dict[tuple[str, int, str], list[tuple[Ints, Floats, Floats]]] = field(default_factory=dict)
    bands: dict[tuple[str, str], _Band] = field(default_factory=dict)
    count: int = 0


class Hub:
    """The meeting point of what is committed and who watches.

    summaries: reads the current RunSummary of some runs; called on a worker thread, at most once a second and only
    while somebody watches. None in tests of the hub alone.
    """

    def __init__(
        self,
        summaries: Callable[[Sequence[str]], Iterable[RunSummary]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._summaries, self._clock = summaries, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._pump_task: asyncio.Task[None] | None = None
        self._inbox: deque[Stored] = deque()
        self._notices: deque[tuple[str, bytes]] = deque(maxlen=1024)  # (run, message): alerts and runs
        self._topics: dict[Subscription, _Topic] = {}
        self._pages: set[_Page] = set()
        self._overflow = False
        self._dirty: set[str] = set()
        self._urgent = False
        self._runs_read = 0.0
        self.counters = {
            "pages": 0,
            "messages": 0,
            "bytes": 0,
            "dropped_messages": 0,
            "lagged": 0,
            "inbox_overflows": 0,
            "errors": 0,
        }

    def watches(self, run: str) -> bool:
        """Whether any page shows live updates of this run. On the loop's thread."""
        return any(subscription.wants_run(run) for subscription in self._topics)

    # --- called from other threads: append and return -----------------------------------------------------------------

    def publish(self, stored: list[Stored]) -> None:
        """Frames that were just committed."""
        if not self._pages:
            return
        if len(self._inbox) + len(stored) > _INBOX_FRAMES:
            self._overflow = True
            self.counters["inbox_overflows"] += 1
        else:
            self._inbox.extend(stored)
        self._nudge()

    def publish_alert(self, alert: Alert) -> None:
        """An alert that fired, changed or was resolved."""
        self._notice("alert", alert.run, alert)

    def publish_run(self, run: RunSummary) -> None:
        """A run whose state or description changed."""
        self._notice("run", run.run, run)

    def _notice(self, kind: str, run: str, value: Alert | RunSummary) -> None:
        if not self._pages:
            return
        try:
            self._notices.append((run, to_json({kind: value})))
        except Exception:
            # The callers are the ingest writer and the rules engine: a page's update must not cost them a commit.
            self.counters["errors"] += 1
            log.exception("an update of run %s could not be encoded", run)
            return
        self._nudge()

    def _nudge(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is None or wake is None:
            return
        try:
            loop.call_soon_threadsafe(wake.set)
        except RuntimeError:
            return  # the loop has ended: nobody watches any more

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._pump_task = asyncio.create_task(self._pump(), name="live hub")

    async def stop(self) -> None:
        """Ends the pump and lets every open page go."""
        if self._pump_task is not None:
            self._pump_task.cancel()
            await asyncio.gather(self._pump_task, return_exceptions=True)
        self._loop = None

    # --- one page -----------------------------------------------------------------------------------------------------

    async def serve(self, socket: WebSocket, allowed: Callable[[], bool]) -> None:
        """Serves an accepted WebSocket until it closes. allowed: whether it may go on; asked now and then, on another
        thread."""
        page = _Page()
        self._pages.add(page)
        self.counters["pages"] = len(self._pages)
        writer = asyncio.create_task(self._write(page, socket), name="live page")
        reader = asyncio.create_task(self._read(page, socket), name="live page's subscriptions")
        doubter = asyncio.create_task(_until_refused(page, allowed), name="live page's right")
        try:
            await asyncio.wait((reader, doubter), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            else:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                with suppress(WebSocketDisconnect, RuntimeError, OSError):  # it was gone already
                    await socket.close(_REFUSED, "the key or session that opened this page is no longer valid")
        finally:
            self._leave(page)
            self._pages.discard(page)
            self.counters["pages"] = len(self._pages)
            for task in (writer, reader, doubter):
                task.cancel()

    def check_pages(self) -> None:
        """A key or a session has ended: every page is asked now whether it may go on. From any thread."""

        def doubt() -> None:
            for page in self._pages:
                page.doubted.set()

        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: nobody watches any more
                self._loop.call_soon_threadsafe(doubt)

    async def _read(self, page: _Page, socket: WebSocket) -> None:
        while True:
            try:
                message = await socket.receive()
            except (WebSocketDisconnect, RuntimeError):
                return
            if message["type"] == "websocket.disconnect":
                return
            raw = message.get("text") or message.get("bytes") or b""
            try:
                subscription = Subscription.from_message(msgspec.json.decode(raw))
            except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                page.put(to_json({"error": {"code": "bad_request", "message": str(error)}}))
                continue
            self._leave(page)
            page.subscription = subscription
            self._topics.setdefault(subscription, _Topic()).pages.add(page)
            page.put(b'{"subscribed":true}')

    def _leave(self, page: _Page) -> None:
        if page.subscription is not None:
            topic = self._topics[page.subscription]
            topic.pages.discard(page)
            if not topic.pages:
                del self._topics[page.subscription]
            page.subscription = None

    async def _write(self, page: _Page, socket: WebSocket) -> None:
        last = -_TICK_S
        loop = asyncio.get_running_loop()
        while True:
            await page.ready.wait()
            pause = last + _TICK_S - loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
            message = page.take()
            last = loop.time()
            try:
                await socket.send_text(message.decode())
            except (WebSocketDisconnect, RuntimeError, OSError):
                return  # the reader sees the same end
            self.counters["messages"] += 1
            self.counters["bytes"] += len(message)

    # --- the pump -----------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        assert self._wake is not None
        while True:
            waiting = any(band.pieces for topic in self._topics.values() for band in topic.bands.values()) or bool(
                self._dirty
            )
            if not waiting:  # else steps wait for a slow rank, or runs for their second: look again at this tick
                await self._wake.wait()
            self._wake.clear()
            try:
                await self._turn()
            except Exception:
                # One odd frame must not end live updates for everybody; the page sees the gap as a lag and fetches
                # again.
                self.counters["errors"] += 1
                log.exception("live updates failed once")
                self._lag_all()
            await asyncio.sleep(_TICK_S)

    async def _turn(self) -> None:
        now = self._clock()
        if self._overflow:
            self._overflow = False
            self._inbox.clear()
            self._lag_all()
        while self._inbox:
            self._collect(self._inbox.popleft(), now)
        for subscription, topic in list(self._topics.items()):
            message = self._message(topic, subscription, now)
            if message is not None:
                self._send(topic.pages, message)
        while self._notices:
            run, message = self._notices.popleft()
            for subscription, topic in self._topics.items():
                if subscription.wants_run(run):
                    self._send(topic.pages, message)
        if self._dirty and (self._urgent or now - self._runs_read >= _RUN_EVERY_S):
            await self._send_runs(now)

    def _collect(self, stored: Stored, now: float) -> None:
        self._dirty.add(stored.run)
        if any(event.kind == "state" for event in stored.events):
            self._urgent = True
        for subscription, topic in self._topics.items():
            if not subscription.wants_run(stored.run):
                continue
            for group in stored.groups:
                names = [name for name in group.values if subscription.wants_name(name)]
                wholes = [
                    (name, whole)
                    for name in group.values
                    if (whole := whole_of(name)) and subscription.wants_name(whole)
                ]
                if not (names or wholes) or not group.rows:
                    continue
                steps, times = np.frombuffer(group.step, "<i8"), np.frombuffer(group.time, "<f8")
                for name in names:
                    values = _column(group, name)
                    if subscription.bands:
                        band = topic.bands.get((stored.run, name))
                        if band is None:
                            band = topic.bands[stored.run, name] = _Band(now)
                        band.add(stored.attempt, stored.rank, steps, times, values, now)
                    else:
                        topic.samples.setdefault((stored.run, stored.rank, name), []).append((steps, times, values))
                        topic.count += len(steps)
                for name, whole in wholes if subscription.bands else ():
                    band = topic.bands.get((stored.run, whole))
                    if band is None:
                        band = topic.bands[stored.run, whole] = _Band(now, of_parts=True)
                    if band.of_parts:
                        band.add(stored.attempt, stored.rank, steps, times, _column(group, name), now)

    def _message(self, topic: _Topic, subscription: Subscription, now: float) -> bytes | None:
        """What the topic collected since its last message."""
        if subscription.bands:
            bands = []
            for (run, name), band in topic.bands.items():
                ready = band.take(name, now)
                if ready is not None:
                    bands.append({"run": run, "name": name, **ready})
            if sum(len(band["step"]) for band in bands) > _SAMPLES_PER_MESSAGE:
                self.counters["lagged"] += len(topic.pages)
                return _LAGGED
            return msgspec.json.encode({"bands": bands}) if bands else None
        if not topic.samples:
            return None
        collected, count = topic.samples, topic.count
        topic.samples, topic.count = {}, 0
        if count > _SAMPLES_PER_MESSAGE:
            self.counters["lagged"] += len(topic.pages)
            return _LAGGED
        samples = []
        for (run, rank, name), pieces in collected.items():
            steps, times, values = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
            samples.append(
                {
                    "run": run,
                    "rank": rank,
                    "name": name,
                    "step": steps.tolist(),
                    "time": _numbers(times),
                    "value": _numbers(values),
                }
            )
        return msgspec.json.encode({"samples": samples})

    async def _send_runs(self, now: float) -> None:
        runs, self._dirty, self._urgent, self._runs_read = sorted(self._dirty), set(), False, now
        if self._summaries is None or not self._topics:
            return
        wanted = [run for run in runs if any(subscription.wants_run(run) for subscription in self._topics)]
        if not wanted:
            return
        for summary in await asyncio.to_thread(self._summaries, wanted):
            message = to_json({"run": summary})
            for subscription, topic in self._topics.items():
                if subscription.wants_run(summary.run):
                    self._send(topic.pages, message)

    def _send(self, pages: Iterable[_Page], message: bytes) -> None:
        for page in pages:
            dropped = page.put(message)
            if dropped:
                self.counters["dropped_messages"] += dropped
                self.counters["lagged"] += 1

    def _lag_all(self) -> None:
        for topic in self._topics.values():
            topic.samples, topic.count, topic.bands = {}, 0, {}
            self.counters["lagged"] += len(topic.pages)
            self._send(topic.pages, _LAGGED)


async def _until_refused(page: _Page, allowed: Callable[[], bool]) -> None:
    """Returns when the page may not go on. A question that fails (a busy database) is asked again."""
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(page.doubted.wait(), _ALLOWED_EVERY_S)
        page.doubted.clear()
        try:
            if not await asyncio.to_thread(allowed):
                return
        except Exception:
            log.exception("whether a live page may go on could not be asked")


def _column(group: Group, name: str) -> Floats:
    raw = group.values[name]
    return np.frombuffer(raw, "<f8" if len(raw) == 8 * group.rows else "<f4").astype(np.float64)
