"""Keeps whole frames while the server is away: compressed, on disk, or in memory while the disk is full, within their
caps.

On disk above 80 % of the cap, and in memory above its own, the samples of the oldest frames go first, events and losses
that are not finite last. A frame that was sent before keeps its content, since the server may have it already.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from perfagent.delivery.byte_planes import columns, deflated, inflated, planes
from perfagent.delivery.columns import is_urgent
from perfagent.delivery.records import BAD_RECORD, FRAME, FRAMING, MAGIC, framed, records_in, replace_file
from perfagent.delivery.segments import Segments
from perfagent.wire import Event, Group

__all__ = ["Backlog", "Kept", "Outgoing", "frames_in", "halves", "squeezed"]


class Outgoing(msgspec.Struct):
    """One frame: number and content never change once it was handed out. upto: the last tick in it."""

    seq: int
    groups: list[Group]
    events: list[Event]
    upto: int = 0

    @property
    def samples(self) -> int:
        return sum(group.samples for group in self.groups)


_encoder = msgspec.msgpack.Encoder()
# (number of the frame that these replace or 0, frames): the halves of one that was too large stand in one record, so that
# either both of them or the whole one is read back; events are compressed
_decoder = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, int, bytes, bytes]]])
_events_decoder = msgspec.msgpack.Decoder(list[Event])


class Kept(msgspec.Struct):
    """A whole frame that waits: in memory as `blob`, else part `part` of the record at `offset`. reduced: its samples were
    taken out, to keep within a cap."""

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
    reduced: bool = False


class Backlog:
    """The waiting frames of one source, oldest first. memory: bytes of the frames that are in memory because the disk
    does not take them. carried: the frame that is on its way."""

    def __init__(self, files: Segments, *, max_bytes: int, max_memory_bytes: int, recording: bool) -> None:
        self._files, self._counters = files, files.counters
        self._max_bytes, self._max_memory_bytes, self._recording = max_bytes, max_memory_bytes, recording
        self.kept: deque[Kept] = deque()
        self.memory = 0
        self.carried: Kept | None = None

    # ---- putting in and taking out

    def hold(self, frames: list[Outgoing], *, replaces: int = 0) -> list[Kept]:
        """Keeps whole frames, in one record if the disk takes it, else in memory."""
        record = squeezed(frames, replaces)
        place = self._files.write("frames", framed(FRAME, record))
        kept = []
        for index, frame in enumerate(frames):
            one = _kept(frame, len(record))
            kept.append(one)
            if place:
                one.path, one.offset, one.part = self._files.growing("frames"), place - 1, index
            else:
                self._keep_in_memory(one, frame)
        self.kept.extend(kept)
        if not place:
            self._enforce_memory()
        return kept

    def _keep_in_memory(self, kept: Kept, frame: Outgoing) -> None:
        kept.blob = squeezed([frame])
        kept.size = len(kept.blob)
        self.memory += kept.size

    def load(self, kept: Kept) -> Outgoing | None:
        """A frame; None when its file became unreadable."""
        with contextlib.suppress(OSError, IndexError, StopIteration, *BAD_RECORD):
            blob = kept.blob
            if blob is None:
                assert kept.path is not None
                with kept.path.open("rb") as file:
                    file.seek(kept.offset)
                    *_, blob = next(records_in(file.read(FRAMING.size + kept.size), start=0))
            return _unsqueezed(blob)[1][kept.part]
        return None

    def lose(self, kept: Kept) -> None:
        """Counts a frame whose content is gone, and forgets it."""
        self._counters["dropped"] += kept.samples
        self._counters["dropped_events"] += kept.events
        self.forget(kept)

    def forget(self, kept: Kept) -> None:
        """The server has it. A file goes with the last of its frames, unless it grows still or is a recording."""
        with contextlib.suppress(ValueError):
            self.kept.remove(kept)
        if kept.blob is not None:
            self.memory -= len(kept.blob)
        elif kept.path is not None and not self._recording and kept.path != self._files.growing("frames"):
            self._delete_unless_needed(kept.path)

    def _delete_unless_needed(self, path: Path) -> None:
        if all(other.path != path for other in self.kept):
            self._files.delete(path)

    def settle(self) -> None:
        """Moves frames from memory to the disk, as far as it takes them."""
        for kept in self.kept if self.memory else ():
            if kept.blob is None:
                continue
            place = self._files.write("frames", framed(FRAME, kept.blob))
            if not place:
                return
            self.memory -= len(kept.blob)
            kept.path, kept.offset, kept.blob = self._files.growing("frames"), place - 1, None

    # ---- keeping within bounds

    def _enforce_memory(self) -> None:
        for left_of in (_pressing_of, _nothing_of):
            for kept in [*self.kept]:
                if self.memory <= self._max_memory_bytes:
                    return
                keeps = left_of is _pressing_of and (kept.sent or kept.reduced)
                if kept.blob is None or kept is self.carried or keeps or (frame := self.load(kept)) is None:
                    continue
                left = left_of(frame)
                self._reduce(kept, left)
                self.memory -= len(kept.blob)
                if left.groups or left.events:
                    self._keep_in_memory(kept, left)
                else:
                    self.kept.remove(kept)

    def enforce_cap(self) -> None:
        growing = self._files.growing("frames")
        for left_of in (_pressing_of, _nothing_of):
            for path in dict.fromkeys(kept.path for kept in self.kept):
                if self._files.on_disk <= 0.8 * self._max_bytes:
                    return
                if path not in (None, growing):
                    self._rewrite(path, left_of)

    def _rewrite(self, path: Path, left_of: Callable[[Outgoing], Outgoing]) -> None:
        """Puts what is left of its frames in a file's place."""
        members = [kept for kept in self.kept if kept.path == path]
        if all(kept.sent or (kept.reduced and left_of is _pressing_of) for kept in members):
            return
        out = bytearray(MAGIC + self._files.header_record())
        found: list[tuple[Kept, Outgoing, int, int]] = []
        for kept in members:
            frame = self.load(kept)
            if frame is None:
                self.lose(kept)
                continue
            left = frame if kept.sent else left_of(frame)
            blob = squeezed([left])
            found.append((kept, left, len(out), len(blob)))
            out += framed(FRAME, blob)
        if not found:
            return
        try:
            before = path.stat().st_size
            replace_file(path, bytes(out))
        except OSError as error:
            self._files.failed(error)
            for kept, *_ in found if left_of is _nothing_of else ():  # no room even for that
                self.lose(kept)
            return
        self._files.on_disk += len(out) - before
        for kept, left, kept.offset, kept.size in found:
            kept.part = 0
            self._reduce(kept, left)
            if not kept.samples and not kept.events and not kept.sent:
                self.kept.remove(kept)
        self._delete_unless_needed(path)

    def _reduce(self, kept: Kept, left: Outgoing) -> None:
        self._counters["dropped"] += kept.samples - left.samples
        self._counters["dropped_events"] += kept.events - len(left.events)
        kept.samples, kept.events, kept.reduced = left.samples, len(left.events), True


