"""What people do on the page of a run, beside acting on its alerts: ask its processes for something, change, delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, ctx, dcc, no_update

from perfagent_dashboard import ids
from perfagent_dashboard.components.feedback import note
from perfagent_dashboard.pages.run.facts import run_path
from perfagent_dashboard.pages.run.tabs.console import console_text
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["Actions", "dialogs"]

_STEPS = 5
_COMMANDS: dict[str, dict[str, Any]] = {"stacks": {"kind": "stacks"}, "profile": {"kind": "profile", "steps": _STEPS}}


def dialogs() -> list[Component]:
    """Of the menu: name and tags; and whether the run is really to be deleted."""
    return [
        dmc.Modal(
            [
                dmc.TextInput(id="run-name", label=say("name")),
                dmc.TagsInput(id="run-tags", label=say("tags"), mt="sm"),
                dmc.Button(say("save"), id="run-save", mt="md"),
            ],
            id="run-editor", title=say("edit_run"), opened=False,
        ),
        dmc.Modal(
            [say("delete_run_sure"), dmc.Group(dmc.Button(say("delete_run"), id="run-really-delete", color="red"), mt="md")],
            id="run-deleter", title=say("delete_run"), opened=False,
        ),
    ]  # fmt: skip


class Actions:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def register(self, app: Dash) -> None:
        notes = Output(ids.NOTES, "sendNotifications", allow_duplicate=True)
        tick = Output("alerts-tick", "data", allow_duplicate=True)
        run = State("run-id", "data")
        app.callback(notes, Input({"command": ALL, "at": ALL}, "n_clicks"), run, prevent_initial_call=True)(
            self._command
        )
        app.callback(
            Output("run-editor", "opened"), Output("run-name", "value"), Output("run-tags", "value"),
            Input("run-edit", "n_clicks"), run, prevent_initial_call=True,
        )(self._edit)  # fmt: skip
        app.callback(
            notes, tick, Output("run-editor", "opened", allow_duplicate=True), Input("run-save", "n_clicks"),
            State("run-name", "value"), State("run-tags", "value"), run, State("alerts-tick", "data"),
            prevent_initial_call=True,
        )(self._save)  # fmt: skip
        app.callback(Output("run-deleter", "opened"), Input("run-delete", "n_clicks"), prevent_initial_call=True)(bool)
        app.callback(
            notes, Output("_pages_location", "href", allow_duplicate=True), Input("run-really-delete", "n_clicks"), run,
            prevent_initial_call=True,
        )(self._delete)  # fmt: skip
        app.callback(
            Output("console-file", "data"), Input("console-download", "n_clicks"), run, prevent_initial_call=True
        )(self._download)

    async def _command(self, clicks: Sequence[int | None], run: str) -> Any:
        asked = ctx.triggered_id
        if not asked or not any(clicks):
            return no_update
        try:
            await self._server.ask("POST", run_path(run, "commands"), _COMMANDS[asked["command"]])
        except Problem as problem:
            return note(problem.message, failed=True)
        return note(say(f"asked_{asked['command']}"))

    async def _edit(self, clicks: int | None, run: str) -> Any:
        if not clicks:
            return (no_update,) * 3
        try:
            summary = await self._server.get(run_path(run))
        except Problem:
            return (no_update,) * 3
        return True, summary["name"], summary["tags"]

    async def _save(self, clicks: int | None, name: str, tags: list[str], run: str, tick: int) -> Any:
        if not clicks:
            return (no_update,) * 3
        try:
            await self._server.ask("PATCH", run_path(run), {"name": name.strip(), "tags": tags or []})
        except Problem as problem:
            return note(problem.message, failed=True), no_update, True
        return note(say("saved")), tick + 1, False

    async def _delete(self, clicks: int | None, run: str) -> Any:
        if not clicks:
            return no_update, no_update
        try:
            await self._server.ask("DELETE", run_path(run))
        except Problem as problem:
            return note(problem.message, failed=True), no_update
        return note(say("run_deleted")), "/runs"

    async def _download(self, clicks: int | None, run: str) -> Any:
        if not clicks:
            return no_update
        try:
            return dcc.send_string(  # type: ignore[attr-defined, no-untyped-call]
                await console_text(self._server, run), f"{quote(run, safe='')}-console.txt"
            )
        except Problem:
            return no_update
