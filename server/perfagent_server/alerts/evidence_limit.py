"""Cuts the evidence that a sender gives to a size that a snapshot, a row and a page can hold.

128 findings of 1 MB each made the server 750 MB larger, and every checkpoint wrote them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfagent.errors import WireError
from perfagent.wire import to_json

__all__ = ["DROPPED", "MAX_EVIDENCE_BYTES", "limited"]

MAX_EVIDENCE_BYTES = 64 * 1024
DROPPED = "dropped"
"""The key under which evidence says what was left out of it."""
_NAMES = 8
_NAME_CHARACTERS = 80


def limited(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence of at most MAX_EVIDENCE_BYTES as JSON: its largest parts are left out, and `dropped` says which."""
    sizes = {key: _size(key, value) for key, value in evidence.items()}
    total = sum(sizes.values()) + 2  # the braces
    if total <= MAX_EVIDENCE_BYTES:
        return dict(evidence)
    room = (
        MAX_EVIDENCE_BYTES - 8 * _NAMES * _NAME_CHARACTERS
    )  # for what is said of the rest, also where JSON escapes it
    left = set()
    for key in sorted(sizes, key=lambda key: sizes[key]):
        room -= sizes[key]
        if room < 0:
            left.add(key)
    largest = sorted(left, key=lambda key: -sizes[key])
    named = ", ".join(f"{key[:_NAME_CHARACTERS]} ({sizes[key]} bytes)" for key in largest[:_NAMES])
    more = f" and {len(left) - _NAMES} more" if len(left) > _NAMES else ""
    said = f"{named}{more}: the evidence had {total} bytes, {MAX_EVIDENCE_BYTES} are kept"
    return {**{key: value for key, value in evidence.items() if key not in left}, DROPPED: said}


def _size(key: str, value: Any) -> int:
    """Bytes as JSON, with key and punctuation; what JSON cannot say is measured as text, as it is stored."""
    try:
        return len(to_json({key: value}))
    except (WireError, ValueError, OverflowError, RecursionError, TypeError):
        return len(key) + len(str(value))
