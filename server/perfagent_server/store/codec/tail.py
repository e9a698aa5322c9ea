"""The format of a tail row: the groups and events of a frame, much as they came.

The time on the sender's monotonic clock is left out, for nothing after the acknowledgement reads it, and so are the
steps of rows that have no gap. Times of many rows are kept as how far each difference is off the mean one, in two or
four bytes: of a frame with a single name, two thirds of what was written were times. The values of a group lie one
after the other, apart from their names: those are mostly the names of the frame before, and two thousand strings took
1.3 ms to make, twice a frame.

Values of more than a page go through the quickest zstd (-1), which finds what repeats (float64 that changes rarely,
whole numbers) and passes over noise at 5 GB/s: half of a frame of 40 names by 256 steps in 23 µs, and back in 9. A page
less takes 13 µs off the way of a frame through log, tail and compaction. zstd 1 takes 50 µs and 26 for an eighth less;
-20 saves nothing.
"""

from __future__ import annotations

import functools
import logging
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from perfagent.errors import WireError
from perfagent.wire import Event, Group
from perfagent_server.store.codec.aggregates import Floats, Ints
from perfagent_server.store.codec.compress import compress, decompress

__all__ = [
    "TailGroup",
    "is_readable",
    "last_step",
    "pack_tail",
    "readable_groups",
    "step_range",
    "unpack_tail",
    "unpack_whole",
]

log = logging.getLogger("perfagent.server")

_ONE = 8  # bytes of a step, or a time
_STEP, _TIME = struct.Struct("<q"), struct.Struct("<d")
_FEW = 64  # rows: below this numpy costs more than it saves
_PAGE = 4096  # bytes that packing the values must save
_VERSION = 3


class Ticks(msgspec.Struct, array_like=True):
    """What the times of a group count from, as integers of the same bits. every: the mean difference of two rows."""

    rows: int
    first: int
    every: int


