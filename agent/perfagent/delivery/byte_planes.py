"""Compresses the columns of a frame that waits on the disk: steps and values bit for bit the same, clocks to 0.5 ms.

The bytes of a number do not compress side by side: the head of each is nearly that of the one before it, and its tail
is noise. So the first bytes of all numbers of a column are put together, then the second ones, and so on.

The monotonic time of a row is kept in ticks of 1/1024 s since the row before it, its Unix time in ticks since the start of
that clock. A day of a single series of noise at 100 points a second takes 63 MB, of which 57 are the values;
to the nanosecond it took 106 MB, and by plain zlib 150.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from perfagent.delivery.records import MAX_RECORD
from perfagent.delivery.wakeup import yield_gil
from perfagent.wire import Group

__all__ = ["columns", "deflated", "inflated", "planes"]

_ROWS_AT_A_TIME = 1000
_TICKS_PER_S = 1024
"""A power of two: a whole number of ticks is a number of seconds without a rounding."""


class _Shape(msgspec.Struct, array_like=True):
    """One group, the bytes of its numbers put together by their place."""

    rows: int
    step: bytes
    monotonic: bytes
    time: bytes
    values: dict[str, bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Shape])


def planes(groups: Sequence[Group]) -> bytes:
    """Packs groups into fewer bytes: those of a column by place, deflated."""
    shapes = []
    for group in groups:
        step, clock, time = (_by_place(column, 8) for column in (group.step, *_in_ticks(group)))
        values = {name: _by_place(column, len(column) // max(1, group.rows)) for name, column in group.values.items()}
        shapes.append(_Shape(group.rows, step, clock, time, values))
    return deflated(_encoder.encode(shapes))


def columns(data: bytes) -> list[Group]:
    """The groups again. Raises ValueError, zlib.error or msgspec.DecodeError where they are damaged."""
    groups: list[Group] = []
    for shape in _decoder.decode(inflated(data)):
        step, passed, began = (_by_number(column, 8) for column in (shape.step, shape.monotonic, shape.time))
        ticks = [*accumulate(array("q", passed))]
        times = [(own + start) / _TICKS_PER_S for own, start in zip(ticks, array("q", began), strict=True)]
        clock = array("d", [own / _TICKS_PER_S for own in ticks])
        values = {name: _by_number(column, len(column) // max(1, shape.rows)) for name, column in shape.values.items()}
        # raises WireError where the columns differ in length
        groups.append(Group(step, array("d", times).tobytes(), clock.tobytes(), values))
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


def _by_place(data: bytes, width: int) -> bytes:
    return b"".join([data[place::width] for place in range(width)])


def _by_number(data: bytes, width: int) -> bytes:
    return _by_place(data, len(data) // width) if width else data


def _in_ticks(group: Group) -> tuple[bytes, bytes]:
    """Ticks from row to row, and when the clock began in Unix time by each row."""
    passed, began, last = array("q"), array("q"), 0
    for row, (own, unix) in enumerate(zip(group.monotonics(), group.times(), strict=True), start=1):
        ticks = round(_TICKS_PER_S * own)
        passed.append(ticks - last)
        began.append(round(_TICKS_PER_S * unix) - ticks)
        last = ticks
        if not row % _ROWS_AT_A_TIME:
            yield_gil()
    return passed.tobytes(), began.tobytes()
