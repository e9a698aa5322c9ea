"""What people do on the page of a run, beside acting on its alerts: ask its processes for something, change, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, dcc, no_update

from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.pages.run.facts import run_path
from perfagent_dashboard.pages.run.tabs.console import console_text
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["Actions", "dialogs"]

_STEPS = 5
_COMMANDS: dict[str, dict[str, Any]] = {"stacks": {"kind": "stacks"}, "profile": {"kind": "profile", "steps": _STEPS}}


def dialogs() -> list[Component]:
    """Of the menu: name and tags; and whether the run is really to be stopped, or deleted."""
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
        dmc.Modal(
            [say("stop_run_sure"), dmc.Group(dmc.Button(say("stop_run"), id="run-really-stop", color="red"), mt="md")],
            id="run-stopper", title=say("stop_run"), opened=False,
        ),
    ]  # fmt: skip


class Actions:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def register(self, app: Dash) -> None:
        run, tick = State("run-id", "data"), State("alerts-tick", "data")
        counts_up = Output("alerts-tick", "data", allow_duplicate=True)
        editor = Output("run-editor", "opened", allow_duplicate=True)
        named = [Output("run-name", "value"), Output("run-tags", "value")]
        on_press(app, [], [{"command": ALL, "at": ALL}], [run], self._command)
        on_press(app, [editor, *named], ["run-edit"], [run], self._edit)
        on_press(app, [editor, counts_up], ["run-save"], ["run-name", "run-tags", run, tick], self._save)
        app.callback(Output("run-deleter", "opened"), Input("run-delete", "n_clicks"), prevent_initial_call=True)(bool)
        app.callback(Output("run-stopper", "opened"), Input("run-stop", "n_clicks"), prevent_initial_call=True)(bool)
        stopper = Output("run-stopper", "opened", allow_duplicate=True)
        on_press(app, [stopper], ["run-really-stop"], [run], self._stop)
        address = Output("_pages_location", "href", allow_duplicate=True)
        on_press(app, [address], ["run-really-delete"], [run], self._delete)
        on_press(app, [Output("console-file", "data")], ["console-download"], [run], self._download)

    async def _command(self, pressed: dict[str, str], run: str) -> tuple[Any, ...]:
        await self._server.ask("POST", run_path(run, "commands"), _COMMANDS[pressed["command"]])
        return (say(f"asked_{pressed['command']}"),)

    async def _edit(self, _pressed: str, run: str) -> tuple[Any, ...]:
        summary = await self._server.get(run_path(run))
        return no_update, True, summary["name"], summary["tags"]

    async def _save(self, _pressed: str, name: str, tags: list[str], run: str, tick: int) -> tuple[Any, ...]:
        await self._server.ask("PATCH", run_path(run), {"name": name.strip(), "tags": tags or []})
        return say("saved"), False, tick + 1

    async def _stop(self, _pressed: str, run: str) -> tuple[Any, ...]:
        await self._server.ask("POST", run_path(run, "commands"), {"kind": "stop"})
        return say("asked_stop"), False

    async def _delete(self, _pressed: str, run: str) -> tuple[Any, ...]:
        await self._server.ask("DELETE", run_path(run))
        return say("run_deleted"), "/runs"

    async def _download(self, _pressed: str, run: str) -> tuple[Any, ...]:
        text = await console_text(self._server, run)
        return no_update, dcc.send_string(text, f"{quote(run, safe='')}-console.txt")  # type: ignore[attr-defined, no-untyped-call]