class TailGroup(msgspec.Struct, frozen=True):
    """A group as it lies in the tail: the checks of wire.Group were made when it came. first: the first step of rows
    whose steps follow each other, and then `step` is empty. stamps: the times, or with `ticks` what each difference is
    off theirs. widths: bytes a value, 4 or 8, of each name. kept: `values` as they are stored; packed: through zstd.

    A struct of msgspec and not a dataclass: a question makes one for each row of the tail, in a quarter of the time."""

    first: int
    step: bytes
    stamps: bytes
    names: tuple[str, ...]
    widths: bytes
    kept: bytes
    ticks: Ticks | None = None
    packed: bool = False

    @classmethod
    def of_group(cls, group: Group) -> TailGroup:
        return cls.of(group.step, group.time, group.values)

    @classmethod
    def of(cls, step: bytes, time: bytes, columns: dict[str, bytes]) -> TailGroup:
        """step, time: columns of int64 and float64."""
        return cls(0, step, time, tuple(columns), *_behind_each_other(columns, len(time) // 8))

    @property
    def rows(self) -> int:
        return _rows(self.stamps, self.ticks)

    @property
    def values(self) -> bytes:
        """The columns of the names, each of `rows` values, behind each other. Unpacked here and not before: most
        questions want few of the groups that they meet."""
        return decompress(self.kept) if self.packed else self.kept

    @property
    def steps(self) -> Ints:
        return np.frombuffer(self.step, "<i8") if self.step else np.arange(self.first, self.first + self.rows)

    @property
    def times(self) -> Floats:
        if self.ticks is None:
            return np.frombuffer(self.stamps, "<f8")
        off = np.frombuffer(self.stamps, f"<i{len(self.stamps) // (self.ticks.rows - 1)}")
        bits = np.empty(self.ticks.rows, "<i8")
        bits[0] = self.ticks.first
        np.add(off, self.ticks.every, out=bits[1:], dtype="<i8")
        return bits.cumsum().view("<f8")

    def step_list(self) -> list[int]:
        if len(self.step) == _ONE:
            return list(_STEP.unpack(self.step))
        return list(map(int, self.steps))

    def time_list(self) -> list[float]:
        if self.ticks is None and len(self.stamps) == _ONE:
            return list(_TIME.unpack(self.stamps))
        return list(map(float, self.times))

    def numbers(self, places: Sequence[int]) -> list[Sequence[float]]:
        """The columns of the names at these places, each of `rows` values."""
        rows, widths, values = self.rows, self.widths, self.values
        if rows == 1:
            row = _struct(widths).unpack(values)
            return [(row[place],) for place in places]
        ends = [*accumulate(widths)]
        found: list[Sequence[float]] = []
        for place in places:
            column = array("f" if widths[place] == 4 else "d")
            column.frombytes(values[(ends[place] - widths[place]) * rows : ends[place] * rows])
            if sys.byteorder == "big":
                column.byteswap()
            found.append(column)
        return found

    def columns(self) -> list[bytes]:
        """The values of each name, in the order of the names."""
        rows, values, start = self.rows, self.values, 0
        found = []
        for width in self.widths:
            end = start + width * rows
            found.append(values[start:end])
            start = end
        return found

    def row(self, at: int) -> list[float]:
        """The values of a row, in the order of the names."""
        rows = self.rows
        if rows == 1:
            return list(_struct(self.widths).unpack(self.values))
        if self.widths.count(self.widths[0]) == len(self.widths):
            values = np.frombuffer(self.values, f"<f{self.widths[0]}")
            found: list[float] = values[at::rows].tolist()
            return found
        pairs = zip(self.columns(), self.widths, strict=True)
        return [float(np.frombuffer(column, f"<f{width}", 1, at * width)[0]) for column, width in pairs]


class _Stored(msgspec.Struct, array_like=True):
    """A TailGroup whose names and values are not looked at yet. packed: the values went through zstd."""

    first: int
    step: bytes
    stamps: bytes
    names: msgspec.Raw
    widths: bytes
    values: bytes
    ticks: Ticks | None = None
    packed: bool = False

    def group(self) -> TailGroup:
        names = _names(bytes(self.names))
        return TailGroup(self.first, self.step, self.stamps, names, self.widths, self.values, self.ticks, self.packed)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, list[_Stored], msgspec.Raw])
_names_decoder = msgspec.msgpack.Decoder(tuple[str, ...])
_events_decoder = msgspec.msgpack.Decoder(list[Event])


@functools.lru_cache(maxsize=128)
def _struct(widths: bytes) -> struct.Struct:
    """Of the values of a group of one row."""
    return struct.Struct("<" + "".join("f" if width == 4 else "d" for width in widths))


@functools.lru_cache(maxsize=128)
def _names(encoded: bytes) -> tuple[str, ...]:
    return _names_decoder.decode(encoded)


def pack_tail(groups: Sequence[Group], events: Sequence[Event]) -> bytes:
    return _encoder.encode((_VERSION, [_packed(group) for group in groups], events))


def unpack_tail(frame: bytes) -> list[TailGroup]:
    """The groups only. Raises WireError for a frame that a newer version wrote."""
    return [group.group() for group in _parts(frame)[0]]


def unpack_whole(frame: bytes) -> tuple[list[TailGroup], list[Event]]:
    groups, events = _parts(frame)
    return [group.group() for group in groups], _events_decoder.decode(events) if len(events) > 1 else []


def is_readable(frame: bytes) -> bool:
    """Whether each group has steps, times and values for all of its rows."""
    return _whole_groups(frame) is not None


def readable_groups(frame: bytes) -> list[TailGroup]:
    """Those of a row that can be read, else none: who asks must get past it."""
    return _whole_groups(frame) or []


