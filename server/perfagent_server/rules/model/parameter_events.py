"""What the agent says of parameters that do not learn: events of the kind `parameters`."""

from __future__ import annotations

from typing import Any

from perfagent_server.rules.rule import Events
from perfagent_server.rules.window import Noted, Window

__all__ = ["PARAMETERS", "fraction", "names_in", "newest"]

PARAMETERS = Events("parameters")


def newest(window: Window, what: str) -> Noted | None:
    """The newest event about this: "unmoved" or "unoptimized"."""
    return next((one for one in reversed(window.events(PARAMETERS.kind)) if one.data.get("what") == what), None)


def fraction(event: Noted, key: str) -> float:
    """A number of the event from 0 to 1; 0 if it is none."""
    value: Any = event.data.get(key)
    return min(1.0, max(0.0, float(value))) if isinstance(value, (int, float)) and value == value else 0.0


def names_in(event: Noted) -> list[str]:
    names = event.data.get("names")
    return [str(name)[:200] for name in names[:64]] if isinstance(names, list) else []
