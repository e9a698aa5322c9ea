"""Writes counts with their nouns."""

from __future__ import annotations

__all__ = ["some"]


def some(number: int, thing: str) -> str:
    """`1 frame`, `12,000 frames`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
