"""Cells: the summary of a span of steps (minimum, maximum, sum, count, non-finite count, time of its first sample).

Cells add up without loss: the cells of 16 steps inside a block, of 256 and 4096 steps in rollup rows and the buckets of
a query are all the same thing at different widths, so a chart of any range is exact whatever it was put together from.
Minimum and maximum are kept to the last bit; sums are float64. A span without a finite value has minimum +inf and
maximum -inf.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perfagent.errors import WireError
from perfagent_server.store.codec.compress import compress_cells, decompress, shuffled, unshuffled

__all__ = [
    "Cells",
    "Floats",
    "Grid",
    "Ints",
    "Places",
    "Values",
    "aggregate",
    "concatenate",
    "decode_cells",
    "encode_cells",
    "encode_rows",
    "of_samples",
    "places",
    "reduced",
    "reduced_rows",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Values = npt.NDArray[Any]  # float32 where that holds every value without loss, else float64

_HEADER = struct.Struct("<BBH")  # version, flags, number of cells
_VERSION = 2
_COMPRESSED = 1  # zstd
_NARROW = 2  # minimum and maximum are float32
_EVEN = 4  # cells 0, 1, 2 ... of the row, each of as many samples: only that number is there
_FINITE = 8  # no counts of non-finite samples, for there are none
_INDEX, _COUNT, _TIME = np.dtype("<u1"), np.dtype("<u4"), np.dtype("<i8")


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
        low, high, total = (
            np.where(finite, values, np.inf),
            np.where(finite, values, -np.inf),
            np.where(finite, values, 0.0),
        )
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
    return _put_together(cells, np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])), width)


def reduced_rows(cells: Cells, owner: Ints, width: int) -> tuple[Cells, Ints]:
    """reduced() for the cells of many owners at once: the cells by owner, then step, and each one's owner."""
    if not len(cells):
        return cells, owner
    key = cells.step // width
    if (np.diff(owner) < 0).any() or ((np.diff(key) < 0) & (np.diff(owner) == 0)).any():
        order = np.lexsort((key, owner))
        cells, key, owner = cells.take(order), key[order], owner[order]
    starts = np.flatnonzero(np.concatenate([[True], (key[1:] != key[:-1]) | (owner[1:] != owner[:-1])]))
    return _put_together(cells, starts, width), owner[starts]


def _put_together(cells: Cells, starts: Ints, width: int) -> Cells:
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduceat(cells.sum, starts)
    return Cells(
        cells.step[starts] // width * width,
        np.minimum.reduceat(cells.min, starts),
        np.maximum.reduceat(cells.max, starts),
        total,
        np.add.reduceat(cells.count, starts),
        np.add.reduceat(cells.nonfinite, starts),
        np.minimum.reduceat(cells.time, starts),
    )


@dataclass(slots=True)
class Grid:
    """Cells of many rows at the same places: a row is a series, or one block of it."""

    index: Ints  # (cells,) place in the row
    count: Ints  # (cells,)
    time: Floats  # (rows, cells)
    min: Values
    max: Values
    sum: Floats
    nonfinite: Ints

    def take(self, which: Ints) -> Grid:
        """Some of the rows."""
        return Grid(
            self.index,
            self.count,
            self.time[which],
            self.min[which],
            self.max[which],
            self.sum[which],
            self.nonfinite[which],
        )

    def row(self, at: int, origin: int, width: int) -> Cells:
        """A row's cells, the first of whose places begins at step `origin`, each `width` steps wide."""
        step = origin + self.index * width
        return Cells(step, self.min[at], self.max[at], self.sum[at], self.count, self.nonfinite[at], self.time[at])


@dataclass(slots=True)
class Places:
    """Which samples make up a cell. starts: (cells,) the first of each."""

    index: Ints  # (cells,) place in the row
    starts: Ints
    count: Ints

    @property
    def equal(self) -> bool:
        """Whether all cells have as many samples."""
        return bool((self.count == self.count[0]).all())


