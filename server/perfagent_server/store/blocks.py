"""The codec of blocks: up to 1024 steps of one series, as steps, times and values that come back bit by bit.

The axis (steps and times) and the values are encoded apart: series that were sent in one group share their rows, so their
axis is stored once. Steps and times: differences of differences, nothing for steps without a gap. Values: float32 where that
loses nothing (NaN payloads and -0.0 included), XOR with the value before, bytes of equal weight together, zstd.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perfagent.errors import WireError
from perfagent_server.store.rollups import Floats, Ints, compress, decompress, shuffled, unshuffled

__all__ = [
    "BLOCK_STEPS",
    "CELL_STEPS",
    "Samples",
    "axis_key",
    "decode_axis",
    "decode_block",
    "decode_values",
    "encode_axis",
    "encode_values",
    "merged",
]

BLOCK_STEPS = 1024
CELL_STEPS = 16

_HEADER = struct.Struct("<BBI")  # version, bytes a value, samples
_AXIS = struct.Struct("<BBIq")  # version, gapless or not, samples, first step
_VERSION = 1


@dataclass(slots=True)
class Samples:
    """One series, or several that share their rows: step and time (rows,), values (rows,) or (series, rows)."""

    step: Ints
    time: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def between(self, first: int, last: int) -> Samples:
        """Steps first..last, both inclusive. The rows must be in step order."""
        low, high = np.searchsorted(self.step, first, "left"), np.searchsorted(self.step, last, "right")
        return Samples(self.step[low:high], self.time[low:high], self.value[..., low:high])


def merged(parts: list[Samples]) -> Samples:
    """All samples by step, then time; equal ones stay in the order of `parts`."""
    if not parts:
        return Samples(np.empty(0, np.int64), np.empty(0), np.empty(0))
    if len(parts) == 1:
        step, time, value = parts[0].step, parts[0].time, parts[0].value
    else:
        step = np.concatenate([part.step for part in parts])
        time = np.concatenate([part.time for part in parts])
        value = np.concatenate([part.value for part in parts], axis=-1)
    ahead = np.diff(step)
    if (ahead > 0).all() or ((ahead >= 0).all() and (np.diff(time) >= 0).all()):
        return Samples(step, time, value)
    order = np.lexsort((time, step))
    return Samples(step[order], time[order], value[..., order])


def encode_axis(step: Ints, time: Floats) -> bytes:
    """Steps in order, and times in Unix seconds."""
    first = int(step[0])
    gapless = int(step[-1]) - first == len(step) - 1 and bool((np.diff(step) == 1).all())
    parts = [] if gapless else [_twice_delta(step)]
    parts.append(_twice_delta(np.ascontiguousarray(time).view(np.int64)))
    return _AXIS.pack(_VERSION, gapless, len(step), first) + compress(np.concatenate(parts, axis=1).tobytes())


def decode_axis(data: bytes) -> tuple[Ints, Floats]:
    version, gapless, samples, first = _AXIS.unpack_from(data)
    _check(version)
    body = decompress(memoryview(data)[_AXIS.size :])
    if gapless:
        step = np.arange(first, first + samples, dtype=np.int64)
        return step, _twice_sum(body, samples, 0).view(np.float64)
    return _twice_sum(body, samples, 0), _twice_sum(body, samples, 8 * samples).view(np.float64)


def axis_key(series: int, attempt: int, number: int, data: bytes) -> int:
    """The name of an axis: 63 bits of a digest over its place and content, so that equal keys mean equal axes."""
    digest = hashlib.blake2b(data, digest_size=8, key=struct.pack("<qqq", series, attempt, number))
    return int.from_bytes(digest.digest(), "little") >> 1


def encode_values(values: Floats) -> list[bytes]:
    """One payload a series; values is (series, rows) with rows >= 1."""
    series, rows = values.shape
    values = np.ascontiguousarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        small = values.astype("<f4")
        narrow = (small.astype("<f8").view("<u8") == values.view("<u8")).all(axis=1)
    payloads: list[bytes] = [b""] * series
    for width, which, source in ((4, np.flatnonzero(narrow), small), (8, np.flatnonzero(~narrow), values)):
        if not len(which):
            continue
        bits = source[which].view(f"<u{width}")
        changes = bits.copy()
        changes[:, 1:] ^= bits[:, :-1]
        header = _HEADER.pack(_VERSION, width, rows)
        for at, row in zip(which.tolist(), shuffled(changes), strict=True):
            payloads[at] = header + compress(row.data)
    return payloads


def decode_values(payload: bytes) -> Floats:
    version, width, rows = _HEADER.unpack_from(payload)
    _check(version)
    changes = unshuffled(decompress(memoryview(payload)[_HEADER.size :]), np.dtype(f"<u{width}"), rows)
    bits = np.bitwise_xor.accumulate(changes)
    values: Floats = bits.view(f"<f{width}").astype("<f8", copy=False)
    return values


def decode_block(axis: bytes, payload: bytes) -> Samples:
    step, time = decode_axis(axis)
    return Samples(step, time, decode_values(payload))


def _check(version: int) -> None:
    if version != _VERSION:
        raise WireError(f"blocks of format {version} are not known here; upgrade perfagent")


def _twice_delta(values: Ints) -> npt.NDArray[np.uint8]:
    first = np.diff(values, prepend=0)
    return shuffled(np.concatenate([first[:2], np.diff(first[1:])])[None])


def _twice_sum(data: bytes, items: int, offset: int) -> Ints:
    stored = unshuffled(data, np.dtype("<i8"), items, offset).astype(np.int64)
    stored[1:] = np.cumsum(stored[1:])
    return np.cumsum(stored)
