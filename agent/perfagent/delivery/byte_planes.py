"""Compresses the columns of a frame that waits on the disk: steps and values bit for bit the same, clocks to 0.5 ms
(Unix times to 1 ms, where that clock drifts against the other).

The bytes of a number do not compress side by side: the head of each is nearly that of the one before it, and its tail
is noise. So the first bytes of all numbers are put together, then the second ones, and so on, the sign behind the rest,
where it does not part the exponent from its number.

The monotonic time of a row is kept in ticks of 1/1024 s since the row before it, its Unix time by the ticks that it
differs from that clock. To the nanosecond, a day of a single series at 100 points a second takes 106 MB, of which 57
are the values; to 0.1 ms it takes 61, or 64 with uneven steps; now it takes 60. Plain zlib took 107 MB for that day, 77
instead of 57 for noise in float64, and 39 instead of 26 in float32.

Columns with few different values (an accuracy of three digits) compress better as they are, and stay so.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from perfagent.delivery.segments import MAX_RECORD
from perfagent.delivery.wakeup import give_way
from perfagent.wire import Group

__all__ = ["Planes", "columns", "deflated", "inflated", "planes"]

_WIDE, _NARROW, _WIDE_AS_IS, _NARROW_AS_IS = "wnWN"
"""How a column is kept: 8 or 4 bytes a number, put together by their place or as they are."""
_ROWS_AT_A_TIME = 1000
_TRIED_BYTES = 4096
_TURNED_BYTES = 2**16
_TICKS_PER_S = 1024
"""A power of two: a whole number of ticks is a number of seconds without a rounding."""
_MOST_S = 2.0**38
"""Beyond it (9000 years) a column is no clock of ours, and kept as it is. Its ticks are whole numbers for a float64."""


class Shape(msgspec.Struct, array_like=True):
    """One group. kept: a letter a name. ticks_per_s: of its clocks; 0 where those are kept as they are. offset: of its
    first Unix time to its clock, seconds."""

    rows: int
    ticks_per_s: int
    offset: float
    names: list[str]
    kept: str


class Planes(msgspec.Struct, array_like=True):
    """Groups, each piece compressed by itself, since each needs a code of its own. clocks, wide, narrow: the bytes of
    all numbers by their place, the lowest first; plain: columns as they are."""

    shapes: bytes
    clocks: list[bytes]
    wide: list[bytes]
    narrow: list[bytes]
    plain: bytes


_encoder = msgspec.msgpack.Encoder()
_shapes_decoder = msgspec.msgpack.Decoder(list[Shape])


def planes(groups: Sequence[Group]) -> Planes:
    """The same groups with fewer bytes."""
    shapes: list[Shape] = []
    clocks: list[bytes] = []
    parts: dict[str, list[bytes]] = {_WIDE: [], _NARROW: [], _WIDE_AS_IS: []}
    parts[_NARROW_AS_IS] = parts[_WIDE_AS_IS]
    for group in groups:
        offset, ticks = _in_ticks(group.monotonics(), group.times())
        clocks += [group.step, *(ticks or (group.monotonic, group.time))]
        kept = "".join(_keep(column, group.rows) for column in group.values.values())
        for letter, column in zip(kept, group.values.values(), strict=True):
            parts[letter].append(column)
        shapes.append(Shape(group.rows, _TICKS_PER_S if ticks else 0, offset, [*group.values], kept))
    wide, narrow, plain = (b"".join(parts[letter]) for letter in (_WIDE, _NARROW, _WIDE_AS_IS))
    return Planes(
        deflated(_encoder.encode(shapes)),
        _by_place(b"".join(clocks), 8),
        _by_place(_turned(wide, 8, 1), 8),
        _by_place(_turned(narrow, 4, 1), 4),
        deflated(plain),
    )


def columns(found: Planes) -> list[Group]:
    """The groups again. Raises ValueError, zlib.error or msgspec.DecodeError where they are damaged."""
    clocks = _Bytes(_by_number(found.clocks, 8))
    wide, narrow = _turned(_by_number(found.wide, 8), 8, 63), _turned(_by_number(found.narrow, 4), 4, 31)
    plain = _Bytes(inflated(found.plain))
    sources = {
        _WIDE: (_Bytes(wide), 8),
        _NARROW: (_Bytes(narrow), 4),
        _WIDE_AS_IS: (plain, 8),
        _NARROW_AS_IS: (plain, 4),
    }
    groups: list[Group] = []
    for shape in _shapes_decoder.decode(inflated(found.shapes)):
        step, monotonic, time = (clocks.take(8 * shape.rows) for _ in range(3))
        if shape.ticks_per_s:
            monotonic, time = _in_seconds(monotonic, time, shape.ticks_per_s, shape.offset)
        group = Group(step=step, time=time, monotonic=monotonic)
        for name, letter in zip(shape.names, shape.kept, strict=True):
            if letter not in sources:
                raise ValueError(f"a column kept as {letter!r:.20}")
            source, width = sources[letter]
            group.values[name] = source.take(width * shape.rows)
        groups.append(group)
    return groups


def deflated(data: bytes) -> bytes:
    """Level 6 gains under 2 % over level 1 on such columns and takes several times as long (measured)."""
    return zlib.compress(data, 1)


def inflated(data: bytes) -> bytes:
    """Raises zlib.error, and ValueError for more than a record can hold."""
    inflater = zlib.decompressobj()
    plain = inflater.decompress(data, MAX_RECORD)
    if not inflater.eof:
        raise ValueError(f"a frame of more than {MAX_RECORD} bytes")
    return plain


class _Bytes:
    """Columns behind each other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._taken = data, 0

    def take(self, size: int) -> bytes:
        found = self._data[self._taken : self._taken + size]
        if size < 0 or len(found) != size:
            raise ValueError("columns end too early")
        self._taken += size
        return found