def places(index: Ints) -> Places:
    """index: (samples,) each sample's place, sorted."""
    starts = np.flatnonzero(np.concatenate([[True], index[1:] != index[:-1]]))
    return Places(index[starts], starts, np.diff(np.append(starts, len(index))))


def aggregate(where: Places, times: Floats, values: Values) -> Grid:
    """Cells of `values` (rows, samples). times: (rows, cells), those of their first samples."""
    rows, cells = len(values), len(where.starts)
    finite = np.isfinite(values)
    nonfinite = np.zeros((rows, cells), np.int64)
    all_finite = bool(finite.all())
    with np.errstate(over="ignore", invalid="ignore"):
        if all_finite and where.equal:  # numpy is quick along the first axis only
            pieces = np.ascontiguousarray(values.reshape(rows * cells, where.count[0]).T)
            shape = (rows, cells)
            lowest, highest = pieces.min(axis=0).reshape(shape), pieces.max(axis=0).reshape(shape)
            sums = pieces.sum(axis=0, dtype=np.float64).reshape(shape)
        else:
            low = high = total = values
            if not all_finite:
                low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
                total = np.where(finite, values, 0.0)
                nonfinite = np.add.reduceat((~finite).astype(np.int64), where.starts, axis=1)
            lowest = np.minimum.reduceat(low, where.starts, axis=1)
            highest = np.maximum.reduceat(high, where.starts, axis=1)
            sums = np.add.reduceat(total, where.starts, axis=1, dtype=np.float64)
    return Grid(where.index, where.count, times, lowest, highest, sums, nonfinite)


# --- as bytes ---------------------------------------------------------------------------------------------------------


def encode_cells(grid: Grid) -> list[bytes]:
    """One blob a row. A place is 0..255."""
    if grid.min.dtype == np.float32:
        return _encoded(grid)
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = grid.min.astype("<f4"), grid.max.astype("<f4")
    narrow = ((low == grid.min) & (high == grid.max)).all(axis=1)
    if not narrow.any():
        return _encoded(grid)
    small = Grid(grid.index, grid.count, grid.time, low, high, grid.sum, grid.nonfinite)
    if narrow.all():
        return _encoded(small)
    blobs = [b""] * len(narrow)
    for which, source in ((np.flatnonzero(narrow), small), (np.flatnonzero(~narrow), grid)):
        for at, blob in zip(which.tolist(), _encoded(source.take(which)), strict=True):
            blobs[at] = blob
    return blobs


def _encoded(grid: Grid) -> list[bytes]:
    """Places and counts, then columns of 8 bytes, then those of 4."""
    rows, cells = grid.min.shape
    even = int(grid.index[-1]) == cells - 1 and bool((grid.count == grid.count[0]).all())
    finite = not grid.nonfinite.any()
    narrow = grid.min.dtype == np.float32
    long = np.empty((rows, 2 if narrow else 4, cells), _TIME)
    times = grid.time.view(_TIME)
    long[:, 0, 0] = times[:, 0]
    np.subtract(times[:, 1:], times[:, :-1], out=long[:, 0, 1:])
    long[:, 1] = grid.sum.view(_TIME)
    short = [] if finite else [grid.nonfinite.astype(_COUNT)]
    if narrow:
        short += [grid.min.view(_COUNT), grid.max.view(_COUNT)]
    else:
        long[:, 2], long[:, 3] = grid.min.view(_TIME), grid.max.view(_TIME)
    places = grid.count[:1].astype(_COUNT).tobytes()
    if not even:
        places = grid.index.astype(_INDEX).tobytes() + grid.count.astype(_COUNT).tobytes()
    parts = [np.broadcast_to(np.frombuffer(places, np.uint8), (rows, len(places))), shuffled(long.reshape(rows, -1))]
    if short:
        parts.append(shuffled(np.concatenate(short, axis=1)))
    header = _HEADER.pack(_VERSION, _COMPRESSED | _NARROW * narrow | _EVEN * even | _FINITE * finite, cells)
    return [header + packed for packed in compress_cells(np.concatenate(parts, axis=1))]


