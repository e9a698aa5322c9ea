"""Sentences about data that a reader left out, the same for every format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from perfagent.wire.quantities import some

__all__ = ["counted", "cut", "damaged", "not_numbers"]


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


def counted(others: Counter[str]) -> list[str]:
    """others: how often each thing was left out. A sentence for each of the five most frequent, and one for all others."""
    kinds = others.most_common()
    said = [f"{count:,} {what}" for what, count in kinds[:5]]
    rest = sum(count for _, count in kinds[5:])
    return said + ([f"{some(rest, 'other value')} that are no numbers"] if rest else [])
