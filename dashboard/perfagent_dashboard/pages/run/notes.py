"""What people wrote about a run: a quiet panel under its verdict, changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, html, no_update

from perfagent_dashboard import ids
from perfagent_dashboard.components.feedback import note
from perfagent_dashboard.components.prose import linked
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import Problem, ServerApi
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
    """It stands beside the panel, which is shown anew while somebody writes."""

    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def layout(self) -> Component:
        return html.Div(id="notes-form", className="notes-form")

    def register(self, app: Dash) -> None:
        form = Output("notes-form", "children", allow_duplicate=True)
        run = State("run-id", "data")
        app.callback(form, Input({"notes": ALL}, "n_clicks"), run, prevent_initial_call=True)(self._open)
        app.callback(form, Input("notes-cancel", "n_clicks"), prevent_initial_call=True)(_closed)
        app.callback(
            Output(ids.NOTES, "sendNotifications", allow_duplicate=True),
            Output("alerts-tick", "data", allow_duplicate=True), form,
            Input("notes-save", "n_clicks"), State("notes-text", "value"), run, State("alerts-tick", "data"),
            prevent_initial_call=True,
        )(self._save)  # fmt: skip

    async def _open(self, clicks: Sequence[int | None], run: str) -> Any:
        if not any(clicks):
            return no_update
        try:
            written = (await self._server.get(run_path(run)))["notes"]
        except Problem:
            return no_update
        return [
            dmc.Textarea(
                id="notes-text", label=say("notes"), description=say("notes_hint"), value=written, autosize=True, minRows=3,
                maxRows=20,
            ),
            dmc.Group(
                [
                    dmc.Button(say("save"), id="notes-save", size="xs"),
                    dmc.Button(say("cancel"), id="notes-cancel", size="xs", variant="default"),
                ],
                gap="xs",
            ),
        ]  # fmt: skip

    async def _save(self, clicks: int | None, written: str, run: str, tick: int) -> Any:
        if not clicks:
            return (no_update,) * 3
        try:
            await self._server.ask("PATCH", run_path(run), {"notes": (written or "").strip()})
        except Problem as problem:
            return note(problem.message, failed=True), no_update, no_update
        return note(say("saved")), tick + 1, []


def _closed(clicks: int | None) -> Any:
    return [] if clicks else no_update
