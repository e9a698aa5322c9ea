"""Bytes and counts as people write them, in both directions."""

from __future__ import annotations

import re

from perfagent.errors import ConfigError

__all__ = ["count_read", "size_said"]

_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def size_said(size: float) -> str:
    """Bytes in the largest unit of 1024 that leaves a number above one: 1536 -> 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:,.2f} {unit}"
        size /= 1024
    raise AssertionError


def count_read(text: str) -> int:
    """A count such as 7B, 1.3e9 or 350M. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmbgt]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r:.60} is no count; write it as 7B, 350M or 1.3e9")
    return round(float(match[1]) * _TIMES[match[2]])
