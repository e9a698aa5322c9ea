"""Cells: what a span of steps amounts to (minimum, maximum, sum, count, non-finite count, time of its first sample).

Cells add up without loss: the cells of 16 steps inside a block, of 256 and 4096 steps in rollup rows and the buckets of a
query are all the same thing at different widths, so a chart of any range is exact whatever it was put together from. Minimum
and maximum are kept to the last bit; sums are float64. A span without a finite value has minimum +inf and maximum -inf.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from perfagent.errors import WireError

__all__ = [
    "CHUNK_CELLS",
    "LEVELS",
    "Cells",
    "aggregate",
    "compress",
    "concatenate",
    "decode_cells",
    "decompress",
    "encode_cells",
    "of_samples",
    "reduced",
]

LEVELS = (256, 4096)  # steps per cell in rollup rows
CHUNK_CELLS = 256  # cells per rollup row

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_HEADER = struct.Struct("<BBH")  # version, flags, number of cells
_VERSION = 1
_COMPRESSED, _NARROW = 1, 2  # body is zstd; minimum and maximum are float32
_INDEX, _COUNT = np.dtype("<u1"), np.dtype("<u4")
_local = threading.local()


@dataclass(slots=True)
class Cells:
    """Parallel arrays, one item a cell. step: first step of the span; time: Unix seconds of its first sample."""

    step: Ints
    min: Floats
    max: Floats
    sum: Floats
    count: Ints
    nonfinite: Ints
    time: Floats

    def __len__(self) -> int:
        return len(self.step)

    def between(self, first: int, last: int, width: int = 1) -> Cells:
        """The cells that lie within the steps first..last, both inclusive, each cell being `width` steps wide."""
        keep = (self.step >= first) & (self.step + (width - 1) <= last)
        return self if keep.all() else self.take(keep)

    def take(self, which: npt.NDArray[np.bool_] | Ints | slice) -> Cells:
        return Cells(
            self.step[which],
            self.min[which],
            self.max[which],
            self.sum[which],
            self.count[which],
            self.nonfinite[which],
            self.time[which],
        )

    @property
    def mean(self) -> Floats:
        """Mean of the finite values; NaN where there is none."""
        finite = self.count - self.nonfinite
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(finite > 0, self.sum / np.maximum(finite, 1), np.nan)


def of_samples(steps: Ints, times: Floats, values: Floats) -> Cells:
    """Every sample as a cell of its own."""
    finite = np.isfinite(values)
    if finite.all():
        low = high = total = values
    else:
        low, high, total = np.where(finite, values, np.inf), np.where(finite, values, -np.inf), np.where(finite, values, 0.0)
    return Cells(steps, low, high, total, np.ones(len(steps), np.int64), (~finite).astype(np.int64), times)


def concatenate(parts: Sequence[Cells]) -> Cells:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.empty(0)
        return Cells(np.empty(0, np.int64), none, none, none, np.empty(0, np.int64), np.empty(0, np.int64), none)
    return Cells(
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.min for part in parts]),
        np.concatenate([part.max for part in parts]),
        np.concatenate([part.sum for part in parts]),
        np.concatenate([part.count for part in parts]),
        np.concatenate([part.nonfinite for part in parts]),
        np.concatenate([part.time for part in parts]),
    )


def reduced(cells: Cells, width: int) -> Cells:
    """The cells put together into spans of `width` steps, in step order. Every cell must lie inside one span."""
    if not len(cells):
        return cells
    key = cells.step // width
    order = np.argsort(key, kind="stable")
    if not (np.diff(order) == 1).all():
        cells, key = cells.take(order), key[order]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduceat(cells.sum, starts)
    return Cells(
        key[starts] * width,
        np.minimum.reduceat(cells.min, starts),
        np.maximum.reduceat(cells.max, starts),
        total,
        np.add.reduceat(cells.count, starts),
        np.add.reduceat(cells.nonfinite, starts),
        np.minimum.reduceat(cells.time, starts),
    )


@dataclass(slots=True)
class Grid:
    """Cells of many series that share their rows: key, count and time once, the rest one row a series."""

    key: Ints  # (cells,) step // width
    min: Floats  # (series, cells)
    max: Floats
    sum: Floats
    count: Ints  # (cells,)
    nonfinite: Ints  # (series, cells)
    time: Floats  # (cells,)


def aggregate(key: Ints, times: Floats, values: Floats) -> Grid:
    """Cells of `values` (series, rows) by `key` (rows,), which is sorted; `times` (rows,) belong to the rows."""
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    finite = np.isfinite(values)
    if finite.all():
        low = high = total = values
        nonfinite = np.zeros((len(values), len(starts)), np.int64)
    else:
        low, high, total = np.where(finite, values, np.inf), np.where(finite, values, -np.inf), np.where(finite, values, 0.0)
        nonfinite = np.add.reduceat((~finite).astype(np.int64), starts, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduceat(total, starts, axis=1)
    return Grid(
        key[starts],
        np.minimum.reduceat(low, starts, axis=1),
        np.maximum.reduceat(high, starts, axis=1),
        sums,
        np.diff(np.append(starts, len(key))),
        nonfinite,
        times[starts],
    )


# --- as bytes ----------------------------------------------------------------------------------------------------------------


def compress(data: bytes | memoryview, level: int = 1) -> bytes:
    """zstd. For values level 1: -1 takes a third of the time and 8 % more room, 3 saves 1 %. For cells -1: the same size."""
    compressors: dict[int, zstandard.ZstdCompressor] | None = getattr(_local, "compressors", None)
    if compressors is None:  # one a thread: they must not be shared
        compressors = _local.compressors = {}
    compressor = compressors.get(level)
    if compressor is None:
        compressor = compressors[level] = zstandard.ZstdCompressor(level=level)
    return compressor.compress(data)


def decompress(data: bytes | memoryview) -> bytes:
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    return decompressor.decompress(data)


def shuffled(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """(series, items) of k bytes -> (series, items * k): all first bytes, then all second ones, which compresses far better."""
    series, items = values.shape
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(series, items, values.dtype.itemsize)
    return np.ascontiguousarray(raw.transpose(0, 2, 1)).reshape(series, -1)


def unshuffled(data: bytes | memoryview, dtype: np.dtype[np.generic], items: int, offset: int = 0) -> npt.NDArray[np.generic]:
    raw = np.frombuffer(data, np.uint8, dtype.itemsize * items, offset).reshape(dtype.itemsize, items)
    return np.ascontiguousarray(raw.T).view(dtype).ravel()


def encode_cells(grid: Grid, index: Ints) -> list[bytes]:
    """One blob a series. index: each cell's place in its row of cells, 0..255."""
    series, cells = grid.min.shape
    narrow = _narrow(grid.min) & _narrow(grid.max)
    shared = np.concatenate(
        [
            shuffled(index[None].astype(_INDEX)),
            shuffled(grid.count[None].astype(_COUNT)),
            _delta_shuffled(grid.time),
        ],
        axis=1,
    )
    blobs: list[bytes] = [b""] * series
    for kind, flag in (("<f4", _NARROW), ("<f8", 0)):
        which = np.flatnonzero(narrow if flag else ~narrow)
        if not len(which):
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = grid.min[which].astype(kind), grid.max[which].astype(kind)
        body = np.concatenate(
            [
                np.broadcast_to(shared, (len(which), shared.shape[1])),
                shuffled(grid.nonfinite[which].astype(_COUNT)),
                shuffled(low),
                shuffled(high),
                shuffled(grid.sum[which]),
            ],
            axis=1,
        )
        for at, row in zip(which.tolist(), body, strict=True):
            packed = compress(row.data, -1)
            blobs[at] = _HEADER.pack(_VERSION, _COMPRESSED | flag, cells) + packed
    return blobs


