"""What the agent says of parameters that do not learn: events of the kind `parameters`."""

from __future__ import annotations

from typing import Any

from perfagent.wire.limits import whole
from perfagent_server.rules.rule import Events
from perfagent_server.rules.window import Noted, Window

__all__ = ["PARAMETERS", "fraction", "named", "names_in", "newest"]

PARAMETERS = Events("parameters")
_NAMED = 5


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


def named(event: Noted) -> str:
    """The parameters, for a sentence: the first few, and how many more there are."""
    names, count = names_in(event), whole(event.data.get("count")) or 0
    shown = names[:_NAMED]
    more = max(count, len(names)) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
