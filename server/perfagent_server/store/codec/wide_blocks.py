"""Bundles: the newest blocks of many series that share their rows, as one row of the table.

A row of `block` costs as much as a hundred samples, whatever it holds. While a block has room, series that were sent
together therefore lie in a bundle; when one of them gets more, the compactor takes the bundle in again as though its
samples were still in the tail, and readers see it so too. That keeps it simple: a series is in one bundle of an attempt
at most, none of its blocks is as new as that, and rollups and last values of it are not written before it leaves the
bundle.

Values: those of the last row as they are, for the newest values of all series are asked for most; the others XOR with
the value after, bytes of equal weight together, zstd. Groups that are large are cut, so that the question for one
series reads little.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, bindparam, delete, insert, select

from perfagent.errors import WireError
from perfagent_server.store.codec.aggregates import Floats, Ints, Values
from perfagent_server.store.codec.blocks import Samples, decode_axis, encode_axes
from perfagent_server.store.codec.compress import compress_cells, decompress, shuffled, unshuffled
from perfagent_server.store.statements import Prepared, among
from perfagent_server.store.tables import bundle, series

__all__ = [
    "BUNDLE_SERIES",
    "Bundle",
    "Place",
    "bundle_rows",
    "bundled_samples",
    "bundles_of_rank",
    "drop_bundles",
    "last_of_run",
    "put_bundles",
    "value_in_bundle",
    "whole_bundles",
]

# From so many series on; a row holds at least so many too. Without bundles, 640 names with 16 steps in a frame spent
# two thirds of the time on rows of 128 samples. From 32 on, 16 names by 640 steps took 12 % more CPU and 4 % more room,
# since the block at the end of each compaction was written twice. From 4 on, 4 names took 1 to 2 % less. With bundles
# for all blocks, a single series would be 3 kB in a megabyte.
BUNDLE_SERIES = 8
_SAMPLES = 32_768  # of a row, where that leaves it enough series
_HEADER = struct.Struct("<BBI")  # version, bytes a value, rows
_VERSION = 1

_COLUMNS = [column.name for column in bundle.columns if column.name != "id"]
_BLOBS = (bundle.c.members, bundle.c.axis, bundle.c.newest, bundle.c.payload)
_WHOLE = (bundle.c.id, bundle.c.run, bundle.c.rank, bundle.c.attempt, bundle.c.block, bundle.c.owner, *_BLOBS)
_put = Prepared(insert(bundle), _COLUMNS)
_drop = Prepared(delete(bundle).where(bundle.c.id == bindparam("_id")))
_of_rank = Prepared(
    select(*_WHOLE)
    .where(
        bundle.c.run == bindparam("run"), bundle.c.rank == bindparam("rank"), bundle.c.attempt == bindparam("attempt")
    )
    .order_by(bundle.c.id)
)
_ends_of_run = Prepared(
    select(bundle.c.attempt, bundle.c.members, bundle.c.axis, bundle.c.newest).where(bundle.c.run == bindparam("run"))
)


class Place(NamedTuple):
    """Whose rows they are."""

    run: str
    rank: int
    attempt: int


@dataclass(slots=True)
class Bundle:
    """A row of the table, decoded. axis: its steps and times as they are stored;
    series: (series,) ids; step and time: (rows,); value: (series, rows), float32 or float64."""

    id: int
    place: Place
    block: int
    owner: int
    axis: bytes
    series: Ints
    step: Ints
    time: Floats
    value: Values


def bundle_rows(
    place: Place, number: int, owner: int, step: Ints, time: Floats, ids: Sequence[int], value: Values
) -> list[Any]:
    """Rows of the table for one block. value: (series, rows), rows in the order of their steps, rows >= 1."""
    [axis] = encode_axes(step[None], time[None])
    members = np.array(ids, np.int64)
    if (members[1:] < members[:-1]).any():
        order = np.argsort(members)
        members, value = members[order], value[order]
    each = max(BUNDLE_SERIES, _SAMPLES // len(step))
    last_time = float(time.max())
    rows = []
    for mine, values in _by_width(members, value):
        for start in range(0, len(mine), each):
            some, part = mine[start : start + each], values[start : start + each]
            ends = (int(some[0]), int(some[-1]), part.size, last_time, _packed(some), axis)
            rows.append((*place, number, owner, *ends, part[:, -1].tobytes(), _encoded(part)))
    return rows


def _by_width(members: Ints, value: Values) -> Iterator[tuple[Ints, Values]]:
    """The series that fit float32 without loss, and the others."""
    if value.dtype == np.float32:
        yield members, value
        return
    with np.errstate(over="ignore", invalid="ignore"):
        small = value.astype("<f4")
        narrow = (small.astype("<f8").view("<u8") == np.ascontiguousarray(value).view("<u8")).all(axis=1)
    for which, source in ((narrow, small), (~narrow, value)):
        if which.any():
            yield members[which], source if which.all() else source[which]


def _packed(members: Ints) -> bytes:
    steps = np.diff(members, prepend=0)  # mostly ones
    return compress_cells(shuffled(steps[None]))[0]


def _members(data: bytes) -> Ints:
    steps = unshuffled(np.frombuffer(decompress(data), np.uint8)[None], np.dtype("<i8"))[0]
    return np.cumsum(steps.view(np.int64))


def _encoded(value: Values) -> bytes:
    width = value.dtype.itemsize
    bits = np.ascontiguousarray(value).view(f"<u{width}")
    planes = shuffled((bits[:, :-1] ^ bits[:, 1:]).reshape(1, -1))
    return _HEADER.pack(_VERSION, width, value.shape[1]) + compress_cells(planes)[0]


def _decoded(newest: bytes, payload: bytes, which: slice) -> Values:
    """(series, rows) of some series."""
    version, width, rows = _HEADER.unpack_from(payload)
    if version != _VERSION:
        raise WireError(f"bundles of format {version} are not known here; upgrade perfagent")
    kind = np.dtype(f"<u{width}")
    last = np.frombuffer(newest, kind)
    body = np.frombuffer(decompress(memoryview(payload)[_HEADER.size :]), np.uint8)
    planes = body.reshape(width, len(last), rows - 1)[:, which]
    bits = np.empty((planes.shape[1], rows), kind)
    bits[:, 0] = last[which]
    bits[:, 1:] = unshuffled(np.ascontiguousarray(planes).reshape(1, -1), kind).reshape(len(bits), rows - 1)[:, ::-1]
    np.bitwise_xor.accumulate(bits, axis=1, out=bits)
    return np.ascontiguousarray(bits[:, ::-1]).view(f"<f{width}")


def _whole(row: Any) -> Bundle:
    key, run, rank, attempt, block, owner, members, axis, newest, payload = row
    step, time = decode_axis(axis)
    value = _decoded(newest, payload, slice(None))
    return Bundle(key, Place(run, rank, attempt), block, owner, axis, _members(members), step, time, value)


# --- in the table -----------------------------------------------------------------------------------------------------


def put_bundles(connection: Connection, rows: Sequence[Sequence[Any]]) -> None:
    _put.rows(connection, rows)


def drop_bundles(connection: Connection, ids: Sequence[int]) -> bool:
    """False if one of them is gone already."""
    return not ids or _drop.many(connection, [{"_id": each} for each in ids]) == len(ids)


def bundles_of_rank(connection: Connection, place: Place, wanted: set[int]) -> list[Bundle]:
    """Those that hold one of the series `wanted`."""
    rows = _of_rank.all(connection, place._asdict())
    return [_whole(row) for row in rows if not wanted.isdisjoint(_members(row[6]).tolist())]


def whole_bundles(connection: Connection, ids: Sequence[int], series_at_once: int) -> list[Bundle]:
    """Those of these bundles that exist: so many that they hold `series_at_once` series or more."""
    found: list[Bundle] = []
    query = select(*_WHOLE).where(bundle.c.id.in_(ids))
    with connection.execute(query) as rows:
        for row in rows:
            found.append(_whole(row))
            if sum(len(each.series) for each in found) >= series_at_once:
                break
    return found


def bundled_samples(connection: Connection, ids: Sequence[int]) -> Iterator[tuple[int, int, Samples]]:
    """(rank, attempt, samples) of those of the series that are in a bundle."""
    rows = connection.execute(
        select(series.c.id, bundle.c.rank, bundle.c.attempt, *_BLOBS)
        .join_from(series, bundle, (bundle.c.run == series.c.run) & (bundle.c.rank == series.c.rank))
        .where(among(connection, series.c.id, ids), bundle.c.low <= series.c.id, bundle.c.high >= series.c.id)
    )
    for row in rows:
        at = int(np.searchsorted(members := _members(row.members), row.id))
        if members[at] == row.id:
            value = _decoded(row.newest, row.payload, slice(at, at + 1))[0]
            yield row.rank, row.attempt, Samples(*decode_axis(row.axis), value.astype("<f8", copy=False))


def value_in_bundle(members: bytes, newest: bytes, series_id: int) -> float | None:
    """The value of a series in the last row of a bundle, if it is in it."""
    ids = _members(members)
    at = int(np.searchsorted(ids, series_id))
    if at == len(ids) or ids[at] != series_id:
        return None
    return float(np.frombuffer(newest, f"<f{len(newest) // len(ids)}")[at])


def last_of_run(connection: Connection, run: str) -> Iterator[tuple[int, tuple[int, int, float, float]]]:
    """(series, (attempt, step, time, value)) of the newest sample in a bundle, for every series that is in one."""
    for attempt, members, axis, newest in _ends_of_run.all(connection, {"run": run}):
        ids = _members(members).tolist()
        step, time = decode_axis(axis)
        last_step, last_time = int(step[-1]), float(time[-1])
        for series_id, value in zip(ids, np.frombuffer(newest, f"<f{len(newest) // len(ids)}").tolist(), strict=True):
            yield series_id, (attempt, last_step, last_time, value)
