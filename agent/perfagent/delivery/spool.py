"""The spool: what an agent has measured and the server has not yet acknowledged, as numbered frames of one source, on
disk where possible.

What is drained every 150 ms goes into `.ticks`; a frame is made of the ticks since the last one. While the server is
away, once a minute one compressed frame in `.frames` takes the place of its ticks (backlog.py; the files are
segments.py). Frames that the server refused for good are set aside in `quarantine` with its reason, at most 16 MB.

**Exactly once in effect.** A frame's number and the ticks it holds are written down (`state`) before it is sent for the
first time. Whoever sends it again, this process or a later one, sends the same content under the same (source, seq),
and the server's ledger drops the second copy.

**A full or broken disk never reaches the caller.** Every write returns whether it succeeded; what could not be written
stays in memory within `max_memory_bytes`, and the owner reports it once.

Nothing here starts threads or talks to the network; one thread uses a spool at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from perfagent.delivery.backlog import Backlog, Part, squeezed
from perfagent.delivery.columns import merge
from perfagent.delivery.downsampling import halves, raw_size
from perfagent.delivery.drafts import Draft, Read, left_behind
from perfagent.delivery.recovery import Recovered, Tick, drafted
from perfagent.delivery.segments import (
    DRAFT,
    FRAME,
    MAGIC,
    SEGMENT_BYTES,
    TICK,
    Header,
    Segments,
    SpoolBusyError,
    State,
    folders,
    framed,
    must_be_known,
    numbered,
    owner,
    records,
    write_whole,
)
from perfagent.wire import Event, Frame, Group

__all__ = ["Header", "Outgoing", "Spool", "SpoolBusyError", "folders", "owner"]

# raw columns: a frame is cut there at the latest (the server takes 8 MiB as sent, 32 MiB decoded)
FRAME_BYTES = 2 * 2**20
TICK_BYTES = 16 * 2**20
TICKS_BYTES = 2**18  # a file of ticks that are all acknowledged is begun anew above this
KEEP_S = 60.0
QUARANTINE_BYTES = 16 * 2**20
REASON = b"R"
"""The kind of a record in the quarantine that says why the frame behind it was refused."""


class Outgoing(msgspec.Struct):
    """One frame on its way: number and content never change once it was handed out."""

    seq: int
    groups: list[Group]
    events: list[Event]

    @property
    def samples(self) -> int:
        return sum(group.samples for group in self.groups)


class _Pending(msgspec.Struct):
    """Ticks that belong to no frame yet. drafts: those that are not read yet, encoded."""

    drafts: list[bytes] = []
    groups: list[Group] = []
    events: list[Event] = []
    size: int = 0
    last: int = 0
    since: float = math.inf


class _Reason(msgspec.Struct):
    seq: int


_encoder = msgspec.msgpack.Encoder()
_reason_decoder = msgspec.msgpack.Decoder(_Reason)


class Spool:
    """The unacknowledged frames of one source.

    `Spool(folder, header)` starts one (and never fails: without a usable disk it works in memory); `Spool.open(folder)`
    takes over what a dead process left. counters: "dropped" samples that no longer fit anywhere, "thinned" samples left
    out of old full-resolution data to keep within the cap, "dropped_events", "corrupt" files set aside, "torn_bytes"
    cut from ends that were written in part, "unreadable" files that the disk did not give, "disk_errors".
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
        read: Read = left_behind,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """segment_bytes: of one file. read: makes groups of drafts. clock: by which a disk that failed is tried again."""
        self.folder, self.recording = folder, recording
        self._read = read
        self._max_quarantine_bytes = max_quarantine_bytes
        self.counters: Counter[str] = Counter()
        self.files = Segments(folder, header, self.counters, segment_bytes=segment_bytes, clock=clock)
        self._backlog = Backlog(
            self.files,
            self.counters,
            max_bytes=2**62 if recording else max_bytes,
            max_memory_bytes=max_memory_bytes,
            recording=recording,
        )
        self.relayed = False
        """Whether its process is dead, so that a frame of it is no sign of life."""
        self._pending = _Pending()
        self._inflight: Outgoing | None = None
        self._inflight_upto = 0
        self._not_on_disk = 0
        """The last tick that the disk did not take, or that was taken off it."""

    @property
    def header(self) -> Header:
        """Whose samples these are."""
        return self.files.header

    # ---- opening

    def create(self) -> bool:
        """Makes the folder and takes its lock. False (and `error`) when the disk does not allow it; try again later."""
        return self.files.create()

    @classmethod
    def open(cls, folder: Path, *, max_bytes: int = 512 * 2**20, recording: bool = False) -> Spool:
        """Takes over a source whose process is gone. Raises SpoolBusyError while that process lives, FileNotFoundError
        when the folder holds no source, and SpoolVersionError when it is one of another version."""
        if not numbered(folder, "ticks", "frames", "corrupt"):  # no lock where a process may just be starting
            raise FileNotFoundError(f"{folder} holds no samples of perfagent")
        must_be_known(folder)
        unknown = Header(source=folder.name, project="default", rank=0, server=None)
        spool = cls(folder, unknown, max_bytes=max_bytes, recording=recording)
        try:
            spool.files.lock()
            found = owner(folder)
            if found is None and not numbered(folder, "ticks", "frames"):
                spool.remove()  # whoever had it has deleted it meanwhile; the lock is ours
                raise FileNotFoundError(f"{folder} holds no samples of perfagent any more")
            spool.files.header, spool.relayed = found or unknown, True
            spool.files.take_over()
            spool._recover()
        except BaseException:
            spool.abandon()
            raise
        return spool

    def _recover(self) -> None:
        """Everything that is whole waits again, as it did in the process that is gone."""
        found = Recovered(self.files, self._backlog.read)
        ticks, frames, replaced = found.ticks, found.frames, found.replaced
        state = self.files.state
        # Whose acknowledgement it was is not written down: a recording goes to any server whole; its ledger knows what
        # it has.
        acked = 0 if self.recording else state.acked
        self._backlog.kept.extend(frames[seq] for seq in sorted(frames) if seq > acked and seq not in replaced)
        self._read_left(ticks)
        held = [tick for tick in ticks if state.mark_from < tick.number <= state.mark_upto]
        if held and state.marked > acked and state.marked not in frames and state.marked not in replaced:
            self._inflight = Outgoing(
                state.marked, merge(g for t in held for g in t.groups), [e for t in held for e in t.events]
            )
            self._inflight_upto = state.mark_upto
        covered = max(max((frame.upto for frame in frames.values()), default=0), state.mark_upto)
        for tick in ticks:
            if tick.number > covered:
                self._add_pending(tick.groups, tick.events, tick.number)
        header = self.header
        header.next_seq = max(header.next_seq, state.marked + 1, state.acked + 1, *(seq + 1 for seq in frames))
        header.next_tick = max(header.next_tick, covered + 1, *(tick.number + 1 for tick in ticks))

    def _read_left(self, ticks: list[Tick]) -> None:
        """Drafts on the disk become groups, in their order, as far as they were not acknowledged."""
        covered = self.files.state.mark_from
        for tick in ticks:
            if tick.draft is not None and tick.number > covered:
                try:
                    tick.groups = self._read([tick.draft])
                except Exception:  # noqa: BLE001 - whatever a damaged record holds, the others must be read
                    self.counters["corrupt"] += 1

    # ---- writing

    def identify(self, *, run: str, attempt: int, name: str | None, project: str) -> None:
        """The run's id became known (ranks above 0 learn it from rank 0)."""
        self.header.run, self.header.attempt, self.header.name, self.header.project = run, attempt, name, project
        self.files.append_header()

    def append(self, groups: list[Group], events: list[Event], *, now: float) -> bool:
        """Takes what one tick drained. True when it is on the disk; it is kept in memory for sending in either case."""
        if sum(map(raw_size, groups)) > TICK_BYTES and (parts := halves(groups, events)) is not None:
            taken = [self.append(*half, now=now) for half in parts]
            return all(taken)
        number = self.header.next_tick
        self.header.next_tick += 1
        written = self.files.append("ticks", framed(TICK, _encoder.encode((number, groups, events))))
        self._add_pending(groups, events, number, now)
        if not written:
            self._not_on_disk = number
        return bool(written)

    def draft(self, draft: Draft, *, now: float) -> bool:
        """Takes what was noted in one tick; it is read when a frame is cut. True when it is on the disk.

        Raises TypeError, ValueError or OverflowError for what is no plain data; nothing is kept of it then.
        """
        payload = _encoder.encode((self.header.next_tick, *draft))
        number = self.header.next_tick
        self.header.next_tick += 1
        written = self.files.append("ticks", framed(DRAFT, payload))
        pending = self._pending
        pending.drafts.append(payload)
        pending.size += len(payload)
        pending.last = number
        pending.since = min(pending.since, now)
        if not written:
            self._not_on_disk = number
        return bool(written)

    def read_drafts(self) -> None:
        """Makes columns of what was drafted since the last time."""
        if self._pending.drafts:
            self._pending.groups += self._read(drafted(payload)[1] for payload in self._pending.drafts)
            self._pending.drafts = []

    def _add_pending(self, groups: list[Group], events: list[Event], number: int, now: float = -math.inf) -> None:
        pending = self._pending
        pending.groups.extend(groups)
        pending.events.extend(events)
        pending.size += sum(map(raw_size, groups)) + sum(256 + len(event.data.get("payload", b"")) for event in events)
        pending.last = number
        pending.since = min(pending.since, now)

    def sync(self) -> None:
        """Asks the disk to keep what was written (power loss; a killed process loses nothing without this)."""
        self.files.sync()

    # ---- sending

    @property
    def waiting(self) -> int:
        """How many frames wait, the ticks that belong to none yet counted as one."""
        return len(self._backlog.kept) + self._from_ticks + (self._pending.last > 0)

    @property
    def backlog(self) -> bool:
        """Whether whole frames wait beside the one that is just being filled."""
        return bool(self._backlog.kept) or self._inflight is not None

    @property
    def has_pending(self) -> bool:
        return self._pending.last > 0

    @property
    def pending_bytes(self) -> int:
        """Of what is in no frame yet."""
        return self._pending.size

    @property
    def on_disk(self) -> int:
        """Bytes in this source's files."""
        return self.files.on_disk

    @property
    def in_memory(self) -> int:
        """Bytes of whole frames that the disk did not take."""
        return self._backlog.memory

    @property
    def acked(self) -> int:
        """Frames up to this number are with the server, or set aside."""
        return self.files.state.acked

    @property
    def error(self) -> OSError | None:
        """Why the last write failed; None once one succeeded."""
        return self.files.error

    @property
    def _from_ticks(self) -> bool:
        """Whether the frame on its way is on the disk as ticks, not as a frame of the backlog."""
        return self._inflight is not None and self._backlog.carried is None

    @property
    def _unsaved(self) -> bool:
        """Whether ticks that are not acknowledged are in memory only."""
        state = self.files.state
        return self._not_on_disk > (state.mark_from if self._from_ticks else state.mark_upto)

    def next(self) -> Outgoing | None:
        """The oldest frame that is not acknowledged, its number and ticks written down first; None when there is
        none."""
        if self._inflight is not None:
            return self._inflight
        while self._backlog.kept:
            kept = self._backlog.kept[0]
            content = self._backlog.load(kept)
            if content is None:  # its file became unreadable since
                self._backlog.lose(kept)
                continue
            kept.sent = True
            self._backlog.carried = kept
            self._inflight, self._inflight_upto = Outgoing(kept.seq, *content), kept.upto
            return self._inflight
        if not self._pending.last:
            return None
        self.read_drafts()
        pending = self._pending  # it stays until all that may fail is done
        frame = Outgoing(self._take_seq(), merge(pending.groups), pending.events)
        first = max(self.files.state.mark_upto, self._inflight_upto)
        self._mark(frame.seq, first, pending.last)
        self._pending, self._inflight, self._inflight_upto = _Pending(), frame, pending.last
        return frame

    def frame(self, outgoing: Outgoing) -> Frame:
        """The frame as it travels."""
        header = self.header
        return Frame(
            project=header.project,
            run=header.run or "",
            source=header.source,
            attempt=header.attempt,
            rank=header.rank,
            seq=outgoing.seq,
            groups=outgoing.groups,
            events=outgoing.events,
            name=header.name,
            sent=time.time(),
            relayed=self.relayed,
        )

    def empty(self) -> Outgoing:
        """A frame without content: a sign of life. It is forgotten if the server does not take it."""
        seq = self._take_seq()
        upto = self.files.state.mark_upto
        self._mark(seq, upto, upto)
        return Outgoing(seq, [], [])

    def ack(self, seq: int) -> None:
        """The server has stored this frame (or refused it for good, or it was split): it need not be kept any
        longer."""
        kept, state = None, self.files.state
        if self._inflight is not None and self._inflight.seq == seq:
            if self.recording and self._from_ticks:
                self._backlog.put_down((seq, self._inflight_upto, False, self._inflight.groups, self._inflight.events))
            kept, self._backlog.carried, self._inflight = self._backlog.carried, None, None
        state.acked = max(state.acked, seq)
        if kept is not None:  # where its ticks are still there they must not look new once its file is gone
            state.mark_upto = max(state.mark_upto, kept.upto)
        self.files.write_state()
        if kept is not None:  # only now: with the file its number would be forgotten, and given to other samples
            self._backlog.forget(kept)
        self._collect()

    def split(self, seq: int) -> bool:
        """Replaces the frame in flight by two halves with new numbers; False when it is a single value or event."""
        frame = self._inflight
        if frame is None or frame.seq != seq or (two := halves(frame.groups, frame.events)) is None:
            return False
        parts: list[Part] = [(self._take_seq(), self._inflight_upto, False, groups, events) for groups, events in two]
        # They go to the end of the queue although they are older: an acknowledged number means "and all before".
        self._backlog.hold(parts, replaces=seq)
        self.ack(seq)
        return True

    def quarantine(self, seq: int, reason: str) -> bool:
        """Sets the frame in flight aside with the server's reason; True when the quarantine file took it."""
        frame = self._inflight
        if frame is None or frame.seq != seq:
            return False
        record = framed(FRAME, squeezed((0, [(seq, 0, False, frame.groups, frame.events)])))
        note = framed(REASON, _encoder.encode({"seq": seq, "reason": reason[:1000], "time": time.time()}))
        self.ack(seq)
        try:
            file = self.files.open_private("quarantine", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self.files.failed(error)
            return False
        try:
            size = os.fstat(file.fd).st_size
            if self.recording and self._set_aside(seq):  # by an earlier `perfagent sync`
                return True
            if size + len(record) + len(note) + len(MAGIC) > self._max_quarantine_bytes:
                return False
            write_whole(file.fd, size, (b"" if size else MAGIC) + note + record)
        except OSError as error:
            self.files.failed(error)
            return False
        finally:
            file.close()
        return True

    def _set_aside(self, seq: int) -> bool:
        """Whether the quarantine has this frame already."""
        data = (self.folder / "quarantine").read_bytes()
        return any(kind == REASON and _reason_decoder.decode(payload).seq == seq for _, kind, payload in records(data))

    def hold(self, *, now: float, force: bool = False) -> None:
        """While nothing can be sent: once a minute (or 2 MB) of ticks is together, one compressed frame replaces them;
        on a full disk it waits in memory, and the ticks go to make room for it."""
        self._notice_deleted()
        self._backlog.settle()
        pending = self._pending
        # the disk took something again: it gets all that it refused before
        better = self._unsaved and self.error is None
        due = pending.last and (force or better or now - pending.since >= KEEP_S or pending.size >= FRAME_BYTES)
        if not due:
            return
        self.read_drafts()
        frame = self._inflight
        if frame is not None and self._from_ticks:
            (kept,) = self._backlog.hold([(frame.seq, self._inflight_upto, False, frame.groups, frame.events)])
            kept.sent = True
            self._backlog.kept.rotate(1)  # it is the oldest
            self._backlog.carried = kept
        self._backlog.hold([(self._take_seq(), pending.last, False, merge(pending.groups), pending.events)])
        self._pending = _Pending()
        self.files.state.mark_upto = max(self.files.state.mark_upto, pending.last)
        self.files.rotate("ticks")
        self._collect()
        self._backlog.enforce_cap()

    def _notice_deleted(self) -> None:
        if self.files.deleted:
            self.files.deleted = False
            frame = self._inflight
            self._backlog.notice_deleted(None if frame is None else (frame.groups, frame.events))

    def _take_seq(self) -> int:
        seq = self.header.next_seq
        self.header.next_seq += 1
        return seq

    def _mark(self, seq: int, first: int, last: int) -> None:
        before = self.files.state
        self.files.state = State(before.acked, seq, first, last)
        try:
            written = self.files.write_state()
        except BaseException:
            self.files.state = before
            raise
        if not written:
            # Not written down that these ticks are part of `seq`: a successor would send them again under another
            # number. Deleting works on a full disk; they live in memory until they are acknowledged.
            self.files.rotate("ticks")
            for path, _ in self.files.old_ticks:
                self.files.delete(path)
            self.files.old_ticks.clear()
            self._not_on_disk = self.header.next_tick - 1

    # ---- files that are no longer needed

    def _collect(self) -> None:
        """Deletes files of which nothing is needed any more; a recording keeps its frames."""
        if (
            not self.recording
            and self.files.size("ticks") > TICKS_BYTES
            and not self._pending.last
            and self._inflight is None
        ):
            self.files.rotate("ticks")
        state = self.files.state
        covered = state.mark_from if self._from_ticks else state.mark_upto
        if self.recording:
            covered = max((kept.upto for kept in self._backlog.kept), default=0)
        for path, last in [*self.files.old_ticks]:
            if last <= covered:
                self.files.delete(path)
                self.files.old_ticks.remove((path, last))
        if (
            not self.recording
            and not self._backlog.kept
            and (path_of_frames := self.files.rotate("frames")) is not None
        ):
            self.files.delete(path_of_frames)

    # ---- ending

    def close(self, *, final: str = "") -> None:
        """Lets go of the lock. final: the source's last state, when it is in the spool (or was delivered). What is in
        memory only and finds no room on the disk even now is counted as dropped."""
        self.header.closed = final or self.header.closed
        self._notice_deleted()
        if self._unsaved or self.in_memory:
            self._save()
        if final:
            self.files.append_header("ticks")
        self.files.catch_up()
        self.abandon()

    def _save(self) -> None:
        """One more try with what the disk refused before, since nobody has it after us."""
        self.files.retry_at = 0.0
        frame = self._inflight
        if frame is not None and self._from_ticks:
            (self._backlog.carried,) = self._backlog.hold(
                [(frame.seq, self._inflight_upto, False, frame.groups, frame.events)]
            )
        self.hold(now=math.inf, force=True)
        for kept in [kept for kept in self._backlog.kept if kept.blob is not None]:
            self._backlog.lose(kept)

    def remove(self) -> None:
        """Deletes the folder of a source that has nothing left to send; a quarantine or a corrupt file keeps it, and so
        does a file that could not be read."""
        if self.counters["unreadable"]:
            self.abandon()
            return
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix in (".ticks", ".frames", ".thin"):
                    path.unlink()
            # after those: without it their samples look as if never sent
            (self.folder / "state").unlink(missing_ok=True)
            (self.folder / "lock").unlink()  # the last: from here on it is anybody's
            self.folder.rmdir()
        self.abandon()

    def forked(self) -> None:
        """In a forked child: closes the files without a word."""
        self.files.forked()

    def abandon(self) -> None:
        """Closes the files and does nothing else."""
        self.files.close()
