"""What an agent has measured and the server has not yet acknowledged, on disk: one folder a source, CRC-framed records.

    <root>/<source>/        0700, files 0600
      lock                  flock'ed by the process that owns the source; free means that its process is dead
      state                 two slots of 64 bytes, written in place: what was acknowledged, which ticks the frame in flight has
      00000001.ticks        what was drained every 200 ms; deleted when acknowledged or merged
      00000002.frames       whole frames, compressed: what piled up while the server was away (or, recording, everything)
      quarantine            frames that the server refused for good, with its reason (at most 16 MB)

**Exactly once in effect.** A frame's number and the ticks it holds are written down (`state`) before it is sent for the first
time. Whoever sends it again, this process or a later one, sends the same content under the same (source, seq), and the
server's ledger drops the second copy. `state` is overwritten in place because that needs no space on a full disk.

**A full or broken disk never reaches the caller.** Every write returns whether it succeeded; a short write is cut back, what
could not be written stays in memory within `max_memory_bytes`, and the owner reports it once.

Nothing here starts threads or talks to the network; one thread uses a spool at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import struct
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from perfagent.delivery.columns import is_urgent, merge
from perfagent.wire import Event, Frame, Group

__all__ = ["Header", "Outgoing", "Spool", "SpoolBusyError", "folders", "owner", "records"]

MAGIC = b"perfagent spool 1\n"
_FRAMING = struct.Struct("<IIc")  # length of the payload, CRC-32 of kind and payload, kind
_STATE = struct.Struct(
    "<QQQQQI"
)  # generation, acknowledged, marked seq, first tick of it - 1, last tick of it, CRC-32 of the rest
_SLOT = 64
HEADER, TICK, FRAME = b"H", b"T", b"F"

MAX_RECORD = 64 * 2**20
SEGMENT_BYTES = 8 * 2**20
FRAME_BYTES = 2 * 2**20  # raw columns: a frame is cut there at the latest (the server takes 8 MiB as sent, 32 MiB decoded)
TICK_BYTES = 16 * 2**20
KEEP_S = 60.0
QUARANTINE_BYTES = 16 * 2**20
THIN_ROWS = 16
TICKS_BYTES = 2**18


class SpoolBusyError(Exception):
    """Another process owns this source: its flock is held."""


@dataclass(slots=True, kw_only=True)
class Header:
    """Whose samples these are: first record of every file, and again when the run's id becomes known."""

    source: str
    project: str
    rank: int
    server: str | None
    run: str | None = None
    attempt: int = 0
    name: str | None = None
    pid: int = 0
    pid_start: int = 0
    """Start of the process in clock ticks after boot (/proc/PID/stat): tells a recycled pid apart."""
    started: float = 0.0
    next_seq: int = 1
    next_tick: int = 1
    closed: str = ""
    """The last state, where the process wrote one before it ended."""


@dataclass(slots=True)
class Outgoing:
    """One frame on its way: number and content never change once it was handed out."""

    seq: int
    groups: list[Group]
    events: list[Event]

    @property
    def samples(self) -> int:
        return sum(group.samples for group in self.groups)


@dataclass(slots=True)
class _Kept:
    """A whole frame that waits: in a file, or in memory while the disk is full."""

    seq: int
    upto: int
    samples: int
    events: int
    size: int
    path: Path | None = None
    offset: int = 0
    part: int = 0
    blob: bytes | None = None
    sent: bool = False
    thinned: bool = False


@dataclass(slots=True)
class _Pending:
    """Ticks that belong to no frame yet."""

    groups: list[Group] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    size: int = 0
    last: int = 0
    since: float = math.inf


@dataclass(slots=True)
class _Tick:
    number: int
    groups: list[Group]
    events: list[Event]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_tick_decoder = msgspec.msgpack.Decoder(tuple[int, list[Group], list[Event]])
# (number of the frame that these replace or 0, [(seq, last tick in it, thinned, groups, events), ...]): a frame is one of one,
# the halves of one that was too large stand in one record, so that either both of them or the whole one is read back
_Part = tuple[int, int, bool, list[Group], list[Event]]
_frame_decoder = msgspec.msgpack.Decoder(tuple[int, list[_Part]])
_BAD_RECORD = (msgspec.DecodeError, ValueError, RecursionError, zlib.error)


