"""The codec of blocks: up to 1024 steps of one series, as steps, times and values that come back bit by bit.

The axis (steps and times) and the values are encoded apart: series that were sent in one group share their rows, so their
axis is stored once. Steps and times: differences of differences, nothing for steps without a gap. Values: float32 where that
loses nothing (NaN payloads and -0.0 included), XOR with the value before, bytes of equal weight together, zstd.

Encoding takes many blocks at once: numpy's cost a call is that of a thousand samples.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perfagent.errors import WireError
from perfagent_server.store.cells import Floats, Ints, Values
from perfagent_server.store.packed import compress_planes, decompress, shuffled, unshuffled

__all__ = [
    "BLOCK_STEPS",
    "CELL_STEPS",
    "Samples",
    "axis_key",
    "decode_axis",
    "decode_block",
    "decode_values",
    "encode_axes",
    "encode_values",
    "merged",
    "step_order",
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
    order = step_order(step, time)
    return Samples(step, time, value) if order is None else Samples(step[order], time[order], value[..., order])


def step_order(step: Ints, time: Floats) -> Ints | None:
    """What brings rows into the order of step, then time; None if they are."""
    ahead = np.diff(step)
    if (ahead > 0).all() or ((ahead >= 0).all() and (np.diff(time) >= 0).all()):
        return None
    return np.lexsort((time, step))


def encode_axes(step: Ints, time: Floats) -> list[bytes]:
    """One payload a block; (blocks, rows) steps in order, and times in Unix seconds. Blocks without gaps go together."""
    firsts = step[:, 0].tolist()
    rows = step.shape[1]
    gapless = bool((np.diff(step, axis=1) == 1).all())
    parts = [] if gapless else [_twice_delta(step)]
    parts.append(_twice_delta(np.ascontiguousarray(time).view(np.int64)))
    bodies = compress_planes(np.concatenate(parts, axis=1), 8)
    return [_AXIS.pack(_VERSION, gapless, rows, first) + body for first, body in zip(firsts, bodies, strict=True)]


def decode_axis(data: bytes) -> tuple[Ints, Floats]:
    version, gapless, rows, first = _AXIS.unpack_from(data)
    _check(version)
    planes = np.frombuffer(decompress(memoryview(data)[_AXIS.size :]), np.uint8)[None]
    if gapless:
        return np.arange(first, first + rows, dtype=np.int64), _twice_sum(planes).view(np.float64)
    return _twice_sum(planes[:, : 8 * rows]), _twice_sum(planes[:, 8 * rows :]).view(np.float64)


def axis_key(series: int, attempt: int, number: int, data: bytes) -> int:
    """The name of an axis: 63 bits of a digest over its place and content, so that equal keys mean equal axes."""
    digest = hashlib.blake2b(data, digest_size=8, key=struct.pack("<qqq", series, attempt, number))
    return int.from_bytes(digest.digest(), "little") >> 1


def encode_values(values: Values) -> list[bytes]:
    """One payload for each row of (blocks, samples) with samples >= 1; float32 values are taken to be no more than that."""
    blocks = len(values)
    if values.dtype == np.float32:
        return _encoded(values)
    with np.errstate(over="ignore", invalid="ignore"):
        small = values.astype("<f4")
        narrow = (small.astype("<f8").view("<u8") == np.ascontiguousarray(values).view("<u8")).all(axis=1)
    if not narrow.any():
        return _encoded(values)
    payloads = [b""] * blocks
    for which, source in ((np.flatnonzero(narrow), small), (np.flatnonzero(~narrow), values)):
        for at, payload in zip(which.tolist(), _encoded(source[which]), strict=True):
            payloads[at] = payload
    return payloads


def _encoded(values: Values) -> list[bytes]:
    width = values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"<u{width}")
    changes = np.concatenate([bits[:, :1], bits[:, 1:] ^ bits[:, :-1]], axis=1)
    header = _HEADER.pack(_VERSION, width, values.shape[1])
    return [header + body for body in compress_planes(shuffled(changes), width)]


def decode_values(payload: bytes) -> Floats:
    version, width, _ = _HEADER.unpack_from(payload)
    _check(version)
    planes = np.frombuffer(decompress(memoryview(payload)[_HEADER.size :]), np.uint8)[None]
    bits = np.bitwise_xor.accumulate(unshuffled(planes, np.dtype(f"<u{width}"))[0])
    values: Floats = bits.view(f"<f{width}").astype("<f8", copy=False)
    return values


def decode_block(axis: bytes, payload: bytes) -> Samples:
    step, time = decode_axis(axis)
    return Samples(step, time, decode_values(payload))


def _check(version: int) -> None:
    if version != _VERSION:
        raise WireError(f"blocks of format {version} are not known here; upgrade perfagent")


def _twice_delta(values: Ints) -> npt.NDArray[np.uint8]:
    """(blocks, rows) -> shuffled bytes: the first value, the first difference, then how much each difference is off the one
    before."""
    first = np.diff(values, axis=1)
    return shuffled(np.concatenate([values[:, :1], first[:, :1], np.diff(first, axis=1)], axis=1))


def _twice_sum(planes: npt.NDArray[np.uint8]) -> Ints:
    stored = unshuffled(planes, np.dtype("<i8"))[0].astype(np.int64)
    stored[1:] = np.cumsum(stored[1:])
    return np.cumsum(stored)
