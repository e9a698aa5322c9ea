"""The spool: what an agent has measured and the server has not yet acknowledged, as numbered frames of one source, on
disk where possible.

What is drained every 150 ms goes into `.ticks`; a frame is made of the ticks since the last one. While the server is
away, once a minute one compressed frame in `.frames` takes the place of its ticks (backlog.py; the files are
records.py). Frames that the server refused for good are set aside in `quarantine` with its reason, at most 16 MB.

**Exactly once in effect.** A frame's number and the ticks it holds are written down (`state`) before it is sent for the
first time. Whoever sends it again, this process or a later one, sends the same content under the same (source, seq),
and the server's ledger drops the second copy.

**A full or broken disk never reaches the caller.** Every write returns whether it succeeded; what could not be written
stays in memory within `max_memory_bytes`, and the owner reports it once.
One thread uses a spool at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from perfagent.delivery import records
from perfagent.delivery.backlog import Backlog, Outgoing, halves, squeezed
from perfagent.delivery.records import Header, folders, owner
from perfagent.delivery.recovery import Recovered, Tick
from perfagent.delivery.row_packing import Packed, grouped
from perfagent.delivery.segments import SEGMENT_BYTES, Segments, SpoolBusyError, State
from perfagent.process.descriptors import opened
from perfagent.wire import Event, Frame, Group

__all__ = ["Header", "Outgoing", "Spool", "SpoolBusyError", "folders", "owner"]

# raw columns: a frame is cut there at the latest (the server takes 8 MiB as sent, 32 MiB decoded)
FRAME_BYTES = 2 * 2**20
TICKS_BYTES = 2**18  # a file of ticks that are all acknowledged is begun anew above this
KEEP_S = 60.0
HOLD_AGAIN_S = 5.0
QUARANTINE_BYTES = 16 * 2**20
REASON = b"R"
"""The kind of a record in the quarantine that says why the frame behind it was refused."""


class _Pending(msgspec.Struct):
    """Ticks that belong to no frame yet."""

    ticks: list[Tick] = []
    size: int = 0
    since: float = math.inf


_encoder = msgspec.msgpack.Encoder()


def _frame(seq: int, ticks: Sequence[Tick]) -> Outgoing:
    groups = grouped(block for tick in ticks for block in tick.packed)
    last = ticks[-1].number if ticks else 0
    return Outgoing(seq, groups, [event for tick in ticks for event in tick.events], last)


def _bytes_of(tick: Tick) -> int:
    sizes = [256 + len(block.data) for block in tick.packed]
    return sum(sizes) + sum(256 + len(event.data.get("payload", b"")) for event in tick.events)


class Spool(Segments):
    """The unacknowledged frames of one source.

    `Spool(folder, header)` starts one (and never fails: without a usable disk it works in memory); `Spool.open(folder)`
    takes over what a dead process left. counters: "dropped" samples that no longer fit anywhere, "dropped_events",
    "corrupt" files that are read up to a damaged record, "torn_bytes" of ends that were written in part, "unreadable" files
    that the disk did not give, "disk_errors".
    """

    def __init__(
        self,
        folder: Path,
        header: Header,
        *,
        max_bytes: int = 512 * 2**20,
        max_memory_bytes: int = 8 * 2**20,
        max_quarantine_bytes: int = QUARANTINE_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        recording: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(folder, header, segment_bytes=segment_bytes, clock=clock)
        self.recording = recording
        self._max_memory_bytes, self._max_quarantine_bytes = max_memory_bytes, max_quarantine_bytes
        self._backlog = Backlog(self, max_bytes=2**62 if recording else max_bytes, recording=recording)
        self.relayed = False
        """Whether its process is dead, so that a frame of it is no sign of life."""
        self._pending = _Pending()
        self._inflight: Outgoing | None = None
        self._not_on_disk = 0
        """The last tick that the disk did not take, or that was taken off it."""
        self._hold_at = -math.inf
        """When a whole frame is tried again that the disk did not take."""

    # ---- opening

    @classmethod
    def open(cls, folder: Path, *, recording: bool = False) -> Spool:
        """Takes over a source whose process is gone. Raises SpoolBusyError while that process lives, FileNotFoundError
        when the folder holds no source, and SpoolVersionError when it is one of another version."""
        if not records.numbered(folder, "ticks", "frames"):  # no lock where a process may just be starting
            raise FileNotFoundError(f"{folder} holds no samples of perfagent")
        records.must_be_known(folder)
        unknown = Header(source=folder.name, project="default", rank=0, server=None)
        spool = cls(folder, unknown, recording=recording)
        with contextlib.ExitStack() as stack:
            stack.callback(spool.abandon)
            spool._take_lock()
            found = owner(folder)
            if found is None and not records.numbered(folder, "ticks", "frames"):
                spool.remove()  # whoever had it has deleted it meanwhile; the lock is ours
                raise FileNotFoundError(f"{folder} holds no samples of perfagent any more")
            spool.header, spool.relayed = found or unknown, True
            spool.take_over()
            spool._recover()
            stack.pop_all()
        return spool

    def _recover(self) -> None:
        """Everything that is whole waits again, as it did in the process that is gone."""
        found, state, header = Recovered(self), self.state, self.header
        # Whose acknowledgement it was is not written down: a recording goes to any server whole; its ledger knows what
        # it has.
        acked = 0 if self.recording else state.acked
        frames, known = found.frames, found.replaced.union(found.frames)
        waiting = [frames[seq] for seq in sorted(frames) if seq > acked and seq not in found.replaced]
        self._backlog.kept.extend(waiting)
        held = [tick for tick in found.ticks if state.mark_from < tick.number <= state.mark_upto]
        if held and state.marked > acked and state.marked not in known:
            self._inflight = _frame(state.marked, held)
            self._inflight.upto = state.mark_upto
        covered = max(state.mark_upto, *(frame.upto for frame in frames.values()), 0)
        self._pending.ticks = [tick for tick in found.ticks if tick.number > covered]
        self._pending.since = -math.inf
        header.next_seq = max(header.next_seq, state.marked + 1, state.acked + 1, *(seq + 1 for seq in frames))
        header.next_tick = max(header.next_tick, covered + 1, *(tick.number + 1 for tick in found.ticks))

    # ---- writing

    def identify(self, *, run: str, attempt: int, name: str | None, project: str) -> None:
        """The run's id became known (ranks above 0 learn it from rank 0)."""
        self.header.run, self.header.attempt, self.header.name, self.header.project = run, attempt, name, project
        self.write_header()

    def append(self, packed: Sequence[Packed], events: Sequence[Event], *, now: float) -> bool:
        """Takes what was drained in one tick. True when it is on the disk; it is kept in memory for sending in either case.

        Raises TypeError, ValueError or OverflowError for what is no plain data; nothing is kept of it then.
        """
        tick, pending = Tick(self.header.next_tick, packed, events), self._pending
        record = records.framed(records.TICK, _encoder.encode(tick))
        self.header.next_tick += 1
        written = self.write("ticks", record) > 0
        if not written:
            self._not_on_disk = tick.number
        pending.ticks.append(tick)
        pending.size += len(record)
        pending.since = min(pending.since, now)
        return written

    def keep(self, groups: list[Group], events: list[Event]) -> None:
        """Takes a whole frame."""
        frame = Outgoing(self._take_seq(), groups, events)
        if not self._backlog.hold([frame]):
            self._count_lost(frame)

    # ---- sending

    @property
    def waiting(self) -> int:
        """How many frames wait, the ticks that belong to none yet counted as one."""
        return len(self._backlog.kept) + self._from_ticks + self.has_pending

    @property
    def backlog(self) -> bool:
        """Whether whole frames wait beside the one that is just being filled."""
        return bool(self._backlog.kept) or self._inflight is not None

    @property
    def has_pending(self) -> bool:
        return bool(self._pending.ticks)

    @property
    def pending_bytes(self) -> int:
        """Size of the samples and events that are in no frame yet."""
        return self._pending.size

    @property
    def _from_ticks(self) -> bool:
        """Whether the frame on its way is on the disk as ticks, not as a frame of the backlog."""
        return self._inflight is not None and self._backlog.carried is None

    @property
    def _unsaved(self) -> bool:
        """Whether ticks that are not acknowledged are in memory only."""
        return self._not_on_disk > (self.state.mark_from if self._from_ticks else self.state.mark_upto)

    def next(self) -> Outgoing | None:
        """The oldest frame that is not acknowledged, its number and ticks written down first; None: there is none."""
        if self._inflight is not None:
            return self._inflight
        while self._backlog.kept:
            kept = self._backlog.kept[0]
            self._inflight = self._backlog.load(kept)
            if self._inflight is not None:
                kept.sent = True
                self._backlog.carried = kept
                return self._inflight
            self._backlog.lose(kept)  # its file became unreadable since
        if not self.has_pending:
            return None
        frame = _frame(self._take_seq(), self._pending.ticks)  # what is pending stays until all that may fail is done
        self._mark(frame.seq, self.state.mark_upto, frame.upto)
        self._pending, self._inflight = _Pending(), frame
        return frame

    def frame(self, outgoing: Outgoing) -> Frame:
        """The frame as it travels."""
        header = self.header
        return Frame(
            project=header.project, run=header.run or "", source=header.source, attempt=header.attempt, rank=header.rank,
            seq=outgoing.seq, groups=outgoing.groups, events=outgoing.events, name=header.name, sent=time.time(),
            relayed=self.relayed,
        )  # fmt: skip

    def empty(self) -> Outgoing:
        """A frame without content: a sign of life. It is forgotten if the server does not take it."""
        seq = self._take_seq()
        self._mark(seq, self.state.mark_upto, self.state.mark_upto)
        return Outgoing(seq, [], [])

    def ack(self, seq: int) -> None:
        """The server has stored this frame, refused it for good, or it was split: it need not be kept any longer."""
        kept, frame = None, self._inflight
        if frame is not None and frame.seq == seq:
            if self.recording and self._from_ticks:  # the next server gets it, too
                self.write("frames", records.framed(records.FRAME, squeezed([frame])))
            kept, self._backlog.carried, self._inflight = self._backlog.carried, None, None
        self.state.acked = max(self.state.acked, seq)
        if kept is not None:  # where its ticks are still there they must not look new once its file is gone
            self.state.mark_upto = max(self.state.mark_upto, kept.upto)
        self.write_state()
        if kept is not None:  # only now: with the file its number would be forgotten, and given to other samples
            self._backlog.forget(kept)
        self._collect()

    def split(self, seq: int) -> bool:
        """Replaces the frame in flight by two halves with new numbers; False when it is a single value or event, or the disk
        does not take them."""
        frame = self._inflight
        if frame is None or frame.seq != seq or (two := halves(frame)) is None:
            return False
        # They go to the end of the queue although they are older: an acknowledged number means "and all before".
        for half in two:
            half.seq = self._take_seq()
        if not self._backlog.hold([*two], replaces=seq):
            return False
        self.ack(seq)
        return True

    def quarantine(self, seq: int, reason: str) -> bool:
        """Sets the frame in flight aside with the server's reason; True when the quarantine file took it."""
        frame = self._inflight
        if frame is None or frame.seq != seq:
            return False
        record = records.framed(records.FRAME, squeezed([frame]))
        note = records.framed(REASON, _encoder.encode({"seq": seq, "reason": reason[:1000], "time": time.time()}))
        self.ack(seq)
        try:
            file = opened(self.folder / "quarantine", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                size = os.fstat(file.fd).st_size
                if size + len(record) + len(note) + len(records.MAGIC) > self._max_quarantine_bytes:
                    return False
                records.write_whole(file.fd, size, (b"" if size else records.MAGIC) + note + record)
            finally:
                file.close()
        except OSError as error:
            self.failed(error)
            return False
        return True

    def hold(self, *, now: float, force: bool = False) -> None:
        """While nothing can be sent: once a minute (or 2 MB) of ticks is together, one compressed frame replaces them. What
        the disk does not take waits in memory, and the ticks go to make room for it."""
        pending = self._pending
        late = now - pending.since >= KEEP_S or pending.size >= FRAME_BYTES
        # unsaved: the disk took something again, and gets all that it refused before
        due = self.error is None and now >= self._hold_at and (late or self._unsaved)
        if self.has_pending and (force or due):
            frame = _frame(self.header.next_seq, pending.ticks)
            if self._hold_inflight() and self._backlog.hold([frame]):
                self._take_seq()
                self._pending = _Pending()
                self.state.mark_upto = max(self.state.mark_upto, frame.upto)
                self.rotate("ticks")
                self._collect()
                self._backlog.enforce_cap(self._take_seq)
            else:
                self._hold_at = now + HOLD_AGAIN_S
                self._forget_ticks()
        if self._pending.size > self._max_memory_bytes:
            self._enforce_memory()

    def _hold_inflight(self) -> bool:
        """The frame on its way becomes the oldest of the backlog, if it is made of ticks. False if the disk does not take
        it."""
        if self._inflight is not None and self._from_ticks:
            for kept in self._backlog.hold([self._inflight]):
                kept.sent = True
                self._backlog.kept.rotate(1)
                self._backlog.carried = kept
        return not self._from_ticks

    def _enforce_memory(self) -> None:
        """The samples of the oldest ticks go first, events last."""
        self._forget_ticks()  # what goes must not come back from the disk under a number that others have
        pending = self._pending
        pending.size = sum(map(_bytes_of, pending.ticks))
        for with_events in (False, True):
            for place, tick in enumerate(pending.ticks):
                if pending.size <= self._max_memory_bytes:
                    break
                lost = tick if with_events else tick._replace(events=())
                pending.ticks[place] = Tick(tick.number, (), () if with_events else tick.events)
                pending.size -= _bytes_of(lost)
                self._count_lost(_frame(0, [lost]))
        pending.ticks[:-1] = [tick for tick in pending.ticks[:-1] if tick.packed or tick.events]

    def _count_lost(self, frame: Outgoing) -> None:
        self.counters["dropped"] += frame.samples
        self.counters["dropped_events"] += len(frame.events)

    def _take_seq(self) -> int:
        self.header.next_seq += 1
        return self.header.next_seq - 1

    def _mark(self, seq: int, first: int, last: int) -> None:
        state = State(self.state.acked, seq, first, last)
        written = self.write_state(state)
        self.state = state  # not where an error came in between
        if not written:
            # not written down that these ticks are part of `seq`: a successor would send them under another number
            self._forget_ticks()

    # ---- files that are no longer needed

    def _forget_ticks(self) -> None:
        """Deleting works on a full disk; they live in memory until they are acknowledged."""
        self.rotate("ticks")
        self._delete_ticks(upto=self.header.next_tick)
        self._not_on_disk = self.header.next_tick - 1

    def _delete_ticks(self, *, upto: int) -> None:
        for path, last in [*self.old_ticks]:
            if last <= upto:
                self.delete(path)
                self.old_ticks.remove((path, last))

    def _collect(self) -> None:
        """Deletes files of which nothing is needed any more; a recording keeps its frames."""
        if self.recording:
            self._delete_ticks(upto=max((kept.upto for kept in self._backlog.kept), default=0))
            return
        if self.growing["ticks"].size > TICKS_BYTES and not self.has_pending and self._inflight is None:
            self.rotate("ticks")
        self._delete_ticks(upto=self.state.mark_from if self._from_ticks else self.state.mark_upto)
        if not self._backlog.kept and (path := self.rotate("frames")) is not None:
            self.delete(path)

    # ---- ending

    def close(self, *, final: str = "") -> None:
        """Lets go of the lock. final: the source's last state, when it is in the spool (or was delivered). What is in
        memory only and finds no room on the disk even now is counted as dropped."""
        self.header.closed = final or self.header.closed
        if self._unsaved:  # one more try with what the disk refused before: nobody has it after us
            self.retry_at = 0.0
            self._hold_inflight()
            self.hold(now=math.inf, force=True)
            self._count_lost(_frame(0, self._pending.ticks))
            if self._inflight is not None and self._from_ticks:
                self._count_lost(self._inflight)
        there = {*records.numbered(self.folder, "frames")}
        for kept in [kept for kept in self._backlog.kept if kept.path not in there]:  # also what somebody has deleted
            self._backlog.lose(kept)
        if final:
            self.write_header("ticks")
        self.catch_up()
        self.abandon()

    def remove(self) -> None:
        """Deletes the folder of a source with nothing left to send, but not a quarantine or what could not be read."""
        if not self.counters["unreadable"]:
            with contextlib.suppress(OSError):
                for path in self.folder.iterdir():
                    if path.suffix in (".ticks", ".frames"):
                        path.unlink()
                # after those: without it their samples look as if never sent
                (self.folder / "state").unlink(missing_ok=True)
                (self.folder / "lock").unlink()  # the last: from here on it is anybody's
                self.folder.rmdir()
        self.abandon()
