"""Keeps whole frames while the server is away: compressed, on disk, or in memory while the disk is full, within their
caps.

On disk: above 80 % of the cap the oldest samples are thinned, then they go, and events go last. In memory: the oldest
samples go first, events last. A frame that was sent before keeps its content, since the server may have it already.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from perfagent.delivery.byte_planes import columns, deflated, inflated, planes
from perfagent.delivery.downsampling import Content, events_only, nothing, thin
from perfagent.delivery.segments import (
    BAD_RECORD,
    FRAME,
    FRAMING,
    HEADER,
    MAGIC,
    Segments,
    framed,
    records,
    write_whole,
)
from perfagent.process.descriptors import opened
from perfagent.wire import Event, Group

__all__ = ["Backlog", "Kept", "Part", "squeezed", "unsqueezed"]

Part = tuple[int, int, bool, list[Group], list[Event]]
"""seq, last tick in it, thinned, groups, events."""

_encoder = msgspec.msgpack.Encoder()
# (number of the frame that these replace or 0, parts): a frame is one of one, the halves of one that was too large
# stand in one record, so that either both of them or the whole one is read back; events are compressed
_decoder = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, int, bool, bytes, bytes]]])
_events_decoder = msgspec.msgpack.Decoder(list[Event])


class Kept(msgspec.Struct):
    """A whole frame that waits. blob: its bytes while it is in memory; else it is part `part` of the record at
    `offset`."""

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


class Backlog:
    """The waiting frames of one source, oldest first. counters: see Spool."""

    def __init__(
        self, files: Segments, counters: Counter[str], *, max_bytes: int, max_memory_bytes: int, recording: bool
    ) -> None:
        self.files, self.counters = files, counters
        self.max_bytes, self.max_memory_bytes, self.recording = max_bytes, max_memory_bytes, recording
        self.kept: deque[Kept] = deque()
        self.memory = 0
        """Bytes of the frames that are in memory because the disk does not take them."""
        self.carried: Kept | None = None
        """The one that is on its way."""

    # ---- putting in and taking out

    def hold(self, parts: list[Part], *, replaces: int = 0) -> list[Kept]:
        """Keeps whole frames, in one record if the disk takes it, else in memory."""
        kept = [
            Kept(seq, upto, sum(g.samples for g in groups), len(events), 0) for seq, upto, _, groups, events in parts
        ]
        record = squeezed((replaces, parts))
        place = self.files.append("frames", framed(FRAME, record))
        for index, one in enumerate(kept):
            if place:
                one.path, one.offset, one.part, one.size = self.files.growing("frames"), place - 1, index, len(record)
            else:
                one.blob = record if len(parts) == 1 else squeezed((0, [parts[index]]))
                one.size = len(one.blob)
                self.memory += one.size
        self.kept.extend(kept)
        if not place:
            self._enforce_memory()
        return kept

    def put_down(self, part: Part) -> None:
        """Writes down a frame of a recording that was made of ticks and sent: which of them it held is known of the
        last one only, and the next server gets it, too."""
        self.files.append("frames", framed(FRAME, squeezed((0, [part]))))

    def read(self, payload: bytes, path: Path, offset: int) -> tuple[int, list[Kept]]:
        """The frames in a record that a dead process left, and the number that they replace. Raises one of
        BAD_RECORD."""
        replaced, parts = unsqueezed(payload)
        return replaced, [
            Kept(
                seq,
                upto,
                sum(g.samples for g in groups),
                len(events),
                len(payload),
                path,
                offset,
                part=part,
                thinned=thinned,
            )
            for part, (seq, upto, thinned, groups, events) in enumerate(parts)
        ]

    def load(self, kept: Kept) -> Content | None:
        """What is in a frame; None when its file became unreadable."""
        try:
            blob = kept.blob
            if blob is None:
                assert kept.path is not None
                with kept.path.open("rb") as file:
                    file.seek(kept.offset)
                    found = next(records(file.read(FRAMING.size + kept.size), start=0), None)
                if found is None:
                    return None
                blob = found[2]
            _, _, _, groups, events = unsqueezed(blob)[1][kept.part]
        except (OSError, IndexError, *BAD_RECORD):
            return None
        return groups, events

    def lose(self, kept: Kept) -> None:
        """Counts a frame whose content is gone, and forgets it."""
        self.counters["dropped"] += kept.samples
        self.counters["dropped_events"] += kept.events
        self.forget(kept)

    def forget(self, kept: Kept) -> None:
        """The server has it. A file goes with the last of its frames, unless it grows still or is a recording."""
        with contextlib.suppress(ValueError):
            self.kept.remove(kept)
        if kept.blob is not None:
            self.memory -= len(kept.blob)
            return
        path = kept.path
        if path is None or self.recording or path == self.files.growing("frames"):
            return
        if all(other.path != path for other in self.kept):
            self.files.delete(path)

    def notice_deleted(self, carried: Content | None) -> None:
        """Somebody has deleted files. What is on its way is in memory still, and goes to the disk again; what was in
        the others is counted now, for nobody may ask for it before the end. carried: what is in the frame that is on
        its way."""
        for kept in [*self.kept]:
            if kept.path is None or not _is_gone(kept.path):
                continue
            if kept is not self.carried or carried is None:
                self.lose(kept)
                continue
            kept.blob, kept.path = squeezed((0, [(kept.seq, kept.upto, kept.thinned, *carried)])), None
            kept.part, kept.size = 0, len(kept.blob)
            self.memory += kept.size

    def settle(self) -> None:
        """Moves frames from memory to the disk, as far as it takes them."""
        if not self.memory:
            return
        for kept in self.kept:
            if kept.blob is None:
                continue
            place = self.files.append("frames", framed(FRAME, kept.blob))
            if not place:
                return
            self.memory -= len(kept.blob)
            kept.path, kept.offset, kept.part, kept.blob = self.files.growing("frames"), place - 1, 0, None

    # ---- keeping within bounds

    def _enforce_memory(self) -> None:
        for keep_events in (True, False):
            for kept in [*self.kept]:
                if self.memory <= self.max_memory_bytes:
                    return
                if kept.blob is None or kept is self.carried or (keep_events and (kept.sent or not kept.samples)):
                    continue
                content = self.load(kept)
                events = content[1] if content and keep_events else []
                self.counters["dropped"] += kept.samples
                self.counters["dropped_events"] += kept.events - len(events)
                self.memory -= len(kept.blob)
                if events:
                    kept.blob = squeezed((0, [(kept.seq, kept.upto, True, [], events)]))
                    kept.samples, kept.size, kept.thinned = 0, len(kept.blob), True
                    self.memory += len(kept.blob)
                else:
                    self.kept.remove(kept)

    def enforce_cap(self) -> None:
        """Above 80 % of the cap: thins the oldest files, then takes their samples, then their events."""
        for rewrite in (thin, events_only, nothing):
            growing = self.files.growing("frames")
            for path in dict.fromkeys(
                kept.path for kept in self.kept if kept.path is not None and kept.path != growing
            ):
                if self.files.on_disk <= 0.8 * self.max_bytes:
                    return
                self._rewrite(path, rewrite)

    def _rewrite(self, path: Path, rewrite: Callable[[list[Group], list[Event]], Content]) -> None:
        """Puts thinner frames of the same numbers in place of a file's own."""
        members = [kept for kept in self.kept if kept.path == path]
        if all(kept.sent or (kept.thinned and rewrite is thin) for kept in members):
            return
        out = bytearray(MAGIC + framed(HEADER, self.files.header_bytes()))
        changes: list[tuple[Kept, int, int, int, int]] = []
        unreadable: list[Kept] = []
        dropped_samples = dropped_events = 0
        for kept in members:
            content = self.load(kept)
            if content is None:
                unreadable.append(kept)
                continue
            groups, events = content if kept.sent else rewrite(*content)
            blob = squeezed((0, [(kept.seq, kept.upto, kept.thinned or not kept.sent, groups, events)]))
            samples = sum(group.samples for group in groups)
            dropped_samples += kept.samples - samples
            dropped_events += kept.events - len(events)
            changes.append((kept, len(out), samples, len(events), len(blob)))
            out += framed(FRAME, blob)
        try:
            grown = self._replace(path, bytes(out))
        except OSError as error:
            self.files.failed(error)
            if rewrite is not nothing:
                return
            for kept in members:  # no room even for that
                self.lose(kept)
            return
        self.files.on_disk += grown
        self.counters["thinned" if rewrite is thin else "dropped"] += dropped_samples
        self.counters["dropped_events"] += dropped_events
        for kept, offset, samples, events_left, size in changes:
            kept.offset, kept.part, kept.samples, kept.events, kept.size = offset, 0, samples, events_left, size
            kept.thinned = kept.thinned or not kept.sent
        for kept in unreadable:
            self.lose(kept)
        for kept in [kept for kept in members if not kept.samples and not kept.events and not kept.sent]:
            self.kept.remove(kept)
        if not any(kept.path == path for kept in self.kept):
            self.files.delete(path)

    def _replace(self, path: Path, data: bytes) -> int:
        """Puts other content in a file's place, whole or not at all; by how much it grew. Raises OSError."""
        new = path.with_suffix(".thin")
        try:
            before = path.stat().st_size
            file = opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                write_whole(file.fd, 0, data)
            finally:
                file.close()
            new.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        return len(data) - before


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # of a disk that may be well again
        return False
    return False


def squeezed(frame: tuple[int, list[Part]]) -> bytes:
    """A record's payload."""
    replaces, parts = frame
    written = [
        (seq, upto, thinned, planes(groups), deflated(_encoder.encode(events)))
        for seq, upto, thinned, groups, events in parts
    ]
    return _encoder.encode((replaces, written))


def unsqueezed(payload: bytes) -> tuple[int, list[Part]]:
    """What `squeezed` made a payload of. Raises one of BAD_RECORD."""
    replaces, parts = _decoder.decode(payload)
    return replaces, [
        (seq, upto, thinned, columns(groups), _events_decoder.decode(inflated(events)))
        for seq, upto, thinned, groups, events in parts
    ]
