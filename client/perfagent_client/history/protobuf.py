"""Reads protobuf messages without their definitions: fields by number
(https://protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["UNREADABLE", "Message", "fields", "signed", "varint"]

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error)
"""What reading fields as those of a message raises where they are another's."""

_SIZES = {1: 8, 5: 4}
"""Of the wire types with a fixed size, in bytes."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Its unsigned value, and where it ends. Raises ValueError where it is cut, or longer than 64 bits."""
    value = shift = 0
    for byte in data[at : at + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + shift // 7
    raise ValueError("a number is cut")


def signed(value: int) -> int:
    """An int32 or int64 of its varint: two's complement of 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field, in the order of the message: int for a varint, bytes for all others. Raises
    ValueError where it is cut or no message."""
    at, end = 0, len(message)
    while at < end:
        key = message[at]
        if key < 0x80:
            at += 1
        else:
            key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            if at < end and message[at] < 0x80:
                size = message[at]
                at += 1
            else:
                size, at = varint(message, at)
        elif (size := _SIZES.get(kind, -1)) < 0:
            raise ValueError(f"no field has the wire type {kind}")
        if at + size > end:
            raise ValueError("a field is cut")
        yield key >> 3, message[at : at + size]
        at += size


class Message:
    """All fields of a message, where speed does not matter. What is absent has protobuf's default."""

    def __init__(self, data: bytes) -> None:
        self._values: dict[int, list[Any]] = {}
        for number, value in fields(data):
            self._values.setdefault(number, []).append(value)

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def every(self, number: int) -> list[Any]:
        return self._values.get(number, [])

    def bytes(self, number: int) -> bytes:
        return b"".join(self.every(number)[-1:])

    def texts(self, number: int) -> list[str]:
        return [value.decode(errors="replace") for value in self.every(number)]

    def text(self, number: int) -> str:
        return self.bytes(number).decode(errors="replace")

    def message(self, number: int) -> Message:
        return Message(self.bytes(number))

    def integer(self, number: int) -> int:
        return signed(sum(self.every(number)[-1:]))
