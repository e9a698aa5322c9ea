"""The loop of the sender thread: decides when to spool, what to send, and what an answer means.

Imported when a sender starts, so that `import perfagent` costs neither this module nor the wire, the spool and the
transport below it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from perfagent.delivery.columns import DROPPED, Columns, merge
from perfagent.delivery.courier import Courier, Job
from perfagent.delivery.drafts import Draft, pieces, read
from perfagent.delivery.drain import Collector, Taken
from perfagent.delivery.moves import Moves
from perfagent.delivery.orphans import Orphans
from perfagent.delivery.spool import Header, Outgoing, Spool
from perfagent.delivery.transport import Answer, HttpTransport, packed
from perfagent.delivery.user_messages import Messages
from perfagent.delivery.wakeup import give_way
from perfagent.device import listen_here
from perfagent.errors import WireError
from perfagent.process.pids import machine, process_start
from perfagent.redaction import redacted, redacted_text
from perfagent.wire import Event, Group, encode

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff, Mirror
    from perfagent.delivery.transport import Transport
    from perfagent.identity import Identity

__all__ = ["SendLoop", "jittered"]

HEARTBEAT_S = 5.0
LAST_ROWS_S = 0.25
UNWATCHED = 3
"""So much rarer are frames while no page shows the run. What is urgent, and what a page's visitor finds, is as new as
ever."""
REST_S = 1.0
"""While all is well: how long it is not asked whether something is to be sent, unless somebody rings."""
READ_S = 4.0
MOST_DRAFTED = 4096
"""Notes of one tick that are written down as they were noted; more become columns at once."""
URGENT = ("alert", "collectives", "command", "finding", "stacks", "state")
FIRST_PAUSE_S, CALM_S = 0.25, 60.0
"""How long a value that stays NaN does not press again, at first and at most. Five frames a second took 0.7 % of the
training's time."""
GONE = (
    "overflows", "dropped", "lost_samples", "rejected", "refused_kind", "refused_name", "refused_series", "refused_step",
    "event_overflows", "dropped_events", "rejected_events",
)  # fmt: skip
"""Counters of what was handed in and is not stored; their sum is the series agent/dropped."""
TELL_GONE_S = 1.0
COMMAND_ERRORS = 3
MOST_LEFT_BEHIND = 4
"""Threads that hang in a call which nobody can end. With so many a request that hangs is waited for, as long as it may
take."""


