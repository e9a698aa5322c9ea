"""Keeps whole frames on the disk while the server is away, compressed, within a cap.

Above 80 % of the cap the samples of the oldest frames go first, events and losses that are not finite last.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from perfagent.delivery.byte_planes import columns, deflated, inflated, planes
from perfagent.delivery.columns import is_urgent
from perfagent.delivery.records import BAD_RECORD, FRAME, FRAMING, framed, records_in
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
    """A whole frame that waits: part `part` of the record at `offset`, which has `size` bytes. reduced: its samples were
    taken out, to keep within the cap."""

    seq: int
    upto: int
    samples: int
    events: int
    path: Path
    offset: int
    size: int
    part: int = 0
    sent: bool = False
    reduced: bool = False


class Backlog:
    """The waiting frames of one source, oldest first. carried: the frame that is on its way."""

    def __init__(self, files: Segments, *, max_bytes: int, recording: bool) -> None:
        self._files, self._counters = files, files.counters
        self._max_bytes, self._recording = max_bytes, recording
        self.kept: deque[Kept] = deque()
        self.carried: Kept | None = None

    # ---- putting in and taking out

    def hold(self, frames: list[Outgoing], *, replaces: int = 0) -> list[Kept]:
        """Keeps whole frames, in one record; none where the disk does not take it."""
        record = squeezed(frames, replaces)
        place, path = self._files.write("frames", framed(FRAME, record)), self._files.growing["frames"].path
        kept = _kept(frames, path, place - 1, len(record)) if place and path is not None else []
        self.kept.extend(kept)
        return kept

    def load(self, kept: Kept) -> Outgoing | None:
        """A frame; None when its file became unreadable."""
        with contextlib.suppress(OSError, IndexError, StopIteration, *BAD_RECORD), kept.path.open("rb") as file:
            file.seek(kept.offset)
            *_, record = next(records_in(file.read(FRAMING.size + kept.size), start=0))
            return _unsqueezed(record)[1][kept.part]
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
        if not self._recording and kept.path != self._files.growing["frames"].path:
            self._delete_unless_needed(kept.path)

    def _delete_unless_needed(self, path: Path) -> None:
        if all(other.path != path for other in self.kept):
            self._files.delete(path)

    # ---- keeping within bounds

    def enforce_cap(self, take_seq: Callable[[], int]) -> None:
        """The events of the oldest files, and groups that hold a non-finite loss or gradient, become one frame behind the
        others; of a file of such frames nothing stays. take_seq: numbers for them."""
        growing = self._files.growing["frames"].path
        for path in dict.fromkeys(kept.path for kept in self.kept):
            members = [kept for kept in self.kept if kept.path == path]
            if self._files.on_disk <= 0.8 * self._max_bytes:
                return
            if path == growing or any(kept.sent for kept in members):
                continue
            rest = Outgoing(0, [], [], max(kept.upto for kept in members))
            for kept in members:
                if not kept.reduced and (frame := self.load(kept)) is not None:
                    rest.groups += filter(is_urgent, frame.groups)
                    rest.events += frame.events
                self.lose(kept)
            rest.seq = take_seq() if rest.groups or rest.events else 0
            for left in self.hold([rest]) if rest.seq else ():
                self._counters["dropped"] -= left.samples
                self._counters["dropped_events"] -= left.events
                left.reduced = True


def _kept(frames: Sequence[Outgoing], path: Path, offset: int, size: int) -> list[Kept]:
    return [
        Kept(one.seq, one.upto, one.samples, len(one.events), path, offset, size, part)
        for part, one in enumerate(frames)
    ]


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
    return replaced, _kept(parts, path, offset, len(payload))


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
