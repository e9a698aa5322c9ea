"""TensorBoard event files of scalars, as torch's SummaryWriter writes them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from perfagent_client.history.crc32c import checksums, crc32c

__all__ = ["events", "framed", "scalar", "write"]


def scalar(tag: str, step: int, value: float, time: float) -> bytes:
    """One event. step: below 2**14."""
    number = bytes([step]) if step < 128 else bytes([step & 127 | 128, step >> 7])
    before, size = _before(tag)
    return b"\x09" + struct.pack("<d", time) + b"\x10" + number + b"\x2a" + size + before + struct.pack("<f", value)


@cache
def _before(tag: str) -> tuple[bytes, bytes]:
    """A summary up to its float, and its size with it."""
    name = tag.encode()
    one = b"\x0a" + bytes([len(name)]) + name + b"\x15"
    summary = b"\x0a" + bytes([len(one) + 4]) + one
    return summary, bytes([len(summary) + 4])


def framed(records: Sequence[bytes]) -> bytes:
    """As records of a TFRecord file."""
    parts = [
        _head(len(record)) + record + struct.pack("<I", _masked(check))
        for record, check in zip(records, checksums(records), strict=True)
    ]
    return b"".join(parts)


@cache
def _head(size: int) -> bytes:
    packed = struct.pack("<Q", size)
    return packed + struct.pack("<I", _masked(crc32c(packed)))


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF


def events(series: Mapping[str, Sequence[float]], *, first: int = 1, began: float = 1.7e9) -> bytes:
    """Series over the steps from `first`, a second a step."""
    count = max(map(len, series.values()))
    return framed([
        scalar(tag, first + at, values[at], began + first + at)
        for at in range(count)
        for tag, values in series.items()
    ])  # fmt: skip


def write(folder: Path, series: Mapping[str, Sequence[float]], **how: float) -> Path:
    """A run's file in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "events.out.tfevents.1700000000.host"
    file.write_bytes(events(series, **how))  # type: ignore[arg-type]
    return file
