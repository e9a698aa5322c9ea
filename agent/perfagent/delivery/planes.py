"""The columns of a frame that waits on the disk, in fewer bytes and bit for bit the same.

The bytes of a number do not compress beside each other: the head of each is nearly that of the one before it, and its tail is
noise. So the first bytes of all numbers are put together, then the second ones, and so on, the sign behind the rest, where it
does not part the exponent from its number; a clock is told by the nanoseconds between two rows, and the time by what it differs
from that clock.

Columns with few different values (an accuracy of three digits) compress better as they are, and stay so.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from perfagent.delivery.bell import give_way
from perfagent.delivery.segments import MAX_RECORD
from perfagent.wire import Group

__all__ = ["Planes", "columns", "deflated", "inflated", "planes"]

_WIDE, _NARROW, _WIDE_AS_IS, _NARROW_AS_IS = "wnWN"
"""How a column is kept: 8 or 4 bytes a number, put together by their place or as they are."""
_ROWS_AT_A_TIME = 1000
_TRIED_BYTES = 4096
_TURNED_BYTES = 2**16
_MOST_NS = 2**63


class Shape(msgspec.Struct, array_like=True):
    """One group. kept: a letter a name. in_ns: its clock is told in nanoseconds. offset: of its first time to its clock."""

    rows: int
    in_ns: bool
    offset: float
    names: list[str]
    kept: str


class Planes(msgspec.Struct, array_like=True):
    """Groups, each piece compressed by itself, since each needs a code of its own. clocks, wide, narrow: the bytes of all numbers
    by their place, the lowest first; plain: columns as they are."""

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
        offset = _offset(group)
        ticks = _in_ns(group.monotonics())
        clocks += [group.step, group.monotonic if ticks is None else ticks, _from_clock(group.time, group, offset)]
        kept = "".join(_keep(column, group.rows) for column in group.values.values())
        for letter, column in zip(kept, group.values.values(), strict=True):
            parts[letter].append(column)
        shapes.append(Shape(group.rows, ticks is not None, offset, [*group.values], kept))
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
    sources = {_WIDE: (_Bytes(wide), 8), _NARROW: (_Bytes(narrow), 4), _WIDE_AS_IS: (plain, 8), _NARROW_AS_IS: (plain, 4)}
    groups: list[Group] = []
    for shape in _shapes_decoder.decode(inflated(found.shapes)):
        step, ticks, time = (clocks.take(8 * shape.rows) for _ in range(3))
        group = Group(step=step, time=time, monotonic=_in_seconds(ticks) if shape.in_ns else ticks)
        group.time = _from_clock(time, group, shape.offset)
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


def _offset(group: Group) -> float:
    """Of Unix time to the source's clock, in the first row; 0.0 where that is no number."""
    if not group.rows:
        return 0.0
    ((time,), (clock,)) = (struct.unpack_from("<d", column) for column in (group.time, group.monotonic))
    offset: float = time - clock
    return offset if offset - offset == 0.0 else 0.0


def _from_clock(time: bytes, group: Group, offset: float) -> bytes:
    """The bits in which a column of times differs from the clock; of that difference, the times."""
    found = []
    clock = group.monotonics()
    for begin in range(0, len(clock), _ROWS_AT_A_TIME):
        expected = [offset + seconds for seconds in clock[begin : begin + _ROWS_AT_A_TIME]]
        piece = time[8 * begin : 8 * (begin + _ROWS_AT_A_TIME)]
        other = int.from_bytes(struct.pack(f"<{len(expected)}d", *expected), "little")
        found.append((int.from_bytes(piece, "little") ^ other).to_bytes(len(piece), "little"))
        if begin:
            give_way()
    return b"".join(found)


def _in_ns(clock: Sequence[float]) -> bytes | None:
    """Nanoseconds from row to row, which is what a clock of the system counts; None for any other one."""
    found = []
    last = 0
    for begin in range(0, len(clock), _ROWS_AT_A_TIME):
        seconds = clock[begin : begin + _ROWS_AT_A_TIME]
        try:
            counts = [last, *(round(1e9 * one) for one in seconds)]
        except (ValueError, OverflowError):  # NaN or infinite
            return None
        if any(count / 1e9 != one or (not count and str(one) != "0.0") for count, one in zip(counts[1:], seconds, strict=True)):
            return None
        steps = [after - before for before, after in pairwise(counts)]
        if any(abs(step) >= _MOST_NS for step in steps):
            return None
        found.append(struct.pack(f"<{len(steps)}q", *steps))
        last = counts[-1]
        if begin:
            give_way()
    return b"".join(found)


def _in_seconds(steps: bytes) -> bytes:
    rows = len(steps) // 8
    return struct.pack(f"<{rows}d", *(count / 1e9 for count in accumulate(struct.unpack(f"<{rows}q", steps))))
