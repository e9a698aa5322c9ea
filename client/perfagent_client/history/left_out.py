"""Sentences about data that a reader left out, the same for every format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from perfagent.plural import some

__all__ = ["cut", "damaged", "not_numbers"]


def cut(path: Path, size: int) -> str:
    """size: bytes of an incomplete record at the end of the file."""
    return f"the last {some(size, 'byte')} of {path.name} are cut"


def damaged(path: Path, size: int) -> str:
    """size: bytes with a wrong checksum, and those that cannot be read because of them."""
    return f"{some(size, 'byte')} of {path.name} are damaged"


def not_numbers(kinds: Counter[str]) -> list[str]:
    """kinds: how many values there were of each kind, such as `image`."""
    found = ", ".join(some(number, kind) for kind, number in sorted(kinds.items()))
    return [f"values that are no numbers: {found}"] if found else []
