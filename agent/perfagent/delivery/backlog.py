"""Keeps whole frames while the server is away: compressed, on disk, or in memory while the disk is full, within their
caps.

On disk: above 80 % of the cap the oldest samples are thinned, then they go, and events go last. In memory: the oldest
samples go first, events last. A frame that was sent before keeps its content, since the server may have it already.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from perfagent.delivery.byte_planes import columns, deflated, inflated, planes
from perfagent.delivery.columns import is_urgent
from perfagent.delivery.records import BAD_RECORD, FRAME, FRAMING, MAGIC, framed, records_in, replace_file
from perfagent.delivery.segments import Segments
from perfagent.wire import Event, Group

__all__ = ["Backlog", "Kept", "Part", "events_only", "frames_in", "halves", "nothing", "squeezed", "thin"]

THIN_ROWS = 16
Content = tuple[list[Group], list[Event]]
Part = tuple[int, int, bool, list[Group], list[Event]]
"""seq, last tick in it, thinned, groups, events."""

_encoder = msgspec.msgpack.Encoder()
# (number of the frame that these replace or 0, parts): a frame is one of one, the halves of one that was too large
# stand in one record, so that either both of them or the whole one is read back; events are compressed
_decoder = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, int, bool, bytes, bytes]]])
_events_decoder = msgspec.msgpack.Decoder(list[Event])


class Kept(msgspec.Struct):
    """A whole frame that waits: in memory as `blob`, else part `part` of the record at `offset`."""

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
    """The waiting frames of one source, oldest first. memory: bytes of the frames that are in memory because the disk
    does not take them. carried: the frame that is on its way."""

    def __init__(self, files: Segments, *, max_bytes: int, max_memory_bytes: int, recording: bool) -> None:
        self._files, self._counters = files, files.counters
        self._max_bytes, self._max_memory_bytes, self._recording = max_bytes, max_memory_bytes, recording
        self.kept: deque[Kept] = deque()
        self.memory = 0
        self.carried: Kept | None = None

    # ---- putting in and taking out

    def hold(self, parts: list[Part], *, replaces: int = 0) -> list[Kept]:
        """Keeps whole frames, in one record if the disk takes it, else in memory."""
        record = squeezed(replaces, parts)
        place = self._files.write("frames", framed(FRAME, record))
        kept = []
        for index, part in enumerate(parts):
            one = _kept(part, len(record))
            kept.append(one)
            if place:
                one.path, one.offset, one.part = self._files.growing("frames"), place - 1, index
            else:
                self._keep_in_memory(one, part)
        self.kept.extend(kept)
        if not place:
            self._enforce_memory()
        return kept

    def _keep_in_memory(self, kept: Kept, part: Part) -> None:
        kept.path, kept.part, kept.blob = None, 0, squeezed(0, [part])
        kept.size = len(kept.blob)
        self.memory += kept.size

    def put_down(self, part: Part) -> None:
        """Writes down a sent frame of a recording that was made of ticks: the next server gets it, too."""
        self._files.write("frames", framed(FRAME, squeezed(0, [part])))

    def load(self, kept: Kept) -> Content | None:
        """What is in a frame; None when its file became unreadable."""
        with contextlib.suppress(OSError, IndexError, StopIteration, *BAD_RECORD):
            blob = kept.blob
            if blob is None:
                assert kept.path is not None
                with kept.path.open("rb") as file:
                    file.seek(kept.offset)
                    *_, blob = next(records_in(file.read(FRAMING.size + kept.size), start=0))
            *_, groups, events = _unsqueezed(blob)[1][kept.part]
            return groups, events
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

    def notice_deleted(self, carried: Content | None) -> None:
        """Somebody has deleted files. The frame on its way is still in memory (`carried`) and goes to the disk again; what
        was in the others is counted as lost."""
        for kept in [*self.kept]:
            if kept.path is None or not _is_gone(kept.path):
                continue
            if kept is self.carried and carried is not None:
                self._keep_in_memory(kept, (kept.seq, kept.upto, kept.thinned, *carried))
            else:
                self.lose(kept)

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
        for keep_events in (True, False):
            for kept in [*self.kept]:
                if self.memory <= self._max_memory_bytes:
                    return
                if kept.blob is None or kept is self.carried or (keep_events and (kept.sent or not kept.samples)):
                    continue
                content = self.load(kept)
                events = content[1] if content and keep_events else []
                self._counters["dropped"] += kept.samples
                self._counters["dropped_events"] += kept.events - len(events)
                self.memory -= len(kept.blob)
                kept.samples, kept.thinned = 0, True
                if events:
                    self._keep_in_memory(kept, (kept.seq, kept.upto, True, [], events))
                else:
                    self.kept.remove(kept)

    def enforce_cap(self) -> None:
        """Above 80 % of the cap: thins the oldest files, then takes their samples, then their events."""
        growing = self._files.growing("frames")
        for rewrite in (thin, events_only, nothing):
            for path in dict.fromkeys(kept.path for kept in self.kept):
                if self._files.on_disk <= 0.8 * self._max_bytes:
                    return
                if path not in (None, growing):
                    self._rewrite(path, rewrite)

    def _rewrite(self, path: Path, rewrite: Callable[[list[Group], list[Event]], Content]) -> None:
        """Puts thinner frames of the same numbers in place of a file's own."""
        members = [kept for kept in self.kept if kept.path == path]
        if all(kept.sent or (kept.thinned and rewrite is thin) for kept in members):
            return
        out = bytearray(MAGIC + self._files.header_record())
        thinner: list[tuple[Kept, Kept]] = []
        for kept in members:
            content = self.load(kept)
            if content is None:
                self.lose(kept)
                continue
            part = kept.seq, kept.upto, kept.thinned or not kept.sent, *(content if kept.sent else rewrite(*content))
            blob = squeezed(0, [part])
            new = _kept(part, len(blob))
            new.offset = len(out)
            thinner.append((kept, new))
            out += framed(FRAME, blob)
        if not thinner:
            return
        try:
            before = path.stat().st_size
            replace_file(path, bytes(out))
        except OSError as error:
            self._files.failed(error)
            for kept, _ in thinner if rewrite is nothing else ():  # no room even for that
                self.lose(kept)
            return
        self._files.on_disk += len(out) - before
        for kept, new in thinner:
            self._counters["thinned" if rewrite is thin else "dropped"] += kept.samples - new.samples
            self._counters["dropped_events"] += kept.events - new.events
            kept.offset, kept.part, kept.size, kept.thinned = new.offset, 0, new.size, new.thinned
            kept.samples, kept.events = new.samples, new.events
            if not kept.samples and not kept.events and not kept.sent:
                self.kept.remove(kept)
        self._delete_unless_needed(path)