def _whole_groups(frame: bytes) -> list[TailGroup] | None:
    try:
        groups = unpack_tail(frame)
        if not all(map(_is_whole, groups)):
            raise WireError("a group has more or fewer steps, times or values than rows")
        return groups
    except Exception as error:  # noqa: BLE001 - bytes that nobody wrote may raise anything in msgpack and zstd
        _say_unreadable(f"{type(error).__name__}: {error}")
        return None


@functools.lru_cache(maxsize=100)
def _say_unreadable(why: str) -> None:
    """Once: the row is met again until it goes with its run."""
    log.error("a row of the tail cannot be read, and is passed over: %s", why)


def _is_whole(group: TailGroup) -> bool:
    """Looks at lengths only: a question meets thousands of groups."""
    rows, widths, between = group.rows, group.widths, max(1, group.rows - 1)
    has_times = not len(group.stamps) % (8 if group.ticks is None else between)
    has_steps = not group.step or len(group.step) == 8 * rows
    has_names = len(group.names) == len(widths) == widths.count(4) + widths.count(8)
    return rows > 0 and has_times and has_steps and has_names and len(group.values) == sum(widths) * rows


def _parts(frame: bytes) -> tuple[Sequence[_Stored], msgspec.Raw]:
    version, groups, events = _decoder.decode(frame)
    if version != _VERSION:
        raise WireError(f"tail rows of format {version} are not known here; upgrade perfagent")
    return groups, events


def last_step(frame: bytes) -> int:
    """Highest step of a frame; -1 without samples."""
    return max((_last_step(group) for group in _parts(frame)[0]), default=-1)


def _last_step(group: _Stored) -> int:
    if group.step:
        return int(np.frombuffer(group.step, "<i8").max())
    return group.first + _rows(group.stamps, group.ticks) - 1


def _rows(stamps: bytes, ticks: Ticks | None) -> int:
    return len(stamps) // 8 if ticks is None else ticks.rows


def _behind_each_other(columns: Mapping[str, bytes], rows: int) -> tuple[bytes, bytes]:
    """Widths and values of a TailGroup."""
    return bytes([len(column) // rows for column in columns.values()]), b"".join(columns.values())


def step_range(group: Group) -> tuple[int, int]:
    """Lowest and highest step of a group that has rows."""
    if group.rows < _FEW:
        few = group.steps()
        return min(few), max(few)
    steps = np.frombuffer(group.step, "<i8")
    return int(steps.min()), int(steps.max())


def _packed(group: Group) -> _Stored:
    first, step, stamps, ticks = 0, group.step, group.time, None
    if group.rows >= _FEW:
        steps = np.frombuffer(step, "<i8")
        if int(steps[-1]) - int(steps[0]) == len(steps) - 1 and (steps[1:] - steps[:-1] == 1).all():
            first, step = int(steps[0]), b""
        stamps, ticks = _ticking(group.time)
    names = msgspec.Raw(_encoder.encode(list(group.values)))
    widths, values = _behind_each_other(group.values, group.rows)
    small = compress(values) if len(values) > _PAGE else values
    packed = len(small) < len(values) - _PAGE
    return _Stored(first, step, stamps, names, widths, small if packed else values, ticks, packed)


def _ticking(time: bytes) -> tuple[bytes, Ticks | None]:
    """Stamps and ticks of times, or the times as they are where a difference is far off. Sums and differences of int64
    wrap around in both directions alike, so whatever the bits are, they come back."""
    bits = np.frombuffer(time, "<i8")
    first, last = int(bits[0]), int(bits[-1])
    every = (last - first) // (len(bits) - 1)
    if abs(every) >= 2**62:
        return time, None
    off = bits[1:] - bits[:-1]
    off -= every
    low, high = int(off.min()), int(off.max())
    for size in (2, 4):
        half = 1 << (8 * size - 1)
        if -half <= low and high < half:
            return off.astype(f"<i{size}").tobytes(), Ticks(len(bits), first, every)
    return time, None
