"""Marks, words and short figures of the screens. Pure. A mark always stands beside its word or shape, never a color alone."""

from __future__ import annotations

import math
from datetime import datetime

from perfagent.command_line.terminal_output import CONTROL
from perfagent.wire.quantities import figure, nonfinite

__all__ = ["MARKS", "SEVERITY_STYLES", "age", "clean", "cut", "newest", "seconds_of"]

MARKS = {"critical": "✕", "warning": "▲", "info": "●", "healthy": "✓", "unknown": "○"}
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan", "healthy": "green", "unknown": "dim"}
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_CONTROL = CONTROL | {ord("\t"): " ", ord("\n"): " "}


def clean(text: str) -> str:
    """One line that steers no terminal."""
    return text.translate(_CONTROL)


def cut(text: str, width: int) -> str:
    text = clean(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def age(seconds: float) -> str:
    """`0 s`, `40 s`, `3 min`, `2 h`, `5 d`: whole ones, so that it does not change all the time."""
    size, unit = next((one for one in _AGES if seconds >= one[0]), (1.0, "s"))
    return f"{max(0, int(seconds // size))} {unit}"


def seconds_of(moment: str | None) -> float | None:
    """Unix seconds of a time of the API."""
    try:
        return datetime.fromisoformat(moment).timestamp() if moment else None
    except ValueError:
        return None


def newest(name: str, value: float | None) -> str:
    """A figure in a narrow column: without its unit where that is a long word."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return nonfinite(value)
    return f"{value:.4g}" if name == "loss" or name.endswith("loss") else figure(name, value)
