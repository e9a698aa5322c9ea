"""What readers say of things they could not take, in the same words for each format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from perfagent.plural import some

__all__ = ["cut", "damaged", "not_numbers"]


def cut(path: Path, size: int) -> str:
    """size: bytes that a writer had not yet finished, or that are gone."""
    return f"the last {some(size, 'byte')} of {path.name} are cut"


def damaged(path: Path, size: int) -> str:
    """size: bytes whose checksum is wrong, and what can't be read because of them."""
    return f"{some(size, 'byte')} of {path.name} are damaged"


def not_numbers(kinds: Counter[str]) -> list[str]:
    """kinds: how many values there were of each kind, such as `image`."""
    found = ", ".join(some(number, kind) for kind, number in sorted(kinds.items()))
    return [f"values that are no numbers: {found}"] if found else []
