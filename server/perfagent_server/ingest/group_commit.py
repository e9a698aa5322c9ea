"""Stores decoded frames and returns receipts: everyone who sends at the same time shares one transaction, and is
answered after COMMIT.

The event loop puts frames down and goes on; the writer thread picks up all that lie there, stores them with one call of
the store, commits, notifies the readers behind the ack, and wakes the senders with one call per event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from perfagent.wire import Frame
from perfagent_server.database import QueueFull, StorageError
from perfagent_server.ingest.fair_queue import FairQueue
from perfagent_server.store.interface import Batch, MetricStore, Receipt
from perfagent_server.store.stored import Stored

__all__ = ["Ingest"]

MAX_WAITING_FRAMES = 20_000
MAX_WAITING_BYTES = 256 * 2**20  # of samples
_SHARE_OF_RUN = 4  # of what may wait, one run may fill a quarter
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Delivery:
    """Frames that are acknowledged together, and who waits for it: a coroutine of `loop`, or a thread."""

    frames: Sequence[Frame]
    future: asyncio.Future[list[Receipt]] | Future[list[Receipt]]
    loop: asyncio.AbstractEventLoop | None
    limited: bool = False
    """Their key may send to one project only."""
    size: int = 0
    """Bytes of samples."""
    outcome: list[Receipt] | Exception = field(default_factory=list)

    @property
    def run(self) -> str:
        """Whose turn it is; a request of POST /log may have more than one."""
        return self.frames[0].run if self.frames else ""

    @property
    def count(self) -> int:
        return len(self.frames)

    def resolve(self) -> None:
        if self.future.done():  # the request was cancelled meanwhile; its frames are stored all the same
            return
        if isinstance(self.outcome, Exception):
            self.future.set_exception(self.outcome)
        else:
            self.future.set_result(self.outcome)


class Ingest:
    """`on_commit`: called on the writer thread after each commit with what was stored; must be quick. `counters`: for
    /self. is_behind: whether what reads behind the ack cannot keep up; then senders have to wait."""

    def __init__(
        self,
        store: MetricStore,
        *,
        clock: Callable[[], float] = time.time,
        max_waiting: int = MAX_WAITING_FRAMES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        self.on_commit: list[Callable[[list[Stored]], None]] = []
        self.counters = {
            "frames": 0,
            "samples": 0,
            "duplicate_samples": 0,
            "rejected_samples": 0,
            "rejected_events": 0,
            "refused_frames": 0,
            "commits": 0,
        }
        self._store, self._clock = store, clock
        self._max_waiting, self._max_waiting_bytes = max_waiting, max_waiting_bytes
        self.is_behind = is_behind
        self._lock = threading.Lock()
        self._waiting: FairQueue[_Delivery] = FairQueue()

    @property
    def waiting(self) -> int:
        """Frames that wait for the writer."""
        return self._waiting.frames

    async def accept(self, frames: Sequence[Frame], *, limited: bool = False) -> list[Receipt]:
        """Stores the frames and answers after the commit. Raises QueueFull or StorageFull if that is not possible now.
        limited:
        whether their key may send to their project only."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Receipt]] = loop.create_future()
        self._put(_Delivery(frames, future, loop, limited))
        return await future

    def accept_and_wait(self, frames: Sequence[Frame]) -> list[Receipt]:
        """accept() for a thread."""
        future: Future[list[Receipt]] = Future()
        self._put(_Delivery(frames, future, None))
        return future.result()

    def _put(self, delivery: _Delivery) -> None:
        delivery.size = sum(group.size_bytes for frame in delivery.frames for group in frame.groups)
        with self._lock:
            refusal = self._refusal(delivery)
            if refusal is not None:
                self.counters["refused_frames"] += len(delivery.frames)
                raise QueueFull(refusal)
            first = not self._waiting
            self._waiting.put(delivery)
        if first:  # whoever finds the place empty calls the writer; the others are taken along
            self._call_writer()

    def _refusal(self, delivery: _Delivery) -> str | None:
        """Why these frames cannot wait here; None if they can. One delivery always may, however large."""
        for frames, size, share, whose in (
            (self._waiting.frames, self._waiting.size, 1, ""),
            (*self._waiting.held(delivery.run), _SHARE_OF_RUN, f" of run {delivery.run[:80]!r}"),
        ):
            most, most_bytes = self._max_waiting // share, self._max_waiting_bytes // share
            if frames and frames + delivery.count > most:
                return f"{frames} frames{whose} wait already, {most} are allowed; send again later"
            if frames and size + delivery.size > most_bytes:
                waiting, allowed = size // 2**20, most_bytes // 2**20
                return f"{waiting} MiB of samples{whose} wait already, {allowed} MiB are allowed; send again later"
        if self.is_behind():
            return "the rules are far behind the samples that were sent; send again later"
        return None

    def _call_writer(self, deliveries: list[_Delivery] | None = None) -> None:
        """Has a batch stored: these deliveries, or whatever waits when the writer comes to it."""
        batch = _Batch(self, deliveries)
        try:
            self._store.append(batch.take).add_done_callback(batch.done)
        except QueueFull as error:
            for delivery in self._take_all() if deliveries is None else deliveries:
                delivery.outcome = error
                self._wake([delivery])

    def _take(self) -> list[_Delivery]:
        """What the next transaction stores; calls the writer again for the rest."""
        with self._lock:
            taken = self._waiting.take_batch()
            more = bool(self._waiting)
        if more:
            self._call_writer()
        return taken

    def _take_all(self) -> list[_Delivery]:
        with self._lock:
            return self._waiting.take_all()

    def _committed(self, deliveries: list[_Delivery], stored: list[Stored]) -> None:
        counters = self.counters
        counters["commits"] += 1
        for delivery in deliveries:
            assert not isinstance(delivery.outcome, Exception)
            counters["frames"] += len(delivery.outcome)
            for receipt in delivery.outcome:
                counters["samples"] += receipt.stored
                counters["duplicate_samples"] += receipt.duplicate
                counters["rejected_samples"] += sum(item.count for item in receipt.rejected)
                counters["refused_frames"] += receipt.refused is not None
        if stored:
            for hook in self.on_commit:
                try:
                    hook(stored)
                except Exception:  # noqa: BLE001 - a reader's failure must not cost the sender its ack: the frames are stored
                    _log.exception("a reader behind the ack failed")
        self._wake(deliveries)

    def _wake(self, deliveries: list[_Delivery]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for delivery in deliveries:
            if delivery.loop is None:
                delivery.resolve()
            else:
                by_loop.setdefault(delivery.loop, []).append(delivery)
        for loop, mine in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve_all, mine)
            except RuntimeError:  # the loop is closed: nobody waits any more
                _log.debug("%d senders left before their answer", len(mine))


