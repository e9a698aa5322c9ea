"""Tail rows as one INSERT: a record for each series of an attempt, with arrays of its steps, times and values.

ClickHouse takes the records apart. So a name is sent once and not with each sample, and no sample is touched in Python.
"""

from __future__ import annotations

import functools
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from perfagent_server.store.codec.aggregates import Floats, Ints
from perfagent_server.store.codec.blocks import step_order
from perfagent_server.store.codec.tail import unpack_tail
from perfagent_server.store.codec.tail_columns import Arrived, matrices, rows_below_each_other

__all__ = ["INPUT", "Extent", "Packed", "TailRow", "pack"]

INPUT = (
    "run LowCardinality(String), name LowCardinality(String), rank Int32, attempt Int64, rows Array(UInt32), "
    "steps Array(Int64), times Array(Float64), words Array(UInt64)"
)
"""The columns of a record, as ClickHouse writes them down. Plain strings took a third longer to take apart."""
_FIXED = struct.Struct("<iq")


class TailRow(NamedTuple):
    """A tail row."""

    id: int
    run: str
    attempt: int
    rank: int
    received: float
    samples: int
    frame: bytes


class Extent(NamedTuple):
    """Of what is sent of one series and attempt."""

    first_step: int
    last_step: int
    samples: int


@dataclass(slots=True)
class Packed:
    """data: RowBinary of INPUT. extents and last by (run, rank, name), and attempt; last: newest attempt, step, time and the
    eight bytes of its value. token: of this INSERT alone. A number may be given again after a restore, and the same samples
    may come again then: a token made of either would have ClickHouse drop them."""

    data: bytes = b""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    samples: int = 0
    extents: dict[tuple[tuple[str, int, str], int], Extent] = field(default_factory=dict)
    last: dict[tuple[str, int, str], tuple[int, int, float, bytes]] = field(default_factory=dict)


def pack(rows: Sequence[TailRow]) -> Packed:
    """In the order in which ClickHouse keeps them: sorted rows are not sorted again."""
    packed = Packed()
    kinds: dict[tuple[str, int, int], dict[tuple[str, ...], list[Arrived]]] = {}
    for row in rows:
        if row.samples:
            of_attempt = kinds.setdefault((row.run, row.attempt, row.rank), {})
            for group in unpack_tail(row.frame):
                of_attempt.setdefault(group.names, []).append((group, row.received))
    records: list[tuple[tuple[str, str, int, int], bytes]] = []
    for (run, attempt, rank), sent in kinds.items():
        begin = 0
        for names, groups in sent.items():
            step, time = rows_below_each_other(groups)
            order = step_order(step, time)
            if order is not None:
                step, time = step[order], time[order]
            place = np.arange(begin, begin + len(step), dtype="<u4")
            begin += len(step)
            shared = _array(place) + _array(step.astype("<i8", copy=False)) + _array(time.astype("<f8", copy=False))
            for columns, values in matrices(groups, range(len(names))):
                wide = values.astype("<f8")
                if order is not None:
                    wide = wide[:, order]
                for column, value in zip(columns, wide, strict=True):
                    name = names[column]
                    head = _text(run) + _text(name) + _FIXED.pack(rank, attempt)
                    records.append(((run, name, rank, attempt), head + shared + _array(value)))
                    _note(packed, (run, rank, name), attempt, step, time, value)
    records.sort(key=lambda record: record[0])
    packed.data = b"".join([data for _, data in records])
    return packed


def _note(packed: Packed, series: tuple[str, int, str], attempt: int, step: Ints, time: Floats, value: Floats) -> None:
    packed.samples += len(step)
    first, last = int(step[0]), int(step[-1])
    before = packed.extents.get((series, attempt))
    mine = Extent(first, last, len(step))
    if before is not None:
        mine = Extent(min(before.first_step, first), max(before.last_step, last), before.samples + len(step))
    packed.extents[series, attempt] = mine
    newest = (attempt, last, float(time[-1]))
    held = packed.last.get(series)
    if held is None or newest >= held[:3]:
        packed.last[series] = (*newest, value[-1:].tobytes())


def _array(column: np.ndarray) -> bytes:
    return _length(len(column)) + column.tobytes()


@functools.lru_cache(maxsize=4096)
def _text(text: str) -> bytes:
    encoded = text.encode()
    return _length(len(encoded)) + encoded


def _length(number: int) -> bytes:
    """LEB128."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