class SendLoop:
    """What the sender's thread does, tick by tick: drain, spool, cut frames, hand them to the courier, settle its
    answers."""

    def __init__(self, sender: Handoff, transport: Transport | None) -> None:
        self.sender = sender
        config = sender.config
        self._columns = Columns()
        self._transport = transport
        self._clock = sender.clock
        self._pause_s = sender.pause_s if sender.pause_s is not None else jittered()
        self.spool = self._new_spool()
        identity, records = sender.identity, config.record is not None
        self._moves = Moves(identity.run if identity.shared and not records else None)
        self._messages = Messages(sender)
        self._collector = Collector(sender, self._columns, self.spool.read_drafts, self._lost)
        self._newest_event = self._taken_events = 0
        self._events_full = False
        """Whether there was room for no more events when they were taken last."""
        self._all_written = True
        """Whether the disk took every draft since the last time they were read."""
        self._courier: Courier | None = None
        self._left_behind: list[Courier] = []
        self.orphans = Orphans(config.state_dir / "spool", sender.folder, config.server)
        self.busy: Job | None = None
        """The request that is on its way."""
        self._urgent = False
        self._pressed_at = self._press_due = -math.inf
        self._press_pause = 0.0
        self._watched = True
        self._identified = False
        self._failures = 0
        self._retry_at = 0.0
        self._last_cut = 0.0
        self._rest_until = 0.0
        """Nothing is to be sent before, unless somebody rings."""
        self._next_tick = self._last_sent = 0.0
        self._last_sync = self._last_read = 0.0
        self._courier_at = 0.0
        self._told_gone = 0
        self._tell_gone_at = 0.0
        self._command_errors: Counter[int] = Counter()

    def _new_spool(self) -> Spool:
        config, identity = self.sender.config, self.sender.identity
        name, project = _called(identity)
        return Spool(
            self.sender.folder,
            Header(
                source=identity.source,
                project=project,
                rank=identity.rank,
                server=None if config.record is not None else config.server,
                is_found=not config.is_server_given,
                run=identity.run if identity.known else None,
                attempt=identity.attempt,
                name=name,
                pid=os.getpid(),
                pid_start=process_start(os.getpid()),
                machine=machine(),
                started=time.time(),
            ),
            max_bytes=config.max_spool_bytes,
            max_memory_bytes=config.max_memory_bytes,
            recording=config.record is not None,
            read=self._read,
            clock=self._clock,
        )

    def forked(self) -> None:
        """In a forked child: lets go of files and socket without a word."""
        self.spool.forked()
        if self._moves.left is not None:
            self._moves.left.forked()
        if self._transport is not None:
            self._transport.abandon()

    def run(self) -> None:
        """Until the sender is closed or disabled."""
        self.begin()
        rung = True  # after an error too: what was to be sent has to be asked for again
        while (wait_s := self.step(rung=rung)) is not None:
            rung = self.sender.wake.wait(wait_s)

    def begin(self) -> None:
        """Before the first step, and again after an error, which may have been anywhere."""
        self.busy = None  # what was on its way is still in the spool
        if self.sender.config.record is None:
            self.spool.create()
        self.sender.settled.set()
        self._next_tick = self._last_sent = self._clock()

    def step(self, *, rung: bool) -> float | None:
        """Does what is due. Seconds until the next step; None when the sender is closed or disabled. rung: somebody
        asked for it."""
        if self.sender.disabled:
            return None
        now = self._clock()
        if self.sender.closing_at is not None:
            self._finish(now)
            return None
        if now >= self._next_tick:
            self._next_tick = max(self._next_tick + self.sender.config.spool_tick_s, now)
            self._tick(now)
        if rung or self._urgent or self.sender.flushes or now >= self._rest_until:
            self._advance(now)
        own_s = time.thread_time() - self.sender.asked_cpu_s
        self.sender.cpu_s = own_s + (self._courier.cpu_s if self._courier is not None else 0.0)
        return self._next_tick - self._clock()

    def _tick(self, now: float) -> None:
        if now >= self.sender.sources_due:
            self._poll_sources(now)
        asked = [*self.sender.flushes]  # before what they ask for is drained: rows of a later one may come too late
        self._drain(now)
        if now - self._last_read >= READ_S:
            self.spool.read_drafts()  # no frame was cut meanwhile, and drafts take more memory than columns
        for request in asked:
            request.drained = True
        if now - self._last_sync >= 1.0 and (self._failures or self.sender.config.record is not None):
            self._last_sync = now
            self.spool.sync()  # while the server takes everything within a second, power loss is its concern

    def _poll_sources(self, now: float) -> None:
        listen_here()  # some ask whether what they measured on a device is there
        sources = self.sender.sources
        self.sender.sources_due = math.inf  # first: what becomes due from here on is not overlooked
        for source in [source for source in sources if now >= source.due]:
            if not source.poll_if_due(now):
                sources.remove(source)
                self._messages.warn("source", source.name, name=source.name, error=source.error)
        due = min((source.due for source in sources), default=math.inf)
        self.sender.sources_due = min(self.sender.sources_due, due)

    def _drain(self, now: float, *, last: bool = False) -> None:
        """last: rows that are still on the device are given up."""
        if now >= self._tell_gone_at or last:
            self._tell_gone(now)
        taken = self._collector.collect(now, last=last)
        if self.sender.counters["overflows"]:
            self._messages.warn("overflow")
        events: list[Event] = []
        waiting = len(self.sender.events)
        for _ in range(waiting):  # what comes meanwhile may come faster than this loop ends
            event = self.sender.events.popleft()._asdict()
            self._newest_event = max(self._newest_event, event.pop("number"))
            self._taken_events += 1
            try:
                # a piece of a file, or a picture, that was made for sending (rootcause/upload.py, media/)
                payload = event["data"].get("payload")
                event["data"] = redacted(event["data"])
                if isinstance(payload, bytes):
                    event["data"]["payload"] = payload
            except Exception:  # noqa: BLE001 - what a user put into it may raise whatever it likes when it is looked at
                self.sender.counters["dropped_events"] += 1
                continue
            events.append(Event(**event))
            self._urgent = self._urgent or event["kind"] in URGENT
        self._count_overflow(full=waiting == self.sender.events.maxlen)
        if not taken.total and not events:
            return
        self.sender.counters["rows"] += taken.total
        self.sender.counters["events"] += len(events)
        self._urgent = self._urgent or (self._collector.pressing and self._is_news(now))
        if self._collector.pressing and self.sender.reader.investigator is not None:
            self.sender.reader.investigator.pressing(taken)
        try:
            if events:  # of a later attach(), maybe: what it changed has to be on the disk before
                self._identify()
            written = self._write(taken, events, now)
            self._messages.alarms(events)
        except BaseException:
            lost = self._read([Draft([], taken.rows, taken.packed)])
            self.sender.counters["lost_samples"] += sum(group.samples for group in lost)
            self.sender.counters["dropped_events"] += len(events)
            raise
        if not written and self.spool.error is not None:
            self._all_written = False
            error, room = self.spool.error, self.sender.config.max_memory_bytes >> 20
            self._messages.warn("disk", cause=error.strerror or str(error), room=room)

    def _is_news(self, now: float) -> bool:
        """Whether rows that press are sent at once. A value that stays NaN is in the rows of every tick: it presses less
        and less often, until it was gone for a while."""
        if now - self._pressed_at > CALM_S:
            self._press_pause = 0.0
        self._pressed_at = now
        if now < self._press_due:
            return False
        self._press_pause = min(max(FIRST_PAUSE_S, 2 * self._press_pause), CALM_S)
        self._press_due = now + self._press_pause
        return True

    def _count_overflow(self, *, full: bool) -> None:
        """Events that had to make room for others before they were taken. full: there was no room for more, so that
        there may be some: else one that has its number, and is just being put in, would look like one of them."""
        before, self._events_full = self._events_full, full
        gone = self._newest_event - self._taken_events
        if (full or before) and gone > self.sender.counters["event_overflows"]:
            self.sender.counters["event_overflows"] = gone
            self._messages.warn("event overflow")

    def _write(self, taken: Taken, events: list[Event], now: float) -> bool:
        """One tick. Rows that are plain data wait as a draft until the next frame is cut."""
        draft = Draft(self.sender.reader.context(), taken.rows, taken.packed)
        drafted = written = True
        if (taken.rows or taken.packed) and (drafted := len(taken.rows) <= MOST_DRAFTED):
            try:
                written = self.spool.draft(draft, now=now)
            except (TypeError, ValueError, OverflowError):  # a whole number beyond 64 bits
                self.spool.read_drafts()
                drafted = False
        if events or not drafted:
            written = self.spool.append([] if drafted else self._read([draft]), events, now=now) and written
        return written

    def _read(self, drafts: Iterable[Draft]) -> list[Group]:
        """Makes columns of drafts, and counts."""
        self._last_read = self._clock()
        groups: list[Group] = []
        for piece in pieces(drafts):
            if groups:
                give_way(len(self.sender.rows))
            groups += read([piece], self.sender.reader, self._columns, self._lost)
        groups = merge(groups)
        self._messages.refused(self._columns)
        samples = sum(group.samples for group in groups)
        self.sender.counters["samples"] += samples
        if self._all_written:
            self.sender.counters["spooled"] += samples
        self._all_written = True
        told = [group for group in groups if group.rows and "loss" in group.values]
        if told:  # rows with other names besides stand in groups of their own
            newest = max(told, key=lambda group: group.monotonics()[-1])
            self.sender.newest_loss = newest.steps()[-1], newest.column("loss")[-1]
        self._mirror(lambda mirror: mirror.take(groups, self.sender.reader.begins))
        return groups

    def _mirror(self, write: Callable[[Mirror], None]) -> None:
        """Has the mirror write, on rank 0; where it cannot, that is logged and was the last time."""
        mirror = self.sender.mirror
        if mirror is None or self.sender.identity.rank:
            return
        try:
            write(mirror)
        except Exception as error:  # noqa: BLE001 - it is somebody else's code, on a disk that may be full
            self.sender.mirror = None
            self._messages.warn("mirror", error=error)

    def _lost(self, row: Any) -> None:  # noqa: ARG002
        self.sender.counters["dropped"] += 1

    def _gone(self) -> int:
        """Samples (or whole rows, while they are that) and events that will never be stored."""
        ours, spools = self.sender.counters, self.spool.counters
        return sum([ours[name] for name in GONE]) + spools["dropped"] + spools["thinned"] + spools["dropped_events"]

    def _tell_gone(self, now: float) -> None:
        self._tell_gone_at = now + TELL_GONE_S
        gone = self._gone()
        if gone != self._told_gone:
            self._told_gone = gone
            self.sender.rows.append((self._collector.newest, time.time(), time.monotonic(), (DROPPED,), (float(gone),)))

    def _identify(self) -> None:
        """Writes down whose samples these are, where that has changed: the run's id became known, or a later attach()
        gave it another name or project."""
        who, header = self.sender.identity, self.spool.header
        name, project = _called(who)
        run, attempt = (who.run, who.attempt) if who.known else (header.run, header.attempt)
        if (run, attempt, name, project, who.rank) != (
            header.run,
            header.attempt,
            header.name,
            header.project,
            header.rank,
        ):
            if who.known and self._moves.told_another_run(run):
                self._move()
                return
            header.rank = who.rank  # of a process that has joined its group only now
            self.spool.identify(run=run or "", attempt=attempt, name=name, project=project)

    def _move(self) -> None:
        """The training continues an earlier run, and the server knows this source as another one's: a new source takes
        along all that this one has said."""
        sender, before = self.sender, self.spool
        before.read_drafts()
        sender.identity.source = uuid.uuid4().hex
        sender.folder = sender.config.sources / sender.identity.source
        self.spool = self._new_spool()
        self.spool.create()
        self._moves.move(before, self.spool)
        self.orphans.own = sender.folder
        self._messages.warn("moved", run=sender.identity.run)

    # ---- deciding what to send

    def _advance(self, now: float) -> None:
        self._rest_until = 0.0
        courier = self._courier
        if courier is not None:
            while courier.answers:
                job, answer = courier.answers.popleft()
                if job is self.busy:
                    self.busy = None
                    self._settle(job, answer, now)
            if courier.gone:
                self._lose_courier(courier.why, now)
            elif courier.stuck(now):
                self._replace_courier(courier, now)
        if (
            (not self._identified or not self.sender.identity.settled)
            and self.sender.identity.poll()
            and not self._identified
        ):
            self._identified = True
            self._identify()
        self._answer_flushes(now)
        if self.sender.config.record is not None:
            self.spool.hold(now=now)
            if self.sender.slow_sources and now >= self._courier_at:
                self._courier_ready()
            return
        if self.busy is not None or now < self._retry_at or not self._identified:
            if self._failures or not self._identified or self.busy is not None:
                self.spool.hold(now=now)
            if self.sender.slow_sources and now >= self._courier_at:
                self._courier_ready()
            return
        left = self._moves.left
        if left is not None:
            outgoing = left.next()
            if outgoing is not None:
                self._send(outgoing, left, now)
                return
            self._moves.over()
        closing = self.sender.closing_at is not None
        pause_s = self.sender.config.flush_s * (1 if self._watched or self._is_stoppable() else UNWATCHED)
        due = self._urgent or self.sender.flushes or closing or now - self._last_cut >= pause_s
        if self.spool.backlog or (due and self.spool.has_pending):
            if not self.spool.backlog:
                self._last_cut, self._urgent = now, False
            outgoing = self.spool.next()
            if outgoing is not None:
                self._send(outgoing, self.spool, now)
                return
        if self.sender.closing_at is not None:
            return
        if now - self._last_sent >= HEARTBEAT_S:
            self._send(self.spool.empty(), None, now)
        elif self._failures == 0 and self.sender.counters["acked_frames"]:
            self._send_orphan(now)
        if self.busy is None and not self._failures and self.sender.identity.settled:
            self._rest_until = min(self._last_cut + pause_s, self._last_sent + HEARTBEAT_S, now + REST_S)

    def _send(self, outgoing: Outgoing, spool: Spool | None, now: float) -> None:
        try:
            body = encode((spool or self.spool).frame(outgoing))
        except WireError as error:
            self._quarantine(outgoing, spool, str(error))
            return
        if spool in (None, self.spool):
            who, run = self.sender.identity, self.spool.header.run
            self._moves.keep(outgoing, run, len(body), begun=who.run == run and who.begun())
        body, encoding = packed(body, loopback=self._courier_ready().loopback)
        self.busy = Job(body, encoding, outgoing, spool)
        self._last_sent = now
        self.sender.counters["sent_frames"] += 1
        self.sender.counters["sent_bytes"] += len(body)
        self._courier_ready().carry(self.busy)

    def _courier_ready(self) -> Courier:
        courier = self._courier
        if courier is None:
            if self._transport is None:
                config = self.sender.config
                self._transport = HttpTransport(config.server, config.api_key, follows=not config.is_server_given)
            courier = self._courier = Courier(self._transport, self.sender.slow_sources, self.sender.wake, self._clock)
        return courier

    def _lose_courier(self, why: str, now: float) -> None:
        """Its thread is no more, or never was: another one after a pause; what it carried is still in the spool."""
        self.sender.counters["couriers_lost"] += 1
        self._messages.warn("courier", why=why)
        if self._transport is not None:
            self._transport.close()
        self._courier = self.busy = None
        self._failures += 1
        self._retry_at = self._courier_at = now + self._pause_s(self._failures)
        self.spool.hold(now=now)

    def _replace_courier(self, stuck: Courier, now: float) -> None:
        """Its thread hangs in a call that cannot be ended (a lost GPU's driver, a name that is looked up): leave it
        there, go on without what hung."""
        given_up = stuck.given_up(now)
        self._left_behind = [courier for courier in self._left_behind if courier.runs]
        if given_up is not None and len(self._left_behind) >= MOST_LEFT_BEHIND:
            return
        self._left_behind.append(stuck)
        self.sender.counters["couriers_lost"] += 1
        if stuck.source is not None:
            self.sender.slow_sources[:] = [source for source in self.sender.slow_sources if source is not stuck.source]
            self._messages.warn("stuck", name=stuck.source.name)
        stuck.ended = True
        self._transport = None
        self._courier = None
        job, self.busy = self.busy, None
        if job is not None and given_up is not None:
            self._settle(job, given_up, now)

    def _settle(self, job: Job, answer: Answer, now: float) -> None:
        kind = answer.kind
        ours = job.spool in (None, self.spool)  # not what a dead process left: that is of another run
        if kind == "acked":
            self._messages.reachable(now, again=self._failures > 0)
            self._failures = 0
            self.sender.counters["acked_frames"] += 1
            self.sender.counters["acked"] += answer.stored + answer.duplicate
            self.sender.counters["duplicate"] += answer.duplicate
            for item in answer.rejected:
                self.sender.counters["rejected"] += item["count"] if ours else 0
                self._messages.rejected(item, ours=ours)
            if job.spool is not None:
                job.spool.ack(job.outgoing.seq)
            self._note_server()
            if ours:
                self._watched = answer.watched
                for command in answer.commands:
                    self._obey(command)
            return
        self.sender.counters["failed"] += 1
        if kind == "refused":
            self._quarantine(job.outgoing, job.spool, answer.reason)
            return
        if kind == "too_large" and job.spool is not None:
            if not job.spool.split(job.outgoing.seq):
                self._quarantine(job.outgoing, job.spool, answer.reason)
            return
        self._failures += 1
        self._retry_at = now + (answer.pause_s if answer.pause_s is not None else self._pause_s(self._failures))
        self.spool.hold(now=now)
        self._messages.undelivered(answer, now)

    def _note_server(self) -> None:
        """The transport may have followed this user's server to another port."""
        server = getattr(self._transport, "server", None)
        if server in (None, self.sender.config.server):
            return
        self.sender.config = dataclasses.replace(self.sender.config, server=server)
        header = self.spool.header
        header.server = server
        self.spool.identify(run=header.run or "", attempt=header.attempt, name=header.name, project=header.project)
        self.orphans.close()
        self.orphans = Orphans(self.sender.config.state_dir / "spool", self.sender.folder, server)

    def _quarantine(self, outgoing: Outgoing, spool: Spool | None, reason: str) -> None:
        if spool in (None, self.spool):  # of what a dead process left nothing is missing in this run
            self.sender.counters["quarantined_frames"] += 1
            self.sender.counters["rejected"] += outgoing.samples
            self.sender.counters["rejected_events"] += len(outgoing.events)
        if spool is None:
            return
        kept = spool.quarantine(outgoing.seq, reason)
        where = f"set aside in {spool.folder / 'quarantine'}" if kept else "dropped, the quarantine is full"
        self._messages.warn("quarantine", reason=reason, where=where)

    def _is_stoppable(self) -> bool:
        """Ranks that may be stopped ask for commands more often: all must know of a step before it comes."""
        watching = None if self.sender.progress is None else self.sender.progress.links.investigator
        return watching is not None and watching.stop.allowed

    def _obey(self, command: Mapping[str, Any]) -> None:
        if command.get("kind", command.get("command")) == "flush":
            self._urgent = True
        for callback in [*self.sender.on_command]:
            try:
                callback(command)
            except Exception as error:  # noqa: BLE001 - one bad command must not end delivery
                self.sender.counters["errors"] += 1
                self._command_errors[id(callback)] += 1
                if self._command_errors[id(callback)] == COMMAND_ERRORS:
                    self.sender.on_command.remove(callback)
                self._messages.warn("command", error=f"{type(error).__name__}: {error}")

    def _answer_flushes(self, now: float) -> None:
        for _ in range(len(self.sender.flushes)):
            request = self.sender.flushes[0]
            delivered = request.drained and self.busy is None and self.spool.waiting == 0
            if not delivered and now < request.until:
                if not request.drained:
                    self._drain(now)
                    request.drained = True
                return
            request.delivered = delivered and self.sender.config.record is None
            self.sender.flushes.popleft()
            request.done.set()

    # ---- what dead processes left

    def _send_orphan(self, now: float) -> None:
        """At low priority: frames of sources whose process is gone, recorded for this same server."""
        spool = self.orphans.current
        if spool is None:
            errand = self.orphans.errand()
            if errand is not None:
                self._courier_ready().run(errand)
            return
        outgoing = spool.next()
        if outgoing is None:
            self._messages.damaged(spool)
            self.orphans.sent()
            return
        self._send(outgoing, spool, now)

    # ---- the end

    def _finish(self, now: float) -> None:
        """The last drain, then as much delivery as the time allows; what is left waits in the spool for the next
        start."""
        until = self.sender.closing_at or now
        for source in self.sender.sources:
            source.poll()
        self._drain(now)
        # copies from the device take milliseconds
        while self._collector.waits and self._clock() < now + LAST_ROWS_S:
            time.sleep(0.01)
            self._drain(self._clock())
        self.spool.read_drafts()  # what of them is refused is reported with the last rows
        self._messages.left_out(self._columns, last=True)
        self._drain(self._clock(), last=True)
        if self.sender.mirror is not None:
            self.spool.read_drafts()
            self._mirror(lambda mirror: mirror.close())
        if self.sender.config.record is not None:
            self._identified = self._identified or self.sender.identity.poll()
            self._identify()
            self.spool.hold(now=now, force=True)
        else:
            self._retry_at = 0.0  # one attempt now, whatever the pause was
            failures = self._failures
            while self._clock() < until - 0.05:
                now = self._clock()
                self._advance(now)
                if self.busy is None and self.spool.waiting == 0 and self._moves.left is None:
                    break
                if self._failures > failures:  # it was tried, in vain
                    break
                self.sender.wake.wait(min(0.05, max(0.001, until - now)))
        if self._courier is not None:
            self._courier.ended = True
            self._courier.work.ring()
        done = self.sender.config.record is None and self.busy is None and self.spool.waiting == 0
        if done and not self.sender.counters["quarantined_frames"] and not _watched():
            self.spool.remove()
        else:
            before, left = Counter(self.spool.counters), self.spool.waiting if self.sender.config.record is None else 0
            size = self.spool.on_disk
            self.spool.header.followed = str(self.sender.followed) if self.sender.followed is not None else None
            self.spool.close(final=self.sender.final)
            gone = self.spool.counters - before
            if gone["dropped"] or gone["dropped_events"]:
                self._messages.lost(gone["dropped"], gone["dropped_events"])
            elif left and (self._failures or not _watched()):  # the watcher goes on where it was only a matter of time
                self._messages.left(left, size, by_next_run=bool(self.spool.header.run))
        self.orphans.close()
        if self._moves.left is not None:
            self._moves.left.close(final="finished")
        for request in self.sender.flushes:
            request.done.set()


def jittered() -> Callable[[int], float]:
    """Seconds to wait after so many failures: longer after each, 30 at most, and never the same for two agents."""
    chance = random.Random()  # noqa: S311 - its own, so that the user's random state is left alone
    return lambda failures: chance.uniform(1.0, min(30.0, 2.0 ** min(failures, 5)))


def _called(identity: Identity) -> tuple[str | None, str]:
    """Name and project as they leave the process. The training thread may change them at any time, so they are read
    only."""
    return identity.name and redacted_text(identity.name), redacted_text(identity.project)


def _watched() -> bool:
    """Under `perfagent run` the watcher has the last word on how the process ended; it finds the folder and removes
    it."""
    options = sys.modules.get("perfagent.process.launch_options")
    return options is not None and options.current is not None and bool(options.current.watched)
