"""The loop of the sender thread: what is due at a tick, from the deques to the spool. What becomes of frames is in
exchange.py.

Imported when a sender starts, so that `import perfagent` costs neither this module nor the wire, the spool and the
transport below it.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from perfagent.delivery.columns import DROPPED, Columns
from perfagent.delivery.drain import Collector
from perfagent.delivery.exchange import Exchange, jittered
from perfagent.delivery.row_packing import grouped
from perfagent.delivery.user_messages import Messages
from perfagent.device import listen_here
from perfagent.redaction import redacted
from perfagent.wire import Event

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff, Happened, Mirror
    from perfagent.delivery.spool import Spool
    from perfagent.delivery.transport import Transport

__all__ = ["SendLoop"]

LAST_ROWS_S = 0.25
SYNC_S = 1.0
URGENT = ("alert", "collectives", "command", "finding", "stacks", "state")
CALM_S = 60.0
"""So long a value that was NaN must have been gone to press again. Five frames a second took 0.7 % of the training."""
GONE = (
    "overflows", "dropped", "rejected", "refused_kind", "refused_name", "refused_series", "refused_step",
    "event_overflows", "dropped_events", "rejected_events",
)  # fmt: skip
"""Counters of lost samples and events; their sum is agent/dropped."""
TELL_GONE_S = 1.0


class SendLoop:
    """What the sender's thread does, tick by tick: poll, drain, spool, and have the exchange send what is due."""

    def __init__(self, handoff: Handoff, transport: Transport | None, pause_s: Callable[[int], float] | None) -> None:
        self._handoff, self._clock = handoff, handoff.clock
        self._columns = Columns()
        self._messages = Messages(handoff)
        self.exchange = Exchange(handoff, self._messages, transport, pause_s or jittered())
        self._collector = Collector(handoff, self._columns)
        self._asked_next: list[Happened] = []
        self._pressed_at = -math.inf
        self._next_tick = self._last_sync = 0.0
        self._told_gone = 0
        self._tell_gone_at = 0.0

    @property
    def spool(self) -> Spool:
        """Spool of the source that this process is now."""
        return self.exchange.spool

    def run(self) -> None:
        """Until the sender is closed or disabled."""
        self.begin()
        rung = True  # after an error too: what was to be sent has to be asked for again
        while (wait_s := self.step(rung=rung)) is not None:
            rung = self._handoff.wake.wait(wait_s)

    def begin(self) -> None:
        """Before the first step, and again after an error, which may have been anywhere."""
        self._next_tick = self._clock()
        self.exchange.begin(self._next_tick)
        self._handoff.settled.set()

    def step(self, *, rung: bool) -> float | None:
        """Does what is due. Seconds until the next step; None at the end. rung: somebody asked for it."""
        handoff = self._handoff
        if handoff.disabled:
            return None
        now = self._clock()
        if handoff.closing_at is not None:
            self._finish(now, handoff.closing_at)
            return None
        if now >= self._next_tick:
            self._next_tick = max(self._next_tick + handoff.config.spool_tick_s, now)
            self._tick(now)
        if rung or self.exchange.urgent or handoff.flushes or now >= self.exchange.rest_until:
            self._advance(now)
        handoff.cpu_s = time.thread_time() - handoff.asked_cpu_s + self.exchange.cpu_s
        return self._next_tick - self._clock()

    def _tick(self, now: float) -> None:
        handoff = self._handoff
        if now >= handoff.sources_due:
            self._poll_sources(now)
        asked = [*handoff.flushes]  # before what they ask for is drained: rows of a later one may come too late
        self._drain(now)
        for request in asked:
            request.drained = True
        if now - self._last_sync >= SYNC_S and (self.exchange.failures or handoff.config.record is not None):
            self._last_sync = now
            self.spool.sync()  # while the server takes everything within a second, power loss is its concern

    def _poll_sources(self, now: float) -> None:
        listen_here()  # some ask whether what they measured on a device is there
        sources = self._handoff.sources
        self._handoff.sources_due = math.inf  # first: what becomes due from here on is not overlooked
        for source in [source for source in sources if now >= source.due]:
            if not source.poll(now):
                sources.remove(source)
                self._messages.warn("source", source.name, name=source.name, error=source.error)
        due = min((source.due for source in sources), default=math.inf)
        self._handoff.sources_due = min(self._handoff.sources_due, due)

    def _advance(self, now: float) -> None:
        self.exchange.settle_answers(now)
        self.exchange.poll_identity()
        self._answer_flushes(now)
        self.exchange.advance(now)

    def _answer_flushes(self, now: float) -> None:
        flushes = self._handoff.flushes
        while flushes:
            request, delivered = flushes[0], flushes[0].drained and self.exchange.delivered
            if not delivered and now < request.until:
                if not request.drained:
                    self._drain(now)
                    request.drained = True
                return
            request.delivered = delivered
            flushes.popleft()
            request.done.set()

    # ---- from the deques to the spool

    def _drain(self, now: float, *, last: bool = False) -> None:
        """last: rows that are still on the device are given up."""
        handoff, exchange = self._handoff, self.exchange
        counters = handoff.counters
        if now >= self._tell_gone_at or last:
            self._tell_gone(now)
        packed = self._collector.collect(now, last=last)
        events = self._take_events(last=last) if handoff.events or self._asked_next else []
        if not packed and not events:
            return
        samples = sum(block.samples for block in packed)
        counters["samples"] += samples
        counters["events"] += len(events)
        exchange.urgent = exchange.urgent or (self._collector.pressing and self._is_news(now))
        if self._collector.pressing and handoff.reader.investigator is not None:
            handoff.reader.investigator.pressing(packed)
        try:
            if events:  # of a later attach(), maybe: what it changed has to be on the disk before
                exchange.identify()
            written = self.spool.append(packed, events, now=now)
            self._messages.alarms(events)
        except BaseException:
            counters["dropped"] += samples
            counters["dropped_events"] += len(events)
            raise
        counters["spooled"] += samples if written else 0
        handoff.with_loss = [block for block in packed if "loss" in block.names] or handoff.with_loss
        self._mirror(lambda mirror: mirror.take(grouped(packed), handoff.reader.begins))
        if not written and self.spool.error is not None:
            error, room = self.spool.error, handoff.config.max_memory_bytes >> 20
            self._messages.warn("disk", cause=error.strerror or str(error), room=room)

    def _take_events(self, *, last: bool) -> list[Event]:
        """The data of one that a function gives are asked for in the next drain, when the rows of before are written. What
        happened after it waits as well: an end is reported behind its cause."""
        handoff, events = self._handoff, list[Event]()
        waiting, due, self._asked_next = len(handoff.events), self._asked_next, []
        for _ in range(waiting):  # what comes meanwhile may come faster than this loop ends
            happened = handoff.events.popleft()
            waits = not last and (self._asked_next or callable(happened.data))
            (self._asked_next if waits else due).append(happened)
        for kind, time_, step, monotonic, given in due:
            try:
                found = given() if callable(given) else given
                # a piece of a file, or a picture, that was made for sending (causes/upload.py, media/)
                payload = found.get("payload")
                data = redacted(found)
                if isinstance(payload, bytes):
                    data["payload"] = payload
            except Exception:  # noqa: BLE001 - what a user put into it may raise whatever it likes when it is looked at
                handoff.counters["dropped_events"] += 1
                continue
            events.append(Event(kind=kind, time=time_, step=step, monotonic=monotonic, data=data))
            self.exchange.urgent = self.exchange.urgent or kind in URGENT
        if handoff.counters["event_overflows"]:
            self._messages.warn("event overflow")
        return events

    def _is_news(self, now: float) -> bool:
        """Whether rows that press are sent at once: not while a value stays NaN, which is in the rows of every tick."""
        before, self._pressed_at = self._pressed_at, now
        return now - before > CALM_S

    def _mirror(self, write: Callable[[Mirror], None]) -> None:
        """Has the mirror write, on rank 0; where it cannot, that is logged and was the last time."""
        mirror = self._handoff.mirror
        if mirror is None or self._handoff.identity.rank:
            return
        try:
            write(mirror)
        except Exception as error:  # noqa: BLE001 - it is somebody else's code, on a disk that may be full
            self._handoff.mirror = None
            self._messages.warn("mirror", error=error)

    def _tell_gone(self, now: float) -> None:
        """Hands in how many samples (or whole rows, while they are that) and events will never be stored."""
        self._tell_gone_at = now + TELL_GONE_S
        self._messages.refused(self._columns)
        if self._handoff.counters["overflows"]:
            self._messages.warn("overflow")
        ours, spools = self._handoff.counters, self.spool.counters
        gone = sum(ours[name] for name in GONE) + spools["dropped"] + spools["dropped_events"]
        if gone != self._told_gone:
            self._told_gone = gone
            row = self._collector.newest, time.time(), time.monotonic(), (DROPPED,), (float(gone),)
            self._handoff.rows.append(row)

    # ---- the end

    def _finish(self, now: float, until: float) -> None:
        """The last drain, then as much delivery as the time allows; what is left waits for the next start."""
        handoff, exchange = self._handoff, self.exchange
        for source in handoff.sources:
            source.poll(now)
        self._drain(now)
        # copies from the device take milliseconds
        while self._collector.waits and self._clock() < now + LAST_ROWS_S:
            time.sleep(0.01)
            self._drain(self._clock())
        self._messages.refused(self._columns, last=True)
        self._drain(self._clock(), last=True)
        self._mirror(lambda mirror: mirror.close())
        if handoff.config.record is not None:
            exchange.poll_identity()
            exchange.identify()
            self.spool.hold(now=now, force=True)
        else:
            exchange.retry_now()
            failures = exchange.failures
            while self._clock() < until - 0.05:
                now = self._clock()
                self._advance(now)
                # all is there, or it was tried in vain
                if (exchange.delivered and exchange.moves.left is None) or exchange.failures > failures:
                    break
                handoff.wake.wait(min(0.05, max(0.001, until - now)))
        self._close_spool()
        exchange.close()
        for request in handoff.flushes:
            request.done.set()

    def _close_spool(self) -> None:
        handoff, spool, watched = self._handoff, self.spool, _watched()
        if self.exchange.delivered and not handoff.counters["quarantined_frames"] and not watched:
            spool.remove()
            return
        before, size = Counter(spool.counters), spool.on_disk
        left = spool.waiting if handoff.config.record is None else 0
        spool.header.followed = str(handoff.followed) if handoff.followed is not None else None
        spool.close(final=handoff.final)
        gone = spool.counters - before
        if gone["dropped"] or gone["dropped_events"]:
            self._messages.lost(gone["dropped"], gone["dropped_events"])
        elif left and (self.exchange.failures or not watched):  # the watcher goes on where it was only a matter of time
            self._messages.left(left, size, by_next_run=bool(spool.header.run))


def _watched() -> bool:
    """Under `perfagent run` the watcher has the last word on the end; it finds the folder and removes it."""
    options = sys.modules.get("perfagent.process.launch_options")
    return options is not None and options.current is not None and bool(options.current.watched)
