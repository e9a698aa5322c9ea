"""Counts as people write them."""

from __future__ import annotations

import re

from perfagent.errors import ConfigError

__all__ = ["count_read"]

_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def count_read(text: str) -> int:
    """A count such as 7B, 1.3e9 or 350M. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmbgt]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r:.60} is no count; write it as 7B, 350M or 1.3e9")
    return round(float(match[1]) * _TIMES[match[2]])
