"""CRC-32C (Castagnoli, RFC 3720 appendix B.4), which no module of the standard library has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from itertools import islice

__all__ = ["checksums", "crc32c"]

_ROW = 64
_INVERTED = bytes(range(255, -1, -1))


def _of_byte(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_of_byte(byte) for byte in range(256)]


@cache
def _advance() -> list[list[int]]:
    """What a row of zeros makes of a register: the exclusive or of what it makes of each byte in it."""
    rows = [[byte << shift for byte in range(256)] for shift in (0, 8, 16, 24)]
    for _ in range(_ROW):
        rows = [[_TABLE[register & 0xFF] ^ register >> 8 for register in row] for row in rows]
    return rows


def crc32c(data: bytes) -> int:
    """Of some bytes: half a microsecond a byte."""
    register = 0xFFFF_FFFF
    for byte in data:
        register = _TABLE[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ 0xFFFF_FFFF


def checksums(records: Sequence[bytes]) -> list[int]:
    """Of many, by numpy: all rows of 64 bytes at once, then the rows of each record one after the other.

    Zeros in front leave a register of zero as it is, and a register that begins with ones is one of zero before a record whose
    first four bytes are inverted."""
    try:
        import numpy as np
    except ImportError:  # no part of the base install
        return [crc32c(record) for record in records]
    counts = [-(-len(record) // _ROW) for record in records]
    padded = b"".join(
        bytes(_ROW * count - len(record)) + record[:4].translate(_INVERTED) + record[4:]
        for record, count in zip(records, counts, strict=True)
    )
    table, register = np.array(_TABLE, np.uint32), np.zeros(sum(counts), np.uint32)
    for column in np.frombuffer(padded, np.uint8).reshape(-1, _ROW).T:
        register = table[(register ^ column) & 0xFF] ^ register >> 8
    rows = iter((register ^ 0xFFFF_FFFF).tolist())
    found = [next(rows) if count == 1 else _of_rows([*islice(rows, count)]) for count in counts]
    return [check if len(record) >= 4 else crc32c(record) for record, check in zip(records, found, strict=True)]


def _of_rows(inverted: Sequence[int]) -> int:
    return reduce(_next_row, (row ^ 0xFFFF_FFFF for row in inverted), 0) ^ 0xFFFF_FFFF


def _next_row(register: int, row: int) -> int:
    first, second, third, fourth = _advance()
    return (
        first[register & 0xFF]
        ^ second[register >> 8 & 0xFF]
        ^ third[register >> 16 & 0xFF]
        ^ fourth[register >> 24]
        ^ row
    )
