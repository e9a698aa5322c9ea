"""Sends the frames of the spool, one at a time, and settles their answers. Runs on the sender thread."""

from __future__ import annotations

import dataclasses
import os
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from perfagent.delivery.courier import Courier, Job
from perfagent.delivery.moves import Moves
from perfagent.delivery.orphans import Orphans
from perfagent.delivery.spool import Header, Outgoing, Spool
from perfagent.delivery.transport import Answer, HttpTransport, Transport, packed
from perfagent.delivery.user_messages import Messages, damage
from perfagent.errors import WireError
from perfagent.process.pids import machine, process_start
from perfagent.redaction import redacted_text
from perfagent.wire import encode

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff
    from perfagent.identity import Identity

__all__ = ["Exchange", "jittered"]

HEARTBEAT_S = 5.0
UNWATCHED = 3
"""So much rarer are frames while no page shows the run, but for what is urgent."""
REST_S = 1.0
"""While all is well: how long it is not asked whether something is to be sent, unless somebody rings."""


class Exchange:
    """busy: the request that is on its way. urgent: what waits is sent at once. failures: tries in vain since the last
    answer. rest_until: nothing is to be sent before, unless somebody rings."""

    def __init__(
        self, handoff: Handoff, messages: Messages, transport: Transport | None, pause_s: Callable[[int], float]
    ) -> None:  # fmt: skip
        self._handoff, self._messages = handoff, messages
        self._transport, self._pause_s = transport, pause_s
        config, identity = handoff.config, handoff.identity
        self._records = config.record is not None
        self.spool = self._new_spool()
        self.moves = Moves(identity.run if identity.shared and not self._records else None)
        self.orphans = Orphans(config.state_dir / "spool", handoff.folder, config.server)
        self._courier: Courier | None = None
        self.busy: Job | None = None
        self.urgent = False
        self.failures = 0
        self.rest_until = 0.0
        self._watched = True
        self._identified = False
        self._retry_at = self._courier_at = 0.0
        self._last_cut = self._last_sent = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the courier's thread."""
        return 0.0 if self._courier is None else self._courier.cpu_s

    @property
    def delivered(self) -> bool:
        """Whether the server has all that was spooled."""
        return not self._records and self.busy is None and self.spool.waiting == 0

    def begin(self, now: float) -> None:
        """At the start, and again after an error, which may have been anywhere."""
        self.busy = None  # what was on its way is still in the spool
        if not self._records:
            self.spool.create()
        self._last_sent = now

    def forked(self) -> None:
        """In a forked child: lets go of files and socket without a word."""
        self.spool.forked()
        if self.moves.left is not None:
            self.moves.left.forked()
        if self._transport is not None:
            self._transport.abandon()

    # ---- whose samples these are

    def _new_spool(self) -> Spool:
        config, identity = self._handoff.config, self._handoff.identity
        name, project = _called(identity)
        header = Header(
            source=identity.source, project=project, name=name, run=identity.run if identity.known else None,
            attempt=identity.attempt, rank=identity.rank, server=None if self._records else config.server,
            is_found=not config.is_server_given, pid=os.getpid(), pid_start=process_start(os.getpid()), machine=machine(),
            started=time.time(),
        )  # fmt: skip
        return Spool(
            self._handoff.folder, header, max_bytes=config.max_spool_bytes, max_memory_bytes=config.max_memory_bytes,
            recording=self._records, clock=self._handoff.clock,
        )  # fmt: skip

    def identify(self) -> None:
        """Writes down whose samples these are, where that has changed by the run's id or a later attach()."""
        who, header = self._handoff.identity, self.spool.header
        name, project = _called(who)
        run, attempt = (who.run, who.attempt) if who.known else (header.run, header.attempt)
        known = header.run, header.attempt, header.name, header.project, header.rank
        if (run, attempt, name, project, who.rank) == known:
            return
        if who.known and self.moves.run not in (None, run):  # the server knows this source as another run's
            self._move()
            return
        header.rank = who.rank  # of a process that has joined its group only now
        self.spool.identify(run=run or "", attempt=attempt, name=name, project=project)

    def poll_identity(self) -> None:
        """Asks for the run's id, until it is known."""
        identity = self._handoff.identity
        if (not self._identified or not identity.settled) and identity.poll() and not self._identified:
            self._identified = True
            self.identify()

    def _move(self) -> None:
        """A new source says all again, under the run that the training continues."""
        handoff, before = self._handoff, self.spool
        handoff.identity.source = uuid.uuid4().hex
        handoff.folder = handoff.config.sources / handoff.identity.source
        self.spool = self._new_spool()
        self.spool.create()
        self.moves.move(before, self.spool)
        self.orphans.own = handoff.folder
        self._messages.warn("moved", run=handoff.identity.run)

    # ---- what is sent

    def advance(self, now: float) -> None:
        """Sends what is due."""
        self.rest_until = 0.0
        handoff = self._handoff
        if self._records or self.busy is not None or now < self._retry_at or not self._identified:
            self.spool.hold(now=now)
            if handoff.slow_sources and now >= self._courier_at:
                self._courier_ready()
            return
        if self.moves.left is not None:
            outgoing = self.moves.left.next()
            if outgoing is not None:
                self._send(outgoing, self.moves.left, now)
                return
            self.moves.left.remove()
            self.moves.left = None
        closing = handoff.closing_at is not None
        pause_s = handoff.config.flush_s * (1 if self._watched or self._is_stoppable() else UNWATCHED)
        due = self.urgent or handoff.flushes or closing or now - self._last_cut >= pause_s
        if self.spool.backlog or (due and self.spool.has_pending):
            if not self.spool.backlog:
                self._last_cut, self.urgent = now, False
            outgoing = self.spool.next()
            if outgoing is not None:
                self._send(outgoing, self.spool, now)
                return
        if closing:
            return
        if now - self._last_sent >= HEARTBEAT_S:
            self._send(self.spool.empty(), None, now)
        elif self.failures == 0 and handoff.counters["acked_frames"]:
            self._send_orphan(now)
        if self.busy is None and not self.failures and handoff.identity.settled:
            self.rest_until = min(self._last_cut + pause_s, self._last_sent + HEARTBEAT_S, now + REST_S)

    def _is_stoppable(self) -> bool:
        """Ranks that may be stopped ask for commands more often: all must know of a step before it comes."""
        watching = None if self._handoff.progress is None else self._handoff.progress.links.investigator
        return watching is not None and watching.stop.allowed

    def _send_orphan(self, now: float) -> None:
        """At low priority: frames of sources whose process is gone, recorded for this same server."""
        spool = self.orphans.current
        if spool is None:
            errand = self.orphans.errand()
            if errand is not None:
                self._courier_ready().run(errand)
            return
        outgoing = spool.next()
        if outgoing is not None:
            self._send(outgoing, spool, now)
            return
        if found := damage(spool):
            self._messages.warn("damaged", str(spool.folder), left=spool.folder, found=found)
        self.orphans.sent()

    def _send(self, outgoing: Outgoing, spool: Spool | None, now: float) -> None:
        """spool: None for a sign of life."""
        try:
            body = encode((spool or self.spool).frame(outgoing))
        except WireError as error:
            self._quarantine(outgoing, spool, str(error))
            return
        if spool in (None, self.spool):
            who, run = self._handoff.identity, self.spool.header.run
            self.moves.keep(outgoing, run, len(body), begun=who.run == run and who.begun())
        courier = self._courier_ready()
        body, encoding = packed(body, loopback=courier.loopback)
        self.busy = Job(body, encoding, outgoing, spool)
        self._last_sent = now
        self._handoff.counters["sent_frames"] += 1
        self._handoff.counters["sent_bytes"] += len(body)
        courier.carry(self.busy)

    # ---- the courier

    def _courier_ready(self) -> Courier:
        if self._courier is None:
            handoff, config = self._handoff, self._handoff.config
            if self._transport is None:
                self._transport = HttpTransport(config.server, config.api_key, follows=not config.is_server_given)
            self._courier = Courier(self._transport, handoff.slow_sources, handoff.wake, handoff.clock)
        return self._courier

    def settle_answers(self, now: float) -> None:
        """What the courier has brought back, or what became of it."""
        courier = self._courier
        if courier is None:
            return
        while courier.answers:
            job, answer = courier.answers.popleft()
            if job is self.busy:
                self.busy = None
                self._settle(job, answer, now)
        if courier.gone:
            self._lose_courier(courier.why, now)
        elif courier.stuck(now):
            self._replace_courier(courier)

    def _lose_courier(self, why: str, now: float) -> None:
        """Its thread is no more, or never was: another one after a pause; what it carried is still in the spool."""
        self._handoff.counters["couriers_lost"] += 1
        self._messages.warn("courier", why=why)
        if self._transport is not None:
            self._transport.close()
        self._courier = self.busy = None
        self._courier_at = self._pause(now)

    def _replace_courier(self, stuck: Courier) -> None:
        """Its thread hangs in a source that cannot be ended: leave it there, go on without that."""
        self._handoff.counters["couriers_lost"] += 1
        if stuck.source is not None:
            slow = self._handoff.slow_sources
            slow[:] = [source for source in slow if source is not stuck.source]
            self._messages.warn("stuck", name=stuck.source.name)
        stuck.ended = True
        self._transport = self._courier = self.busy = None  # what it carried is still in the spool

    # ---- answers

    def _settle(self, job: Job, answer: Answer, now: float) -> None:
        if answer.kind == "acked":
            self._acked(job, answer, now)
            return
        self._handoff.counters["failed"] += 1
        spool = job.spool
        if answer.kind == "too_large" and spool is not None and spool.split(job.outgoing.seq):
            return
        if answer.kind == "refused" or (answer.kind == "too_large" and spool is not None):
            self._quarantine(job.outgoing, spool, answer.reason)
            return
        self._pause(now, answer.pause_s)
        self._messages.undelivered(answer, now)

    def _pause(self, now: float, pause_s: float | None = None) -> float:
        """After a try in vain; until when."""
        self.failures += 1
        self._retry_at = now + (self._pause_s(self.failures) if pause_s is None else pause_s)
        self.spool.hold(now=now)
        return self._retry_at

    def _acked(self, job: Job, answer: Answer, now: float) -> None:
        counters, ours = self._handoff.counters, self._is_ours(job.spool)
        self._messages.reachable(now, again=self.failures > 0)
        self.failures = 0
        counters["acked_frames"] += 1
        if counters["acked_frames"] == 1:
            self._messages.begun()
        counters["acked"] += answer.stored + answer.duplicate
        counters["duplicate"] += answer.duplicate
        for item in answer.rejected:
            counters["rejected"] += item.count if ours else 0
            self._messages.rejected(item, ours=ours)
        if job.spool is not None:
            job.spool.ack(job.outgoing.seq)
        self._note_server()
        if ours:
            self._watched = answer.watched
            for command in answer.commands:
                self._obey(command)

    def _is_ours(self, spool: Spool | None) -> bool:
        """Whether a frame is of this run, and not of what a dead process left."""
        return spool in (None, self.spool)

    def _note_server(self) -> None:
        """The transport may have followed this user's server to another port."""
        handoff, server = self._handoff, getattr(self._transport, "server", None)
        if server in (None, handoff.config.server):
            return
        handoff.config = dataclasses.replace(handoff.config, server=server)
        header = self.spool.header
        header.server = server
        self.spool.identify(run=header.run or "", attempt=header.attempt, name=header.name, project=header.project)
        self.orphans.close()
        self.orphans = Orphans(handoff.config.state_dir / "spool", handoff.folder, server)

    def _quarantine(self, outgoing: Outgoing, spool: Spool | None, reason: str) -> None:
        counters = self._handoff.counters
        if self._is_ours(spool):
            counters["quarantined_frames"] += 1
            counters["rejected"] += outgoing.samples
            counters["rejected_events"] += len(outgoing.events)
        if spool is None:
            return
        kept = spool.quarantine(outgoing.seq, reason)
        where = f"set aside in {spool.folder / 'quarantine'}" if kept else "dropped, the quarantine is full"
        self._messages.warn("quarantine", reason=reason, where=where)

    def _obey(self, command: Mapping[str, Any]) -> None:
        if command.get("kind", command.get("command")) == "flush":
            self.urgent = True
        for callback in [*self._handoff.on_command]:
            try:
                callback(command)
            except Exception as error:  # noqa: BLE001 - one bad command must not end delivery
                self._handoff.counters["errors"] += 1
                self._messages.warn("command", error=f"{type(error).__name__}: {error}")

    # ---- the end

    def retry_now(self) -> None:
        """One attempt more, whatever the pause was."""
        self._retry_at = 0.0

    def close(self) -> None:
        """After the spool: lets go of the courier, and of what other processes may have."""
        if self._courier is not None:
            self._courier.ended = True
            self._courier.work.ring()
        self.orphans.close()
        if self.moves.left is not None:
            self.moves.left.close(final="finished")


def jittered() -> Callable[[int], float]:
    """Seconds to wait after so many failures: longer after each, 30 at most, and never the same for two agents."""
    chance = random.Random()  # noqa: S311 - its own, so that the user's random state is left alone
    return lambda failures: chance.uniform(1.0, min(30.0, 2.0 ** min(failures, 5)))


def _called(identity: Identity) -> tuple[str | None, str]:
    """Name and project as they leave the process; the training thread may change them at any time."""
    return identity.name and redacted_text(identity.name), redacted_text(identity.project)