def _keep(column: bytes, rows: int) -> str:
    """What takes less of a column's beginning."""
    width = len(column) // rows if rows else 8
    begin = column[: _TRIED_BYTES - _TRIED_BYTES % width]
    together = b"".join(begin[place::width] for place in range(width))
    as_it_is = len(deflated(begin)) <= len(deflated(together))
    if width == 8:
        return _WIDE_AS_IS if as_it_is else _WIDE
    return _NARROW_AS_IS if as_it_is else _NARROW


def _by_place(data: bytes, width: int) -> list[bytes]:
    return [deflated(data[place::width]) for place in range(width)] if data else []


def _by_number(places: list[bytes], width: int) -> bytes:
    if not places:
        return b""
    plain = [inflated(place) for place in places]
    if len(plain) != width or len({*map(len, plain)}) != 1:
        raise ValueError("a part of a number")
    found = bytearray(sum(map(len, plain)))
    for place, data in enumerate(plain):
        found[place::width] = data
    return bytes(found)


def _turned(data: bytes, width: int, places: int) -> bytes:
    """The bits of each number turned round to the left."""
    found = []
    for begin in range(0, len(data), _TURNED_BYTES):
        piece = data[begin : begin + _TURNED_BYTES]
        numbers = int.from_bytes(piece, "little")
        low = int.from_bytes(((1 << places) - 1).to_bytes(width, "little") * (len(piece) // width), "little")
        turned = (numbers << places) & ~low & ((1 << 8 * len(piece)) - 1) | (numbers >> (8 * width - places)) & low
        found.append(turned.to_bytes(len(piece), "little"))
    return b"".join(found)


def _in_ticks(clock: Sequence[float], times: Sequence[float]) -> tuple[float, tuple[bytes, bytes] | None]:
    """Offset of the first time to the clock; ticks from row to row, and those by which each time differs from clock and
    offset. None for what is no clock."""
    if not clock:
        return 0.0, None
    offset, last = times[0] - clock[0], 0
    found: tuple[list[bytes], list[bytes]] = [], []
    for begin in range(0, len(clock), _ROWS_AT_A_TIME):
        seconds, unix = clock[begin : begin + _ROWS_AT_A_TIME], times[begin : begin + _ROWS_AT_A_TIME]
        if not all(-_MOST_S < one < _MOST_S for one in (*seconds, *unix)):  # NaN is not, either
            return 0.0, None
        counts = [last, *(round(_TICKS_PER_S * one) for one in seconds)]
        aside = [round(_TICKS_PER_S * (one - own - offset)) for one, own in zip(unix, seconds, strict=True)]
        found[0].append(struct.pack(f"<{len(seconds)}q", *(after - before for before, after in pairwise(counts))))
        found[1].append(struct.pack(f"<{len(seconds)}q", *aside))
        last = counts[-1]
        if begin:
            give_way()
    return offset, (b"".join(found[0]), b"".join(found[1]))


def _in_seconds(steps: bytes, aside: bytes, ticks_per_s: int, offset: float) -> tuple[bytes, bytes]:
    """Clock and Unix times again. Raises ValueError for what cannot be any."""
    rows = len(steps) // 8
    try:
        clock = [ticks / ticks_per_s for ticks in accumulate(struct.unpack(f"<{rows}q", steps))]
        times = [
            own + offset + ticks / ticks_per_s
            for own, ticks in zip(clock, struct.unpack(f"<{rows}q", aside), strict=True)
        ]
    except (OverflowError, struct.error) as error:
        raise ValueError(f"no clock: {error}") from error
    return struct.pack(f"<{rows}d", *clock), struct.pack(f"<{rows}d", *times)
