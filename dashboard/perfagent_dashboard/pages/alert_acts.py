"""What people do with alerts, on whatever page their buttons stand: acknowledge, mute, snooze, resolve, and their undoing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from dash import ALL, MATCH, Dash, Input, Output, State

from perfagent_dashboard.components.alert_card import alert_card, alert_history
from perfagent_dashboard.components.feedback import note, nothing, trouble
from perfagent_dashboard.pages.alike_runs import MOST_RUNS, alike_runs
from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import say

__all__ = ["AlertActs"]

_HOUR_S = 3600
_ACTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ack": ("ack", {}, "unack"),
    "note": ("ack", {}, ""),
    "unack": ("unack", {}, ""),
    "snooze-1h": ("snooze", {"for_s": _HOUR_S}, "unsnooze"),
    "snooze-8h": ("snooze", {"for_s": 8 * _HOUR_S}, "unsnooze"),
    "snooze-resolved": ("snooze", {}, "unsnooze"),
    "unsnooze": ("unsnooze", {}, ""),
    "mute": ("mute", {}, "unmute"),
    "unmute": ("unmute", {}, ""),
    "resolve": ("resolve", {}, ""),
}
"""What a button says -> the route below /alerts/ID, its body, and the act that undoes it: of what says who and until when,
no act would bring that back."""
_SHOWN = 50
_MOST, _MOST_ROUNDS = 1000, 10
"""Alerts that are acknowledged by one request, and requests by one click."""


class AlertActs:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def register(self, app: Dash) -> None:
        counts_up, tick = [Output("alerts-tick", "data", allow_duplicate=True)], State("alerts-tick", "data")
        field = {"note-of": ALL, "at": ALL}
        acts = [{"act": ALL, "alert": ALL, "at": ALL}, Input(field, "n_submit")]
        on_press(app, counts_up, acts, [State(field, "value"), State(field, "id"), tick], self._act)
        on_press(app, counts_up, [{"take": ALL, "of": ALL}], [State({"alerts-asked": ALL}, "data"), tick], self._take)
        app.callback(
            Output({"part": "history", "alert-of": MATCH}, "children"),
            Input({"part": "more", "alert-of": MATCH}, "n_clicks"), State({"part": "more", "alert-of": MATCH}, "id"),
            prevent_initial_call=True,
        )(self._history)  # fmt: skip
        app.callback(
            Output({"part": "rows", "group": MATCH}, "children"),
            Input({"part": "head", "group": MATCH}, "n_clicks"), State({"part": "head", "group": MATCH}, "id"),
            State({"part": "asked", "group": MATCH}, "data"),
            prevent_initial_call=True,
        )(self._unfold)  # fmt: skip

    async def _act(self, pressed: Any, notes: Sequence[str], noted: Sequence[Any], tick: int) -> tuple[Any, int]:
        """A button, or the Enter key in the field of a note."""
        told = {(one["note-of"], one["at"]): text for one, text in zip(noted, notes, strict=True)}
        act, alert = pressed.get("act", "note"), pressed.get("alert") or pressed["note-of"]
        route, body, undoes = _ACTS[act]
        if act == "note":
            body = {"note": (told.get((alert, pressed["at"])) or "").strip()}
        path = f"/alerts/{quote(alert, safe='')}"
        await self._server.ask("POST", f"{path}/{route}", body)
        undo: list[Any] = [("POST", f"{path}/{undoes}", {})] if undoes else []
        return note(say(f"done_{act.split('-')[0]}"), undo=undo), (tick or 0) + 1

    async def _take(self, pressed: Any, asked_for: Sequence[Mapping[str, Any]], tick: int) -> tuple[Any, int]:
        """Acknowledges what is in a group now."""
        changed: list[str] = []
        for _ in range(_MOST_ROUNDS):
            named = await self._in_group(pressed["of"], pressed["take"], asked_for)
            taken = (await self._server.ask("POST", "/alerts/ack", named))["alerts"]
            changed += taken
            if len(taken) < _MOST:
                break
        undo = [("POST", "/alerts/unack", {"alerts": changed})]
        return note(say("done_take", count=len(changed)), undo=undo), (tick or 0) + 1

    async def _in_group(self, of: str, key: str, asked: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
        if of == "run":
            return {"runs": [key]}
        if of == "runs":
            found = await self._server.get(
                "/runs", **{"with": "verdict"}, attention=True, sort="severity", limit=MOST_RUNS
            )
            return {"runs": [row["run"] for some in alike_runs(found["runs"]) for row in some.rows if some.key == key]}
        found = await self._server.get("/alerts/inbox", **asked[0], key=key, limit=_MOST)
        return {"alerts": [one["id"] for group in found["groups"] for one in group["alerts"]]}

    async def _history(self, _clicks: int | None, of: Mapping[str, str]) -> Any:
        try:
            return alert_history((await self._server.get(f"/alerts/{quote(of['alert-of'], safe='')}"))["history"])
        except Problem as problem:
            return trouble(problem)

    async def _unfold(self, _clicks: int | None, of: Mapping[str, str], asked: Mapping[str, Any]) -> Any:
        """The newest alerts of a group."""
        try:
            found = await self._server.get("/alerts/inbox", **asked, key=of["group"], limit=_SHOWN)
            session = await self._server.get("/session")
        except Problem as problem:
            return trouble(problem)
        rows = [
            alert_card(one, may_act=may_in(session, "operate", one["project"]))
            for group in found["groups"]
            for one in group["alerts"]
        ]
        left = sum(group["count"] for group in found["groups"]) - len(rows)
        return [*rows, nothing(say("and_more", count=left))] if left > 0 else rows
