"""What several rules put into their sentences and their evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfagent_server.rules.window import Window

__all__ = ["one_line", "p90", "surroundings", "told_lines", "where"]

_MOST_LINES = 5


def surroundings(window: Window) -> dict[str, object]:
    """Learning rate, loss scale and gradient norms up to the step under judgment, as far as they are known."""
    lr, scale = (next(iter(window.track(name).before(window.at, 1)), None) for name in ("lr", "amp/scale"))
    return {"lr": lr, "scale": scale, "grad_norms": window.track("grad/norm").before(window.at, 20)}


def where(window: Window, ranks: Sequence[int]) -> dict[str, object]:
    """The figures of `[[ on {ranks:ranks}]]`: none in a run of one rank."""
    return {"ranks": list(ranks), "world_size": window.world_size} if window.world_size > 1 else {}


def p90(ascending: Sequence[float]) -> float:
    """The 90th percentile, without interpolation."""
    return ascending[int(0.9 * (len(ascending) - 1))]


def one_line(text: str) -> str:
    """A text in at most 300 characters, without line breaks."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."


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
