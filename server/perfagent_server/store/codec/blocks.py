"""The codec of blocks: up to 1024 steps of one series, as steps, times and values that come back bit by bit.

The axis (steps and times) and the values are encoded apart: series that were sent in one group share their rows, so
their axis is stored once. Steps and times: how far each difference is off the typical one, in as many bytes as the
farthest takes, nothing for steps without a gap. Values: float32 where that loses nothing (NaN payloads and -0.0
included), XOR with the value before. Then bytes of equal weight together, and zstd.

Encoding takes many blocks at once: numpy's cost a call is that of a thousand samples.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perfagent.errors import WireError
from perfagent_server.store.codec.aggregates import Floats, Ints, Values
from perfagent_server.store.codec.compress import compress_planes, decompress, shuffled, unshuffled

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

Unsigned = npt.NDArray[np.uint64]

_HEADER = struct.Struct("<BBI")  # version, bytes a value, samples
_AXIS = struct.Struct("<BBIq")  # version, gapless or not, samples, first step
_AXIS_GAPLESS = struct.Struct("<BBIqqq")  # and, of the times as integers, the first and the typical difference
_AXIS_GAPS = struct.Struct("<BBIqqqqq")  # the same of the steps before
_VERSION = 1
_AXIS_VERSION = 3
_SAMPLE = 64  # differences of a block that say which one is typical


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
    """One payload a block; (blocks, rows) steps in order, and times in Unix seconds. Blocks without gaps go
    together."""
    gapless = bool((step[:, 1:] - step[:, :-1] == 1).all())
    starts, off = _differences(np.ascontiguousarray(time).view(np.int64))
    parts = [off]
    if not gapless:
        step_starts, step_off = _differences(step)
        starts, parts = step_starts + starts, [step_off, off]
    heads = zip(step[:, 0].tolist(), *starts, compress_planes(_few_planes(parts), 8), strict=True)
    layout = _AXIS_GAPLESS if gapless else _AXIS_GAPS
    return [layout.pack(_AXIS_VERSION, gapless, step.shape[1], *head) + body for *head, body in heads]


def decode_axis(data: bytes) -> tuple[Ints, Floats]:
    version, gapless, rows, first = _AXIS.unpack_from(data)
    _check(version, _AXIS_VERSION)
    layout = _AXIS_GAPLESS if gapless else _AXIS_GAPS
    starts = layout.unpack_from(data)[4:]
    planes = decompress(memoryview(data)[layout.size :])
    if gapless:
        return np.arange(first, first + rows, dtype=np.int64), _sums(starts, planes, rows - 1).view(np.float64)
    half = len(planes) // 2
    return _sums(starts[:2], planes[:half], rows - 1), _sums(starts[2:], planes[half:], rows - 1).view(np.float64)


def axis_key(series: int, attempt: int, number: int, data: bytes) -> int:
    """The name of an axis: 63 bits of a digest over its place and content, so that equal keys mean equal axes."""
    digest = hashlib.blake2b(data, digest_size=8, key=struct.pack("<qqq", series, attempt, number))
    return int.from_bytes(digest.digest(), "little") >> 1


def encode_values(values: Values) -> list[bytes]:
    """One payload for each row of (blocks, samples) with samples >= 1; float32 values are taken to be no more than
    that."""
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


def decode_values(payloads: Sequence[bytes]) -> Values:
    """The values of blocks with as many samples each: (blocks, samples), in float32 if all of them are."""
    alike: dict[bytes, list[int]] = {}
    for at, payload in enumerate(payloads):
        alike.setdefault(payload[: _HEADER.size], []).append(at)
    parts = []
    for header, members in alike.items():
        version, width, _ = _HEADER.unpack(header)
        _check(version, _VERSION)
        body = b"".join([decompress(memoryview(payloads[at])[_HEADER.size :]) for at in members])
        planes = np.frombuffer(body, np.uint8).reshape(len(members), -1)
        bits = np.bitwise_xor.accumulate(unshuffled(planes, np.dtype(f"<u{width}")), axis=1)
        parts.append(bits.view(f"<f{width}"))
    if len(parts) == 1:
        return parts[0]
    whole = np.empty((len(payloads), parts[0].shape[1]))
    for members, part in zip(alike.values(), parts, strict=True):
        whole[members] = part
    return whole


def decode_block(axis: bytes, payload: bytes) -> Samples:
    step, time = decode_axis(axis)
    return Samples(step, time, decode_values([payload])[0].astype("<f8", copy=False))


def _check(version: int, known: int) -> None:
    if version != known:
        raise WireError(f"blocks of format {version} are not known here; upgrade perfagent")


def _differences(values: Ints) -> tuple[list[list[int]], Unsigned]:
    """(blocks, rows) -> the first value and the typical difference of each block, and how far each difference is off
    that one.

    The lowest bit holds the sign. Differences of differences took 45 % more room, since their sign fills six of eight
    bytes, and three times as long in zstd where times jitter. zstd with the parameters of values is a quarter faster on
    times and as small, but that is 2 % of what a frame with a single name takes in all.
    """
    differences = values[:, 1:] - values[:, :-1]
    some = differences[:, :: max(1, differences.shape[1] // _SAMPLE)]
    middle = some.shape[1] // 2
    typical = np.partition(some, middle, axis=1)[:, middle] if some.shape[1] else np.zeros(len(values), np.int64)
    off = differences - typical[:, None]
    sign = off >> 63
    off <<= 1
    off ^= sign
    return [values[:, 0].tolist(), typical.tolist()], off.view(np.uint64)


def _few_planes(parts: Sequence[Unsigned]) -> npt.NDArray[np.uint8]:
    """The bytes of each part (blocks, items), lowest first, as many of every item as the largest one takes."""
    size = max((int(part.max()).bit_length() + 7) // 8 if part.size else 0 for part in parts)
    planes = []
    for part in parts:
        raw = np.ascontiguousarray(part).view(np.uint8).reshape(*part.shape, 8)[:, :, :size]
        planes.append(np.ascontiguousarray(raw.transpose(0, 2, 1)).reshape(len(part), -1))
    return planes[0] if len(planes) == 1 else np.concatenate(planes, axis=1)


def _sums(start: tuple[int, int], planes: bytes, items: int) -> Ints:
    """The values of one block, from what _differences() and _few_planes() made of them."""
    first, typical = start
    raw = np.zeros((items, 8), np.uint8)
    if planes:
        size = len(planes) // items
        raw[:, :size] = np.frombuffer(planes, np.uint8).reshape(size, items).T
    coded = raw.view(np.uint64).ravel()
    off = (coded >> np.uint64(1)).astype(np.int64) ^ -(coded & np.uint64(1)).astype(np.int64)
    return np.concatenate([[first], first + np.cumsum(off + typical)])
