"""The notes of a run, under its verdict. They are edited in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import ALL, Dash, Output, State, html, no_update

from perfagent_dashboard.components.prose import linked
from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["NotesForm", "notes_panel"]


def notes_panel(facts: RunFacts) -> Component | None:
    """None where nobody wrote any: the run's menu begins them."""
    if not facts.run["notes"]:
        return None
    change = html.Button(say("notes_change"), id={"notes": "panel"}, type="button", className="button small quiet")
    return html.Section(
        [
            html.H2(say("notes")),
            html.P(linked(facts.run["notes"])),
            change if "operate" in facts.may else None,
        ],
        className="card",
    )


class NotesForm:
    """It stands in `#notes-form` beside the panel, which is shown anew while somebody writes."""

    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def register(self, app: Dash) -> None:
        on_press(
            app, [Output("alerts-tick", "data", allow_duplicate=True), Output("notes-form", "children")], [{"notes": ALL}],
            [State({"notes-text": ALL}, "value"), State("run-id", "data"), State("alerts-tick", "data")], self._pressed,
        )  # fmt: skip

    async def _pressed(self, pressed: Any, written: Sequence[str], run: str, tick: int) -> tuple[Any, ...]:
        if pressed["notes"] == "save":
            await self._server.ask("PATCH", run_path(run), {"notes": written[0].strip()})
            return say("saved"), tick + 1, []
        form = [] if pressed["notes"] == "cancel" else _form((await self._server.get(run_path(run)))["notes"])
        return no_update, no_update, form


def _form(written: str) -> list[Component]:
    text = dmc.Textarea(
        id={"notes-text": "run"}, label=say("notes"), description=say("notes_hint"), value=written, autosize=True, minRows=3,
        maxRows=20,
    )  # fmt: skip
    save = dmc.Button(say("save"), id={"notes": "save"}, size="xs")
    return [text, dmc.Group([save, dmc.Button(say("cancel"), id={"notes": "cancel"}, size="xs", variant="default")])]