class Spool:
    """The unacknowledged frames of one source.

    `Spool(folder, header)` starts one (and never fails: without a usable disk it works in memory); `Spool.open(folder)` takes
    over what a dead process left. counters: "dropped" samples that no longer fit anywhere, "thinned" samples left out of old
    full-resolution data to keep within the cap, "dropped_events", "corrupt" files set aside, "disk_errors".
    """

    def __init__(
        self,
        folder: Path,
        header: Header,
        *,
        max_bytes: int = 512 * 2**20,
        max_memory_bytes: int = 8 * 2**20,
        recording: bool = False,
    ) -> None:
        self.folder, self.header = folder, header
        self.max_bytes = 2**62 if recording else max_bytes
        self.max_memory_bytes, self.recording = max_memory_bytes, recording
        self.counters: Counter[str] = Counter()
        self.error: OSError | None = None
        self.acked = 0
        self._marked, self._mark_from, self._mark_upto, self._generation = 0, 0, 0, 0
        self._next_seq, self._next_tick = 1, 1
        self._pending = _Pending()
        self._kept: deque[_Kept] = deque()
        self._inflight: Outgoing | None = None
        self._inflight_upto = 0
        self._inflight_kept: _Kept | None = None
        self._lock_fd = self._state_fd = self._ticks_fd = self._frames_fd = -1
        self._ticks_path: Path | None = None
        self._frames_path: Path | None = None
        self._ticks_size = self._frames_size = 0
        self._old_ticks: list[tuple[Path, int]] = []  # files of ticks no longer written, with the last tick in each
        self._file_number = 0
        self._retry_at = 0.0
        self._memory = 0
        self._disk = 0
        self._ready = False

    # ---- opening

    def create(self) -> bool:
        """Makes the folder and takes its lock. False (and `error`) when the disk does not allow it; try again later."""
        if self._ready:
            return True
        try:
            for missing in [p for p in (self.folder, *self.folder.parents) if not p.exists()][::-1]:
                missing.mkdir(mode=0o700, exist_ok=True)
            self._take_lock()
            with contextlib.suppress(OSError):  # on a full disk the watcher finds nothing, and the next start delivers
                os.ftruncate(self._lock_fd, 0)
                os.pwrite(self._lock_fd, f"{self.header.pid} {self.header.pid_start}".encode("ascii"), 0)
            self._state_fd = self._open_private("state", os.O_RDWR | os.O_CREAT)
            if os.fstat(self._state_fd).st_size < 2 * _SLOT:
                self._write_state()
            self._ready = True
        except OSError as error:
            self._failed(error)
            return False
        return True

    @classmethod
    def open(cls, folder: Path, *, max_bytes: int = 512 * 2**20, recording: bool = False) -> Spool:
        """Takes over a source whose process is gone. Raises SpoolBusyError while that process lives, and FileNotFoundError
        when the folder holds no source."""
        found = owner(folder)
        spool = cls(
            folder,
            found or Header(source=folder.name, project="default", rank=0, server=None),
            max_bytes=max_bytes,
            recording=recording,
        )
        try:
            spool._take_lock()
            if not folder.is_dir() or (found is None and not list(folder.glob("*.ticks")) and not list(folder.glob("*.frames"))):
                raise FileNotFoundError(f"{folder} holds no samples of perfagent")
            spool._recover()
        except BaseException:
            spool.abandon()
            raise
        return spool

    def _take_lock(self) -> None:
        self._lock_fd = self._open_private("lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            self._lock_fd = -1
            if isinstance(error, BlockingIOError):
                raise SpoolBusyError(f"{self.folder} belongs to a running process") from error
            raise

    def _open_private(self, name: str, flags: int) -> int:
        return os.open(self.folder / name, flags | os.O_CLOEXEC, 0o600)

    def _recover(self) -> None:
        """Reads everything that is whole; sets aside files with a broken middle; cuts torn tails."""
        self._state_fd = self._open_private("state", os.O_RDWR | os.O_CREAT)
        self._read_state()
        ticks: list[_Tick] = []
        frames: dict[int, _Kept] = {}
        replaced: set[int] = set()
        for path in sorted([*self.folder.glob("*.ticks"), *self.folder.glob("*.frames")], key=lambda p: p.name):
            self._file_number = max(self._file_number, _number_of(path))
            before = len(ticks)
            self._read_file(path, ticks, frames, replaced)
            if path.suffix == ".ticks":
                self._old_ticks.append((path, ticks[-1].number if len(ticks) > before else 0))
        kept = [frames[seq] for seq in sorted(frames) if seq > self.acked and seq not in replaced]
        covered = max((frame.upto for frame in frames.values()), default=0)
        held = [tick for tick in ticks if self._mark_from < tick.number <= self._mark_upto]
        if held and self._marked > self.acked and self._marked not in frames and self._marked not in replaced:
            self._inflight = Outgoing(self._marked, merge(g for t in held for g in t.groups), [e for t in held for e in t.events])
            self._inflight_upto = self._mark_upto
        covered = max(covered, self._mark_upto)
        self._kept.extend(kept)
        for tick in ticks:
            if tick.number > covered:
                self._add_pending(tick.groups, tick.events, tick.number)
        self._next_seq = max(self._next_seq, self.header.next_seq, self._marked + 1, self.acked + 1, *(seq + 1 for seq in frames))
        last = max((tick.number for tick in ticks), default=0)
        self._next_tick = max(self.header.next_tick, covered + 1, last + 1)
        self._ready = True

    def _read_file(self, path: Path, ticks: list[_Tick], frames: dict[int, _Kept], replaced: set[int]) -> None:
        """Collects the records of one file. A torn tail is cut off; where something else is broken, what is whole before it
        is read, the file is renamed to .corrupt, and the whole part is written anew under the old name."""
        try:
            data = path.read_bytes()
        except OSError as error:
            self._failed(error)
            return
        end = len(MAGIC) if data.startswith(MAGIC) else 0
        sound = True
        for offset, kind, payload in records(data):
            try:
                self._take_record(kind, payload, path, offset, ticks, frames, replaced)
            except _BAD_RECORD:
                sound = False
                break
            end = offset + _FRAMING.size + len(payload)
        self._disk += end
        if end == len(data):
            return
        with contextlib.suppress(OSError):
            if sound and _torn(data, end):
                os.truncate(path, end)
                return
            self.counters["corrupt"] += 1
            broken = path.with_name(path.name + ".corrupt")
            path.rename(broken)
            for kept in frames.values():
                if kept.path == path:
                    kept.path = broken
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._write(fd, 0, data[:end])
            finally:
                os.close(fd)
            for kept in frames.values():
                if kept.path == broken:
                    kept.path = path

    def _take_record(
        self,
        kind: bytes,
        payload: bytes,
        path: Path,
        offset: int,
        ticks: list[_Tick],
        frames: dict[int, _Kept],
        replaced: set[int],
    ) -> None:
        if kind == HEADER:
            header = _header_decoder.decode(payload)
            self._next_seq = max(self._next_seq, header.next_seq)
            self.header.next_tick = max(self.header.next_tick, header.next_tick)
            if header.run:
                self.header.run, self.header.attempt = header.run, header.attempt
            self.header.closed = self.header.closed or header.closed
        elif kind == TICK:
            ticks.append(_Tick(*_tick_decoder.decode(payload)))
        elif kind == FRAME:
            old, parts = _frame_decoder.decode(_inflate(payload))
            replaced.add(old)
            for part, (seq, upto, thinned, groups, events) in enumerate(parts):
                frames[seq] = _Kept(
                    seq, upto, sum(g.samples for g in groups), len(events), len(payload), path, offset, part=part, thinned=thinned
                )

    # ---- writing

    def identify(self, *, run: str, attempt: int, name: str | None, project: str) -> None:
        """The run's id became known (ranks above 0 learn it from rank 0)."""
        self.header.run, self.header.attempt, self.header.name, self.header.project = run, attempt, name, project
        for frames, fd in ((False, self._ticks_fd), (True, self._frames_fd)):
            if fd >= 0:
                self._append(_frame_record(HEADER, self._header_bytes()), frames=frames)

    def append(self, groups: list[Group], events: list[Event], *, now: float) -> bool:
        """Takes what one tick drained. True when it is on the disk; it is kept in memory for sending in either case."""
        if sum(map(_size, groups)) > TICK_BYTES and (halves := _halves(groups, events)) is not None:
            taken = [self.append(*half, now=now) for half in halves]
            return all(taken)
        number = self._next_tick
        self._next_tick += 1
        record = _frame_record(TICK, _encoder.encode((number, groups, events)))
        written = self._append(record, frames=False)
        self._add_pending(groups, events, number, now)
        return bool(written)

    def _add_pending(self, groups: list[Group], events: list[Event], number: int, now: float = -math.inf) -> None:
        pending = self._pending
        pending.groups.extend(groups)
        pending.events.extend(events)
        pending.size += sum(_size(group) for group in groups) + 256 * len(events)
        pending.last = number
        pending.since = min(pending.since, now)

    def _append(self, record: bytes, *, frames: bool) -> int:
        """Appends one record; its offset + 1, or 0 when the disk did not take it all (then none of it stays)."""
        now = time.monotonic()
        if now < self._retry_at or not self.create():
            return 0
        try:
            fd = self._frames_fd if frames else self._ticks_fd
            size = self._frames_size if frames else self._ticks_size
            if fd >= 0 and size + len(record) > SEGMENT_BYTES:
                self._rotate(frames=frames)
                fd = -1
            if fd < 0:
                fd = self._new_file(frames=frames)
                size = self._frames_size if frames else self._ticks_size
            self._write(fd, size, record)
        except OSError as error:
            self._failed(error)
            return 0
        self.error = None
        if frames:
            self._frames_size = size + len(record)
        else:
            self._ticks_size = size + len(record)
        self._disk += len(record)
        return size + 1

    def _write(self, fd: int, size: int, data: bytes) -> None:
        """All of the data, or none of it and OSError: a full disk writes a part before it says so."""
        written = 0
        try:
            while written < len(data):
                written += os.write(fd, memoryview(data)[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
                os.lseek(fd, size, os.SEEK_SET)
            raise

    def _new_file(self, *, frames: bool) -> int:
        self._file_number += 1
        path = self.folder / f"{self._file_number:08d}.{'frames' if frames else 'ticks'}"
        start = MAGIC + _frame_record(HEADER, self._header_bytes())
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._write(fd, 0, start)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if frames:
            self._frames_fd, self._frames_path, self._frames_size = fd, path, len(start)
        else:
            self._ticks_fd, self._ticks_path, self._ticks_size = fd, path, len(start)
        self._disk += len(start)
        return fd

    def _rotate(self, *, frames: bool) -> None:
        if frames:
            if self._frames_fd >= 0:
                os.close(self._frames_fd)
            self._frames_fd, self._frames_path = -1, None
        elif self._ticks_fd >= 0 and self._ticks_path is not None:
            os.close(self._ticks_fd)
            self._old_ticks.append((self._ticks_path, self._next_tick - 1))
            self._ticks_fd, self._ticks_path = -1, None

    def _header_bytes(self) -> bytes:
        self.header.next_seq, self.header.next_tick = self._next_seq, self._next_tick
        return _encoder.encode(self.header)

    def _failed(self, error: OSError) -> None:
        self.counters["disk_errors"] += 1
        self.error = error
        self._retry_at = time.monotonic() + 1.0

    def sync(self) -> None:
        """Asks the disk to keep what was written (power loss; a killed process loses nothing without this)."""
        for fd in (self._ticks_fd, self._frames_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.fdatasync(fd)

    # ---- sending

    @property
    def waiting(self) -> int:
        """How many frames wait, the ticks that belong to none yet counted as one."""
        return len(self._kept) + (self._inflight is not None and self._inflight_kept is None) + (self._pending.last > 0)

    @property
    def backlog(self) -> bool:
        """Whether whole frames wait beside the one that is just being filled."""
        return bool(self._kept) or self._inflight is not None

    @property
    def has_pending(self) -> bool:
        return self._pending.last > 0

    @property
    def on_disk(self) -> int:
        """Bytes in this source's files."""
        return self._disk

    def next(self) -> Outgoing | None:
        """The oldest frame that is not acknowledged, its number and ticks written down first; None when there is none."""
        if self._inflight is not None:
            return self._inflight
        while self._kept:
            kept = self._kept[0]
            content = self._load(kept)
            if content is None:  # its file became unreadable since
                self.counters["dropped"] += kept.samples
                self.counters["dropped_events"] += kept.events
                self._kept.popleft()
                continue
            kept.sent = True
            self._inflight, self._inflight_kept, self._inflight_upto = Outgoing(kept.seq, *content), kept, kept.upto
            return self._inflight
        if not self._pending.last:
            return None
        pending, self._pending = self._pending, _Pending()
        frame = Outgoing(self._take_seq(), merge(pending.groups), pending.events)
        first = max(self._mark_upto, self._inflight_upto)
        self._mark(frame.seq, first, pending.last)
        self._inflight, self._inflight_kept, self._inflight_upto = frame, None, pending.last
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
        )

    def empty(self) -> Outgoing:
        """A frame without content: a sign of life. It is forgotten if the server does not take it."""
        seq = self._take_seq()
        self._mark(seq, self._mark_upto, self._mark_upto)
        return Outgoing(seq, [], [])

    def ack(self, seq: int) -> None:
        """The server has stored this frame (or refused it for good, or it was split): it need not be kept any longer."""
        if self._inflight is not None and self._inflight.seq == seq:
            if self._inflight_kept is not None:
                self._forget(self._inflight_kept)
            self._inflight = self._inflight_kept = None
        self.acked = max(self.acked, seq)
        self._write_state()
        self._collect()

    def split(self, seq: int) -> bool:
        """Replaces the frame in flight by two halves with new numbers; False when it is a single row or event."""
        frame = self._inflight
        if frame is None or frame.seq != seq:
            return False
        halves = _halves(frame.groups, frame.events)
        if halves is None:
            return False
        upto = self._inflight_upto
        parts: list[_Part] = [(self._take_seq(), upto, False, groups, events) for groups, events in halves]
        # They go to the end of the queue although they are older: an acknowledged number means "and all before".
        self._hold(parts, replaces=seq)
        self.ack(seq)
        return True

    def quarantine(self, seq: int, reason: str) -> bool:
        """Sets the frame in flight aside with the server's reason; True when the quarantine file took it."""
        frame = self._inflight
        if frame is None or frame.seq != seq:
            return False
        record = _frame_record(FRAME, _squeeze((0, [(seq, 0, False, frame.groups, frame.events)])))
        note = _frame_record(b"R", _encoder.encode({"seq": seq, "reason": reason[:1000], "time": time.time()}))
        self.ack(seq)
        try:
            fd = self._open_private("quarantine", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._failed(error)
            return False
        try:
            size = os.fstat(fd).st_size
            if size + len(record) + len(note) + len(MAGIC) > QUARANTINE_BYTES:
                return False
            self._write(fd, size, (b"" if size else MAGIC) + note + record)
        except OSError as error:
            self._failed(error)
            return False
        finally:
            os.close(fd)
        return True

    def hold(self, *, now: float, force: bool = False) -> None:
        """While nothing can be sent: once a minute (or 2 MB) of ticks is together, one compressed frame replaces them."""
        self._settle_memory()
        pending = self._pending
        due = pending.last and (force or now - pending.since >= KEEP_S or pending.size >= FRAME_BYTES)
        if not due:
            return
        if self._inflight is not None and self._inflight_kept is None:
            frame = self._inflight
            (kept,) = self._hold([(frame.seq, self._inflight_upto, False, frame.groups, frame.events)])
            kept.sent = True
            self._kept.rotate(1)  # it is the oldest
            self._inflight_kept = kept
        self._pending = _Pending()
        self._hold([(self._take_seq(), pending.last, False, merge(pending.groups), pending.events)])
        self._mark_upto = max(self._mark_upto, pending.last)
        self._rotate(frames=False)
        self._collect()
        self._enforce_cap()

    def _hold(self, parts: list[_Part], *, replaces: int = 0) -> list[_Kept]:
        """Keeps whole frames, in one record if the disk takes it, else in memory."""
        kept = [_Kept(seq, upto, sum(g.samples for g in groups), len(events), 0) for seq, upto, _, groups, events in parts]
        record = _squeeze((replaces, parts))
        place = self._append(_frame_record(FRAME, record), frames=True)
        for index, one in enumerate(kept):
            if place:
                one.path, one.offset, one.part, one.size = self._frames_path, place - 1, index, len(record)
            else:
                one.blob = record if len(parts) == 1 else _squeeze((0, [parts[index]]))
                one.size = len(one.blob)
                self._memory += one.size
        self._kept.extend(kept)
        if not place:
            self._enforce_memory()
        return kept

    def _settle(self, kept: _Kept) -> bool:
        """Moves a frame from memory to the disk, if the disk takes it."""
        if kept.blob is None:
            return True
        place = self._append(_frame_record(FRAME, kept.blob), frames=True)
        if not place:
            return False
        self._memory -= len(kept.blob)
        kept.path, kept.offset, kept.blob = self._frames_path, place - 1, None
        return True

    def _settle_memory(self) -> None:
        if self._memory:
            for kept in self._kept:
                if not self._settle(kept):
                    return

    def _load(self, kept: _Kept) -> tuple[list[Group], list[Event]] | None:
        try:
            blob = kept.blob
            if blob is None:
                assert kept.path is not None
                with kept.path.open("rb") as file:
                    file.seek(kept.offset)
                    found = next(records(file.read(_FRAMING.size + kept.size), start=0), None)
                if found is None:
                    return None
                blob = found[2]
            _, _, _, groups, events = _frame_decoder.decode(_inflate(blob))[1][kept.part]
        except (OSError, IndexError, *_BAD_RECORD):
            return None
        return groups, events

    def _take_seq(self) -> int:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return seq

    # ---- state: what was acknowledged, what is in flight

    def _mark(self, seq: int, first: int, last: int) -> None:
        self._marked, self._mark_from, self._mark_upto = seq, first, last
        if not self._write_state() and self._ticks_path is not None:
            # Not written down that these ticks are part of `seq`: a successor would send them again under another number.
            # Deleting works on a full disk; they live in memory until they are acknowledged.
            self._rotate(frames=False)
            for path, _ in self._old_ticks:
                self._delete(path)
            self._old_ticks.clear()

    def _write_state(self) -> bool:
        if self._state_fd < 0:
            return False
        self._generation += 1
        body = struct.pack("<QQQQQ", self._generation, self.acked, self._marked, self._mark_from, self._mark_upto)
        slot = body + struct.pack("<I", zlib.crc32(body))
        try:
            os.pwrite(self._state_fd, slot.ljust(_SLOT, b"\0"), _SLOT * (self._generation % 2))
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _read_state(self) -> None:
        best: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            data = os.pread(self._state_fd, 2 * _SLOT, 0)
            for offset in (0, _SLOT):
                slot = data[offset : offset + _STATE.size]
                if len(slot) == _STATE.size and zlib.crc32(slot[:-4]) == _STATE.unpack(slot)[-1]:
                    best = max(best, _STATE.unpack(slot))
        if best:
            self._generation, self.acked, self._marked, self._mark_from, self._mark_upto, _ = best

    # ---- keeping within bounds

    def _forget(self, kept: _Kept) -> None:
        with contextlib.suppress(ValueError):
            self._kept.remove(kept)
        if kept.blob is not None:
            self._memory -= len(kept.blob)
            return
        path = kept.path
        if (
            path is not None
            and not self.recording
            and path != self._frames_path
            and all(other.path != path for other in self._kept)
        ):
            self._delete(path)

    def _collect(self) -> None:
        """Deletes files of which nothing is needed any more; a recording keeps its frames."""
        if not self.recording and self._ticks_size > TICKS_BYTES and not self._pending.last and self._inflight is None:
            self._rotate(frames=False)
        from_ticks = self._inflight is not None and self._inflight_kept is None
        covered = self._mark_from if from_ticks else self._mark_upto
        if self.recording:
            covered = max((kept.upto for kept in self._kept), default=0)
        for path, last in [*self._old_ticks]:
            if last <= covered:
                self._delete(path)
                self._old_ticks.remove((path, last))
        if not self.recording and not self._kept and self._frames_path is not None:
            path = self._frames_path
            self._rotate(frames=True)
            self._delete(path)

    def _delete(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._disk -= size

    def _enforce_memory(self) -> None:
        """Memory holds at most `max_memory_bytes`: the oldest samples go first, events last."""
        for keep_events in (True, False):
            for kept in [*self._kept]:
                if self._memory <= self.max_memory_bytes:
                    return
                if kept.blob is None or kept is self._inflight_kept or (keep_events and not kept.samples):
                    continue
                content = self._load(kept)
                events = content[1] if content and keep_events else []
                self.counters["dropped"] += kept.samples
                self.counters["dropped_events"] += kept.events - len(events)
                self._memory -= len(kept.blob)
                if events and not kept.sent:
                    kept.blob = _squeeze((0, [(kept.seq, kept.upto, True, [], events)]))
                    kept.samples, kept.size, kept.thinned = 0, len(kept.blob), True
                    self._memory += len(kept.blob)
                else:
                    self._kept.remove(kept)

    def _enforce_cap(self) -> None:
        """Above 80 % of the cap the oldest full-resolution samples are thinned; what even that cannot hold goes, events last."""
        if self._disk <= 0.8 * self.max_bytes:
            return
        for rewrite in (_thin, _events_only, _nothing):
            paths = dict.fromkeys(kept.path for kept in self._kept if kept.path is not None and kept.path != self._frames_path)
            for path in paths:
                if self._disk <= 0.8 * self.max_bytes:
                    return
                self._rewrite(path, rewrite)

    def _rewrite(self, path: Path, rewrite: Any) -> None:
        """Puts thinner frames of the same numbers in place of a file's own. Frames that were sent before stay as they are."""
        members = [kept for kept in self._kept if kept.path == path]
        if all(kept.sent or (kept.thinned and rewrite is _thin) for kept in members):
            return
        out = bytearray(MAGIC + _frame_record(HEADER, self._header_bytes()))
        changes: list[tuple[_Kept, int, int, int, int, bool]] = []
        dropped_samples = dropped_events = 0
        for kept in members:
            content = self._load(kept)
            if content is None:
                continue
            groups, events = content
            if not kept.sent:
                groups, events = rewrite(groups, events)
            blob = _squeeze((0, [(kept.seq, kept.upto, kept.thinned or not kept.sent, groups, events)]))
            samples = sum(group.samples for group in groups)
            dropped_samples += kept.samples - samples
            dropped_events += kept.events - len(events)
            changes.append((kept, len(out), samples, len(events), len(blob), not kept.sent))
            out += _frame_record(FRAME, blob)
        new = path.with_suffix(".thin")
        try:
            before = path.stat().st_size
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._write(fd, 0, bytes(out))
            finally:
                os.close(fd)
            new.replace(path)
        except OSError as error:
            self._failed(error)
            with contextlib.suppress(OSError):
                new.unlink()
            if rewrite is not _nothing:
                return
            self._delete(path)  # no room even for that
            for kept in members:
                self._kept.remove(kept)
                self.counters["dropped"] += kept.samples
                self.counters["dropped_events"] += kept.events
            return
        self._disk += len(out) - before
        self.counters["thinned" if rewrite is _thin else "dropped"] += dropped_samples
        self.counters["dropped_events"] += dropped_events
        for kept, offset, samples, events_left, size, thinned in changes:
            kept.offset, kept.part, kept.samples, kept.events, kept.size = offset, 0, samples, events_left, size
            kept.thinned = kept.thinned or thinned
        for kept in [kept for kept in members if not kept.samples and not kept.events and not kept.sent]:
            self._kept.remove(kept)
        if not any(kept.path == path for kept in self._kept):
            self._delete(path)

    # ---- ending

    def close(self, *, final: str = "") -> None:
        """Lets go of the lock. final: the source's last state, when it is in the spool (or was delivered)."""
        self.header.closed = final or self.header.closed
        if final:
            self._append(_frame_record(HEADER, self._header_bytes()), frames=False)
        self.abandon()

    def remove(self) -> None:
        """Deletes the folder of a source that has nothing left to send; a quarantine or a corrupt file keeps it."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix in (".ticks", ".frames", ".thin") or path.name in ("state", "lock"):
                    path.unlink()
            self.folder.rmdir()
        self.abandon()

    def forked(self) -> None:
        """In a forked child: closes the files, also one that the parent's thread had opened but not yet noted down."""
        self.abandon()
        mine = str(self.folder) + os.sep
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}").startswith(mine):  # noqa: PTH115
                        os.close(int(name))

    def abandon(self) -> None:
        """Closes the files and does nothing else."""
        for name in ("_ticks_fd", "_frames_fd", "_state_fd", "_lock_fd"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._ready = False
        self._retry_at = math.inf


def records(data: bytes, *, start: int | None = None) -> Iterator[tuple[int, bytes, bytes]]:
    """(offset, kind, payload) of the whole records in a file's bytes. Behind a broken record nothing is looked for: its length
    cannot be trusted."""
    offset = (len(MAGIC) if data.startswith(MAGIC) else len(data)) if start is None else start
    while offset + _FRAMING.size <= len(data):
        length, crc, kind = _FRAMING.unpack_from(data, offset)
        end = offset + _FRAMING.size + length
        if length > MAX_RECORD or end > len(data):
            return
        payload = data[offset + _FRAMING.size : end]
        if zlib.crc32(payload, zlib.crc32(kind)) != crc:
            return
        yield offset, kind, payload
        offset = end


def _squeeze(frame: tuple[int, list[_Part]]) -> bytes:
    # Level 6 gains under 2 % over level 1 on such columns and takes several times as long (measured).
    return zlib.compress(_encoder.encode(frame), 1)


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    plain = inflater.decompress(data, MAX_RECORD)
    if not inflater.eof:
        raise ValueError(f"a frame of more than {MAX_RECORD} bytes")
    return plain


def _frame_record(kind: bytes, payload: bytes) -> bytes:
    return _FRAMING.pack(len(payload), zlib.crc32(payload, zlib.crc32(kind)), kind) + payload


def _torn(data: bytes, end: int) -> bool:
    """Whether what follows the last whole record is the beginning of one that was being written, and not damage."""
    if not data.startswith(MAGIC):
        return MAGIC.startswith(data)
    rest = len(data) - end
    if rest < _FRAMING.size:
        return True
    length, _, kind = _FRAMING.unpack_from(data, end)
    return kind in (HEADER, TICK, FRAME) and length <= MAX_RECORD and end + _FRAMING.size + length > len(data)


def owner(folder: Path) -> Header | None:
    """The newest header in a source's folder, without taking its lock; None where there is none."""
    found: Header | None = None
    for path in sorted([*folder.glob("*.ticks"), *folder.glob("*.frames"), *folder.glob("*.corrupt")], key=lambda p: p.name):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        for _, kind, payload in records(data):
            if kind == HEADER:
                with contextlib.suppress(*_BAD_RECORD):
                    header = _header_decoder.decode(payload)
                    if found is not None and not header.run:
                        header.run, header.attempt = found.run, found.attempt
                    found = header
    return found


def folders(root: Path, *, max_age_s: float = math.inf) -> list[Path]:
    """The folders of sources under a root, oldest first, as far as something in them is younger than `max_age_s`."""
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            with contextlib.suppress(OSError):
                if not folder.is_dir() or not _holds_source(folder):
                    continue
                touched = max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
                if time.time() - touched <= max_age_s:
                    found.append((touched, folder))
    return [folder for _, folder in sorted(found)]


def _holds_source(folder: Path) -> bool:
    return any(path.suffix in (".ticks", ".frames") for path in folder.iterdir())


def _number_of(path: Path) -> int:
    match = re.match(r"\d+", path.name)
    return int(match.group()) if match else 0


def _size(group: Group) -> int:
    return 3 * len(group.step) + sum(map(len, group.values.values()))


def _halves(
    groups: Sequence[Group], events: Sequence[Event]
) -> tuple[tuple[list[Group], list[Event]], tuple[list[Group], list[Event]]] | None:
    rows = sum(group.rows for group in groups)
    if rows + len(events) <= 1:
        return None
    goal = rows // 2
    left: list[Group] = []
    right: list[Group] = []
    for group in groups:
        take = min(goal, group.rows)
        goal -= take
        if take:
            left.append(_rows(group, range(take)))
        if take < group.rows:
            right.append(_rows(group, range(take, group.rows)))
    middle = len(events) // 2 if rows <= 1 else len(events)
    if rows == 1 and events:  # the row by itself, then the events
        return (list(groups), []), ([], list(events))
    return (left, list(events[:middle])), (right, list(events[middle:]))


def _rows(group: Group, rows: Sequence[int]) -> Group:
    def pick(column: bytes) -> bytes:
        width = len(column) // group.rows
        if isinstance(rows, range):
            return column[rows.start * width : rows.stop * width]
        return b"".join(column[row * width : (row + 1) * width] for row in rows)

    return Group(
        step=pick(group.step),
        time=pick(group.time),
        monotonic=pick(group.monotonic),
        values={name: pick(column) for name, column in group.values.items()},
    )


def _thin(groups: list[Group], events: list[Event]) -> tuple[list[Group], list[Event]]:
    """Of every 16 rows: the first, those with the extremes of the leading column, and all that hold a non-finite value."""
    thinned = []
    for group in groups:
        lead = group.column("loss" if "loss" in group.values else next(iter(group.values)))
        keep: set[int] = set()
        for start in range(0, group.rows, THIN_ROWS):
            rows = range(start, min(start + THIN_ROWS, group.rows))
            keep |= {rows[0], min(rows, key=lead.__getitem__), max(rows, key=lead.__getitem__)}
        for name in group.values:
            column = group.column(name)
            if not math.isfinite(sum(column)):
                keep |= {row for row, value in enumerate(column) if not math.isfinite(value)}
        thinned.append(_rows(group, sorted(keep)))
    return thinned, events


def _events_only(groups: list[Group], events: list[Event]) -> tuple[list[Group], list[Event]]:
    return [group for group in groups if is_urgent(group)], events


def _nothing(groups: list[Group], events: list[Event]) -> tuple[list[Group], list[Event]]:  # noqa: ARG001
    return [], []
