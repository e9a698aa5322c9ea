"""Acts on an alert, wherever its buttons stand: acknowledge, snooze, mute, resolve, and their undoing."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from perfagent_dashboard.components.feedback import note
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

__all__ = ["ask_for"]

_HOUR_S = 3600
_ACTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ack": ("ack", {}),
    "unack": ("unack", {}),
    "snooze-1h": ("snooze", {"for_s": _HOUR_S}),
    "snooze-8h": ("snooze", {"for_s": 8 * _HOUR_S}),
    "snooze-resolved": ("snooze", {}),
    "unsnooze": ("unsnooze", {}),
    "mute": ("mute", {}),
    "unmute": ("unmute", {}),
    "resolve": ("resolve", {}),
}
"""What a button says -> the route below /alerts/ID, and its body."""


async def ask_for(server: ServerApi, act: str, alert: str, told: str | None) -> tuple[list[dict[str, Any]], bool]:
    """What to say about it, and whether it is done. told: the note of an acknowledgement."""
    route, body = _ACTS[act]
    if route == "ack" and (told or "").strip():
        body = {"note": (told or "").strip()}
    try:
        await server.ask("POST", f"/alerts/{quote(alert, safe='')}/{route}", body)
    except Problem as problem:
        return note(problem.message, failed=True), False
    return note(say(f"done_{route}")), True
