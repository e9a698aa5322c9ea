"""Formats times for JSON: RFC 3339 in UTC, with milliseconds."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import overload

__all__ = ["rfc3339", "unix_seconds"]


@overload
def rfc3339(seconds: float) -> str: ...
@overload
def rfc3339(seconds: None) -> None: ...
def rfc3339(seconds: float | None) -> str | None:
    """ "2026-03-01T12:00:00.000Z" of Unix seconds; a clock beyond the years 1 to 9999 is shown as the nearest of them,
    and one that says no number as 1970."""
    if seconds is None:
        return None
    if not isinstance(seconds, (int, float)) or math.isnan(seconds):
        seconds = 0.0
    clamped = min(max(seconds, -62135596800.0), 253402300799.0)
    return datetime.fromtimestamp(clamped, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix_seconds(text: str) -> float | None:
    """Unix seconds of an RFC 3339 time, in UTC where it names no zone; None where it is none."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