def decode_cells(blob: bytes, origin: int, width: int) -> Cells:
    """The cells of one row whose first cell begins at step `origin`, each `width` steps wide."""
    version, flags, cells = _HEADER.unpack_from(blob)
    if version != _VERSION:
        raise WireError(f"cells of format {version} are not known here; upgrade perfagent")
    body = decompress(memoryview(blob)[_HEADER.size :])
    extreme = np.dtype("<f4" if flags & _NARROW else "<f8")
    at = 0
    columns = []
    for dtype in (_INDEX, _COUNT, np.dtype("<i8"), _COUNT, extreme, extreme, np.dtype("<f8")):
        columns.append(unshuffled(body, dtype, cells, at))
        at += dtype.itemsize * cells
    index, count, times, nonfinite, low, high, total = columns
    return Cells(
        origin + index.astype(np.int64) * width,
        low.astype(np.float64),
        high.astype(np.float64),
        total.astype(np.float64),
        count.astype(np.int64),
        nonfinite.astype(np.int64),
        np.cumsum(times.astype(np.int64)).view(np.float64),
    )


def _narrow(values: Floats) -> npt.NDArray[np.bool_]:
    """(series,): whether float32 holds a row without loss."""
    with np.errstate(over="ignore", invalid="ignore"):
        same: npt.NDArray[np.bool_] = (values.astype("<f4").astype("<f8").view("<u8") == values.view("<u8")).all(axis=1)
    return same


def _delta_shuffled(times: Floats) -> npt.NDArray[np.uint8]:
    bits = np.ascontiguousarray(times).view(np.int64)
    return shuffled(np.diff(bits, prepend=0)[None])