def _kept(frame: Outgoing, size: int) -> Kept:
    return Kept(frame.seq, frame.upto, frame.samples, len(frame.events), size)


def _pressing_of(frame: Outgoing) -> Outgoing:
    """The events, and the groups that hold a non-finite loss or gradient."""
    return Outgoing(frame.seq, [group for group in frame.groups if is_urgent(group)], frame.events, frame.upto)


def _nothing_of(frame: Outgoing) -> Outgoing:
    """For when even the events do not fit."""
    return Outgoing(frame.seq, [], [], frame.upto)


def squeezed(frames: Sequence[Outgoing], replaces: int = 0) -> bytes:
    """A record's payload. replaces: the number of the frame of which these are halves; 0: of none."""
    written = [(one.seq, one.upto, planes(one.groups), deflated(_encoder.encode(one.events))) for one in frames]
    return _encoder.encode((replaces, written))


def _unsqueezed(payload: bytes) -> tuple[int, list[Outgoing]]:
    """What `squeezed` made a payload of. Raises one of BAD_RECORD."""
    replaces, parts = _decoder.decode(payload)
    return replaces, [
        Outgoing(seq, columns(groups), _events_decoder.decode(inflated(events)), upto)
        for seq, upto, groups, events in parts
    ]


def frames_in(payload: bytes, path: Path, offset: int) -> tuple[int, list[Kept]]:
    """The frames in a record that a dead process left, and the number that they replace. Raises one of BAD_RECORD."""
    replaced, parts = _unsqueezed(payload)
    frames = [_kept(part, len(payload)) for part in parts]
    for index, one in enumerate(frames):
        one.path, one.offset, one.part = path, offset, index
    return replaced, frames


def halves(frame: Outgoing) -> tuple[Outgoing, Outgoing] | None:
    """Two frames, still without numbers, with half of the groups each, of a single group half of its rows, of a single row
    half of its values. Events go with the first half, and apart from a single row; of events alone half of them. None for a
    single value or event, which cannot be split."""
    groups, events = [group for group in frame.groups if group.rows], frame.events
    if len(groups) == 1 and (not events or groups[0].rows > 1):
        groups = _halves_of(groups[0])
    first: tuple[list[Group], list[Event]] = groups[: len(groups) // 2], events
    second: tuple[list[Group], list[Event]] = groups[len(groups) // 2 :], []
    if len(groups) == 1:
        first, second = (groups, []), ([], events)
    elif not groups:
        first, second = ([], events[: len(events) // 2]), ([], events[len(events) // 2 :])
    return (Outgoing(0, *first, frame.upto), Outgoing(0, *second, frame.upto)) if any(first) else None


def _halves_of(group: Group) -> list[Group]:
    def rows(begin: int, end: int) -> Group:
        def cut(column: bytes) -> bytes:
            width = len(column) // group.rows
            return column[begin * width : end * width]

        values = {name: cut(column) for name, column in group.values.items()}
        return Group(cut(group.step), cut(group.time), cut(group.monotonic), values)

    if middle := group.rows // 2:
        return [rows(0, middle), rows(middle, group.rows)]
    names = [*group.values]
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    values = [{name: group.values[name] for name in part} for part in parts if len(names) > 1]
    return [Group(group.step, group.time, group.monotonic, part) for part in values]
