"""The part of the settings page that is about alerts of one's own: a list, and a form that can be tried on a run before it
is saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from perfagent.wire import SEVERITIES
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.fields import form_row, number_field, select_field, small_button, text_field
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

__all__ = ["OwnAlerts"]

_FUNCTIONS = ("value", "mean", "min", "max", "rise", "fall", "missing")
_COMPARED = _FUNCTIONS[:4]
_COMPARISONS = (">", ">=", "<", "<=")
_UNITS = {"steps": 0, "seconds": 1, "minutes": 60, "hours": 3600}
_FIELDS = ("name", "metric", "function", "comparison", "threshold", "duration", "unit", "severity", "tags", "note")
_RUNS = 50  # to choose from


class OwnAlerts:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def register(self, app: Dash) -> None:
        form = [State(f"own-{name}", "value") for name in _FIELDS]
        where = State("rules-shown", "data")
        on_press(
            app, [Output("own-alerts", "children")], ["own-save", {"own-act": ALL, "own": ALL, "of": ALL}],
            [where, State("own-edited", "data"), *form], self._change,
        )  # fmt: skip
        app.callback(
            Output("own-tried", "children"), Input("own-try", "n_clicks"), State("own-run", "value"), where, *form,
            prevent_initial_call=True,
        )(self._try)  # fmt: skip
        unused = [Output(f"own-{name}", "disabled") for name in ("comparison", "threshold")]
        app.callback(unused, Input("own-function", "value"))(lambda function: (function not in _COMPARED,) * 2)

    async def section(self, project: str, *, may_change: bool, edited: Sequence[str] = ()) -> list[Component]:
        """edited: project and name of the alert that the form shows."""
        known = (await self._server.get("/rules/alerts", project=project))["alerts"]
        rows = [
            [
                html.B(one["name"]), one["title"], say(f"severity_{one['severity']}"), one["project"] or say("all_projects"),
                ", ".join(one["tags"]), one["note"], _actions(one, may_change=may_change),
            ]
            for one in known
        ]  # fmt: skip
        heads = [say(f"own_{name}") for name in ("name", "when", "severity", "project", "tags", "note")]
        shown = next((one for one in known if [one["project"], one["name"]] == [*edited]), None)
        return [
            html.H2(say("own_alerts")),
            table([*heads, ""], rows, empty=say("own_none")),
            *(await self._form(project, shown) if may_change else []),
        ]

    async def _form(self, project: str, edited: dict[str, Any] | None) -> list[Component]:
        runs = (await self._server.get("/runs", project=project, limit=_RUNS))["runs"]
        choices = {one["run"]: f"{one['name']} · {one['project']}" for one in runs}
        values: dict[str, Any] = {"severity": "warning", "duration": 20} if edited is None else _values(edited)
        compared = {one: one for one in _COMPARISONS}
        when = form_row(
            _text("metric", values, w=220, placeholder="val/loss"),
            _select("function", {one: say(f"own_function_{one}") for one in _FUNCTIONS}, values, w=190),
            _select("comparison", compared, values, w=100),
            number_field("own-threshold", say("own_threshold"), values.get("threshold"), w=120),
            number_field("own-duration", say("own_duration"), values["duration"], min=1, w=110),
            _select("unit", {one: say(f"own_unit_{one}") for one in _UNITS}, values, w=120),
        )
        rest = form_row(
            _text("name", values, w=180, disabled=edited is not None),
            _select("severity", {one: say(f"severity_{one}") for one in SEVERITIES}, values, w=140),
            _text("tags", values, w=180, placeholder=say("own_tags_how")),
            _text("note", values, w=300, placeholder=say("own_note_how")),
        )
        tries = form_row(
            select_field("own-run", say("own_run"), choices, next(iter(choices), None), w=300, searchable=True),
            dmc.Button(say("own_try"), id="own-try", size="sm", variant="default", disabled=not choices),
            dmc.Button(say("own_add" if edited is None else "save"), id="own-save", size="sm"),
            *([] if edited is None else [dmc.Button(say("own_cancel"), id=_id("cancel", edited), size="sm", variant="default")]),
        )  # fmt: skip
        return [
            when,
            rest,
            tries,
            dcc.Store(id="own-edited", data=[] if edited is None else [edited["project"], edited["name"]]),
            html.Div(id="own-tried", role="status", className="stack"),
        ]

    async def _change(self, pressed: Any, project: str, edited: list[str], *values: Any) -> tuple[Any, ...]:
        shown, said = list[str](), cast("Any", no_update)
        if pressed == "own-save":
            form = _form_of(values)
            if edited:
                del form["name"]
                await self._server.ask("PUT", _path(edited[1]), form, query=_query(edited[0]))
            else:
                await self._server.ask("POST", "/rules/alerts", form, query=_query(project))
            said = say("own_saved")
        elif pressed["own-act"] == "remove":
            await self._server.ask("DELETE", _path(pressed["own"]), query=_query(pressed["of"]))
            said = say("own_removed")
        elif pressed["own-act"] == "edit":
            shown = [pressed["of"], pressed["own"]]
        return said, await self.section(project, may_change=True, edited=shown)

    async def _try(self, clicks: int | None, run: str | None, project: str, *values: Any) -> Any:
        if not clicks:
            return no_update
        form = _form_of(values)
        body = form | {"run": run or "", "name": form["name"] or "tried"}
        try:
            found = await self._server.ask("POST", "/rules/alerts/try", body, query=_query(project))
        except Problem as problem:
            return html.P(problem.message, className="bad")
        return _tried(found, run or "")


def _tried(found: dict[str, Any], run: str) -> list[Component]:
    if not found["series"]:
        return [nothing(say("own_no_series"))]
    rows = [[f"{one['step']:,}", f"{one['until_step']:,}", one["message"]] for one in found["fired"]]
    said = say("own_would_have", count=found["count"], samples=found["samples"])
    heads = [say(f"own_{name}") for name in ("fired_at", "until", "what")]
    return [
        html.P([html.B(said), " ", html.A(say("own_show_run"), href=f"/run/{quote(run, safe='')}")]),
        *([nothing(say("own_left_out", count=found["left_out"]))] if found["left_out"] else []),
        *([table(heads, rows, empty="")] if rows else []),
    ]


def _values(alert: dict[str, Any]) -> dict[str, Any]:
    """What the form shows of an alert that there is."""
    seconds = alert["for_s"] or 0
    per_unit = [] if alert["for_steps"] else [unit for unit in ("hours", "minutes") if seconds % _UNITS[unit] == 0]
    unit = "steps" if alert["for_steps"] else next(iter(per_unit), "seconds")
    duration = alert["for_steps"] or seconds / _UNITS[unit]
    return alert | {"duration": duration, "unit": unit, "tags": ", ".join(alert["tags"])}


def _form_of(values: Sequence[Any]) -> dict[str, Any]:
    """As the API takes it. What is left empty the server asks for."""
    given = dict(zip(_FIELDS, values, strict=True))
    form = {name: (given[name] or "").strip() for name in ("name", "metric", "note")}
    form |= {name: given[name] for name in ("function", "severity")}
    form["tags"] = [tag for part in (given["tags"] or "").split(",") if (tag := part.strip())]
    if given["function"] in _COMPARED:
        number = given["threshold"]
        form |= {"comparison": given["comparison"], "threshold": None if number in (None, "") else float(number)}
    if given["duration"] not in (None, ""):
        duration, seconds = float(given["duration"]), _UNITS[given["unit"]]
        form |= {"for_s": duration * seconds} if seconds else {"for_steps": int(duration)}
    return form


def _text(name: str, values: dict[str, Any], **look: Any) -> Component:
    return text_field(f"own-{name}", say(f"own_{name}"), values.get(name, ""), **look)


def _select(name: str, options: dict[str, str], values: dict[str, Any], **look: Any) -> Component:
    value = values.get(name) or next(iter(options))
    return select_field(f"own-{name}", say(f"own_{name}"), options, value, **look)


def _actions(alert: dict[str, Any], *, may_change: bool) -> Any:
    if alert["from_file"]:
        return html.Code("rules.toml")
    buttons = (small_button(say(f"own_{act}"), _id(act, alert)) for act in ("edit", "remove"))
    return html.Div([*buttons], className="actions") if may_change else ""


def _id(act: str, alert: dict[str, Any]) -> dict[str, str]:
    return {"own-act": act, "own": alert["name"], "of": alert["project"]}


def _path(name: str) -> str:
    return f"/rules/alerts/{quote(name, safe='')}"


def _query(project: str) -> dict[str, str] | None:
    return {"project": project} if project else None