def encode_rows(cells: Cells, lengths: Sequence[int], origins: Sequence[int], width: int) -> list[bytes]:
    """One blob a row, for rows behind each other as decode_cells() answers them."""
    index = (cells.step - np.repeat(origins, lengths)) // width
    ends = np.cumsum(lengths).tolist()
    alike: dict[tuple[bytes, bytes], list[int]] = {}
    for at, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        alike.setdefault((index[end - length : end].tobytes(), cells.count[end - length : end].tobytes()), []).append(
            at
        )
    blobs = [b""] * len(ends)
    for members in alike.values():
        length = lengths[members[0]]
        where = np.array([ends[at] - length for at in members])[:, None] + np.arange(length)
        grid = Grid(
            index[where[0]],
            cells.count[where[0]],
            cells.time[where],
            cells.min[where],
            cells.max[where],
            cells.sum[where],
            cells.nonfinite[where],
        )
        for at, blob in zip(members, encode_cells(grid), strict=True):
            blobs[at] = blob
    return blobs


def decode_cells(blobs: Sequence[bytes], origins: Sequence[int], width: int) -> tuple[Cells, Ints]:
    """The cells of many rows behind each other, and how many each row has. origins: the step at which a row begins; its
    cells are `width` steps wide."""
    alike: dict[bytes, list[int]] = {}
    for at, blob in enumerate(blobs):
        alike.setdefault(blob[: _HEADER.size], []).append(at)
    lengths = np.empty(len(blobs), np.int64)
    parts, order = [], []
    for header, members in alike.items():
        version, flags, cells = _HEADER.unpack(header)
        if version != _VERSION:
            raise WireError(f"cells of format {version} are not known here; upgrade perfagent")
        body = b"".join([decompress(memoryview(blobs[at])[_HEADER.size :]) for at in members])
        planes = np.frombuffer(body, np.uint8).reshape(len(members), -1)
        parts.append(_decoded(planes, flags, cells, np.array([origins[at] for at in members], np.int64), width))
        lengths[members] = cells
        order.append(np.repeat(members, cells))
    found = concatenate(parts)
    if len(parts) > 1:
        found = found.take(np.argsort(np.concatenate(order), kind="stable"))
    return found, lengths


def _decoded(planes: npt.NDArray[np.uint8], flags: int, cells: int, origins: Ints, width: int) -> Cells:
    """The cells of rows with the same columns, row after row."""
    narrow, finite = flags & _NARROW, flags & _FINITE
    if flags & _EVEN:
        index: npt.NDArray[Any] = np.arange(cells)
        count, at = planes[:, : _COUNT.itemsize].view(_COUNT), _COUNT.itemsize
    else:
        at = cells * (_INDEX.itemsize + _COUNT.itemsize)
        index, count = planes[:, :cells], np.ascontiguousarray(planes[:, cells:at]).view(_COUNT)
    middle = at + cells * _TIME.itemsize * (2 if narrow else 4)
    long = np.split(unshuffled(planes[:, at:middle], _TIME), 2 if narrow else 4, axis=1)
    short = unshuffled(planes[:, middle:], _COUNT)
    nonfinite = np.zeros((len(planes), cells), np.int64) if finite else short[:, :cells].astype(np.int64)
    extremes = (
        np.split(short[:, -2 * cells :].view("<f4"), 2, axis=1) if narrow else [item.view("<f8") for item in long[2:]]
    )
    return Cells(
        (origins[:, None] + index.astype(np.int64) * width).ravel(),
        extremes[0].astype(np.float64).ravel(),
        extremes[1].astype(np.float64).ravel(),
        long[1].view(np.float64).ravel(),
        np.broadcast_to(count.astype(np.int64), (len(planes), cells)).ravel(),
        nonfinite.ravel(),
        np.cumsum(long[0], axis=1).view(np.float64).ravel(),
    )
