"""The lines of source that an agent found, as evidence."""

from __future__ import annotations

from typing import Any

from perfagent_server.rules.window import Window

__all__ = ["told_lines"]

_MOST_LINES = 5


def told_lines(window: Window, kind: str) -> list[dict[str, Any]]:
    """{"line", "count", "in"?} of the newest event of this kind, most frequent first. What an agent says is not trusted to
    have its usual form."""
    events = window.events(kind)
    told = events[-1].data.get("lines") if events else None
    return [
        {"line": str(one["line"])[:200], "count": one["count"]} | ({"in": str(one["in"])[:100]} if "in" in one else {})
        for one in (told if isinstance(told, list) else [])[:_MOST_LINES]
        if isinstance(one, dict) and isinstance(one.get("count"), int) and "line" in one
    ]
