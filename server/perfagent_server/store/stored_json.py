"""JSON in columns of text, and numbers, read leniently: of a row that another version, or a hand, has written, nothing is
known; the rows beside it must not suffer for it."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["stored_list", "stored_names", "stored_number", "stored_object"]


def stored_object(text: str | None) -> dict[str, Any]:
    """Empty where it is none."""
    found = _read(text)
    return found if isinstance(found, dict) else {}


def stored_list(text: str | None) -> list[Any]:
    """Empty where it is none."""
    found = _read(text)
    return found if isinstance(found, list) else []


def stored_names(text: str | None) -> list[str]:
    """The texts of a list."""
    return [name for name in stored_list(text) if isinstance(name, str)]


def stored_number(value: object) -> float | None:
    """None where it is none: SQLite stores whatever it is given."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _read(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, TypeError, RecursionError):
        return None