def _kept(part: Part, size: int) -> Kept:
    seq, upto, thinned, groups, events = part
    return Kept(seq, upto, sum(group.samples for group in groups), len(events), size, thinned=thinned)


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # of a disk that may be well again
        return False
    return False


def squeezed(replaces: int, parts: list[Part]) -> bytes:
    """A record's payload. replaces: the number of the frame of which these are halves; 0: of none."""
    written = [
        (seq, upto, thinned, planes(groups), deflated(_encoder.encode(events)))
        for seq, upto, thinned, groups, events in parts
    ]
    return _encoder.encode((replaces, written))


def _unsqueezed(payload: bytes) -> tuple[int, list[Part]]:
    """What `squeezed` made a payload of. Raises one of BAD_RECORD."""
    replaces, parts = _decoder.decode(payload)
    return replaces, [
        (seq, upto, thinned, columns(groups), _events_decoder.decode(inflated(events)))
        for seq, upto, thinned, groups, events in parts
    ]


def frames_in(payload: bytes, path: Path, offset: int) -> tuple[int, list[Kept]]:
    """The frames in a record that a dead process left, and the number that they replace. Raises one of BAD_RECORD."""
    replaced, parts = _unsqueezed(payload)
    frames = [_kept(part, len(payload)) for part in parts]
    for index, one in enumerate(frames):
        one.path, one.offset, one.part = path, offset, index
    return replaced, frames


# ---- less of a frame


def halves(groups: Sequence[Group], events: Sequence[Event]) -> tuple[Content, Content] | None:
    """Splits the content of a frame into two parts.

    Several rows: half of the rows with all events, and the other half. A single row with events: the row, and the
    events. A single row alone: half of its columns, and the other half. Events alone: half of them, and the other half.
    None for a single value or event, which cannot be split.
    """
    groups = [group for group in groups if group.rows]
    rows = sum(group.rows for group in groups)
    if rows == 0:
        middle = len(events) // 2
        return (([], [*events[:middle]]), ([], [*events[middle:]])) if middle else None
    if rows == 1 and events:
        return (groups, []), ([], [*events])
    if rows == 1:
        (row,) = groups
        names = [*row.values]
        middle = len(names) // 2
        left, right = (
            Group(row.step, row.time, row.monotonic, {name: row.values[name] for name in half})
            for half in (names[:middle], names[middle:])
        )
        return (([left], []), ([right], [])) if middle else None
    first: list[Group] = []
    second: list[Group] = []
    goal = rows // 2
    for group in groups:
        taken = min(goal, group.rows)
        goal -= taken
        first.append(_rows(group, range(taken)))
        second.append(_rows(group, range(taken, group.rows)))
    return ([group for group in first if group.rows], [*events]), ([group for group in second if group.rows], [])


def thin(groups: list[Group], events: list[Event]) -> Content:
    """Keeps a few of every 16 rows: the first, the two with the lowest and the highest finite loss (or first column, in
    a group without a loss), and every row that holds a NaN or an infinity."""
    thinned = []
    for group in groups:
        lead = group.column("loss" if "loss" in group.values else next(iter(group.values)))
        keep = {*range(0, group.rows, THIN_ROWS)}
        for start in range(0, group.rows, THIN_ROWS):
            # a NaN would be both extremes: nothing is less than it
            finite = [row for row in range(start, min(start + THIN_ROWS, group.rows)) if math.isfinite(lead[row])]
            if finite:
                keep |= {min(finite, key=lead.__getitem__), max(finite, key=lead.__getitem__)}
        for name in group.values:
            column = group.column(name)
            if not math.isfinite(sum(column)):
                keep |= {row for row, value in enumerate(column) if not math.isfinite(value)}
        thinned.append(_rows(group, sorted(keep)))
    return thinned, events


def events_only(groups: list[Group], events: list[Event]) -> Content:
    """The events, and the groups that hold a non-finite loss or gradient."""
    return [group for group in groups if is_urgent(group)], events


def nothing(groups: list[Group], events: list[Event]) -> Content:  # noqa: ARG001
    """For when even the events do not fit."""
    return [], []


def _rows(group: Group, rows: Sequence[int]) -> Group:
    def pick(column: bytes) -> bytes:
        width = len(column) // group.rows
        return b"".join(column[row * width : (row + 1) * width] for row in rows)

    values = {name: pick(column) for name, column in group.values.items()}
    return Group(pick(group.step), pick(group.time), pick(group.monotonic), values)
