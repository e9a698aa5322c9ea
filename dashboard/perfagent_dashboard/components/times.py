"""Times as people read them. The browser writes them in its own time zone: assets/pages/live.js fills `time` elements."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.words import say

__all__ = ["UNTIL_UNDONE", "ago", "at_clock", "is_ahead", "moment", "or_never", "since_then"]

UNTIL_UNDONE = "9999"
"""How the times of a quiet begin that has no end."""


def ago(time: str | float | None) -> Component:
    """`3 min ago`, kept up to date; the whole time is its title."""
    return _time(time, "ago")


def moment(time: str | None) -> Component:
    """`26 Nov, 17:09 UTC`."""
    return _time(time, "moment")


def at_clock(unix: float) -> Component:
    """`17:09:12`, of Unix seconds."""
    return _time(unix, "clock")


def since_then(time: str, until: str | None, paused_s: float = 0.0) -> Component:
    """`1 h 3 min`: how long it was, or has been so far, without the seconds that it paused."""
    return _time(time, "since", data_until=until or "", data_paused=f"{paused_s:g}")


def _time(time: str | float | None, how: str, **more: str) -> Component:
    """time: RFC 3339, or Unix seconds."""
    if not time:
        return html.Span()
    if not isinstance(time, str):
        time = datetime.fromtimestamp(time, UTC).isoformat()
    return html.Time(time[:16].replace("T", " "), dateTime=time, **hyphenated(data_time=how, **more))


def or_never(shown: Callable[[str], Component], time: str | None) -> Component | str:
    return shown(time) if time else say("never")


def is_ahead(time: str | None) -> bool:
    """Whether an RFC 3339 time is still to come."""
    if not time:
        return False
    return time.startswith(UNTIL_UNDONE) or datetime.fromisoformat(time) > datetime.now(UTC)