class _Batch:
    """One call of the store: the deliveries that it took, and what was stored of them."""

    def __init__(self, ingest: Ingest, deliveries: list[_Delivery] | None) -> None:
        self._ingest = ingest
        self._deliveries = deliveries
        self._now = 0.0

    def take(self) -> Batch:
        if self._deliveries is None:  # the store may ask again, after it waited for a lock
            self._deliveries = self._ingest._take()
        self._now = self._ingest._clock()
        limits = [delivery.limited for delivery in self._deliveries for _ in delivery.frames]
        limited = {at for at, is_limited in enumerate(limits) if is_limited}
        return Batch(self._frames(), self._now, limited)

    def done(self, future: Future[list[Receipt]]) -> None:
        """After the commit, or after the store gave up; on the store's thread."""
        error = future.exception()
        if error is None:
            self._share_out(future.result())
            return
        deliveries = self._deliveries if self._deliveries is not None else self._ingest._take_all()
        if not isinstance(error, StorageError) and len(deliveries) > 1:
            _log.warning(
                "a frame could not be stored (%s: %s); storing its neighbors one by one", type(error).__name__, error
            )
            for delivery in deliveries:
                self._ingest._call_writer([delivery])
            return
        for delivery in deliveries:
            delivery.outcome = error if isinstance(error, Exception) else RuntimeError(str(error))
            self._ingest.counters["refused_frames"] += len(delivery.frames)
        self._ingest._wake(deliveries)

    def _frames(self) -> list[Frame]:
        return [frame for delivery in self._deliveries or () for frame in delivery.frames]

    def _share_out(self, receipts: list[Receipt]) -> None:
        """Gives each delivery its receipts, and the readers behind the ack what was stored."""
        at = 0
        for delivery in self._deliveries or ():
            delivery.outcome = receipts[at : at + len(delivery.frames)]
            at += len(delivery.frames)
        stored = [
            Stored(
                receipt.tail_id, frame.run, frame.attempt, frame.rank, frame.source, frame.seq, self._now, frame.groups,
                frame.events,
            )
            for frame, receipt in zip(self._frames(), receipts, strict=True)
            if receipt.tail_id is not None
        ]  # fmt: skip
        self._ingest._committed(self._deliveries or [], stored)


def _resolve_all(deliveries: list[_Delivery]) -> None:
    for delivery in deliveries:
        delivery.resolve()
