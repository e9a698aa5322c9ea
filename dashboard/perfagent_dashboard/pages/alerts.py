"""The alerts page, `/alerts`: the inbox of all runs. What needs somebody first; who has taken it; what is kept quiet."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from perfagent_dashboard.components.alert_groups import alert_rows
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.digest import digest
from perfagent_dashboard.components.feedback import nothing, trouble
from perfagent_dashboard.components.fields import (
    form_row,
    number_field,
    search_field,
    select_field,
    small_button,
    text_field,
)
from perfagent_dashboard.components.times import moment
from perfagent_dashboard.pages.alert_acts import AlertActs
from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import say

__all__ = ["page"]

_SEVERITIES = ("critical", "warning", "info")
_HOUR_S = 3600


def page(server: ServerApi) -> Page:
    inbox = _Inbox(server)
    return Page(name="alerts", path="/alerts", layout=inbox.layout, register=inbox.register, icon="alerts")


_VIEWS = ("open", "acknowledged", "quiet", "resolved")


class _Inbox:
    def __init__(self, server: ServerApi) -> None:
        self._server, self._acts = server, AlertActs(server)

    async def layout(self, view: str = "open", severity: str = "", q: str = "", **_: Any) -> Component:
        """view, severity, q: of the address."""
        view, made = view if view in _VIEWS else "open", time.time()
        try:
            content, counts = await self._content(view, severity, q)
            silences = await self._silences()
        except Problem as problem:
            return trouble(problem)
        return html.Div(
            [
                html.Div([html.H1(say("nav_alerts")), *_toolbar(view, severity, q, counts)], className="page-head"),
                html.Div(content, id="alerts-list"),
                html.Div(silences, id="alerts-silences"),
                dcc.Store(id="alerts-tick", data=0),
                dcc.Store(id={"alerts-asked": "page"}, data=_asked(view, severity, q)),
                dcc.Store(id="alerts-shown", data=digest(content)),
            ],
            className="page alerts-page",
            **hyphenated(
                data_page="live", data_tick="alerts-tick", data_title=say("nav_alerts"), data_made=str(made),
                data_address="alerts-view:view:open,alerts-severity:severity:,alerts-search:q:",
            ),
        )  # fmt: skip

    def register(self, app: Dash) -> None:
        """The acts are those of every page."""
        self._acts.register(app)
        app.callback(
            Output("alerts-list", "children"), Output("alerts-view", "data"), Output("alerts-shown", "data"),
            Output({"alerts-asked": "page"}, "data"),
            Input("alerts-view", "value"), Input("alerts-severity", "value"), Input("alerts-search", "value"),
            Input("alerts-tick", "data"), State("alerts-shown", "data"),
            prevent_initial_call=True,
        )(self._show)  # fmt: skip
        on_press(
            app,
            [Output("alerts-silences", "children"), Output("alerts-tick", "data", allow_duplicate=True)],
            ["silence-add", {"silence": ALL}],
            [
                *(f"silence-{name}" for name in ("matcher", "value", "hours", "repeats", "note")),
                State("alerts-tick", "data"),
            ],
            self._silence,
        )

    async def _show(self, view: str, severity: str, text: str, _tick: int, shown: str) -> Any:
        """A list that is as it was stays: drawn anew it would close a menu that somebody has just opened."""
        try:
            content, counts = await self._content(view, severity, text)
        except Problem as problem:
            return trouble(problem), no_update, "", no_update
        fresh = digest(content)
        return no_update if fresh == shown else content, _views(counts), fresh, _asked(view, severity, text)

    async def _content(self, view: str, severity: str, text: str) -> tuple[Component, dict[str, int]]:
        """The rows of a view, and how many alerts there are in each."""
        asked = _asked(view, severity, text)
        inbox, session = await asyncio.gather(self._server.get("/alerts/inbox", **asked), self._server.get("/session"))
        rows = [row for group in inbox["groups"] for row in alert_rows(group, session, asked)]
        if inbox["more"]:
            rows.append(nothing(say("and_more", count=inbox["more"])))
        if not rows:
            rows = [nothing(say(f"alerts_none_{view}" if not (text or severity) else "no_match"))]
        elif "operate" not in session["may"]:
            rows.insert(0, nothing(say("may_not_act")))
        return html.Div(rows, className="alert-list", **hyphenated(data_view=view)), inbox["counts"]

    async def _silence(
        self, pressed: Any, matcher: str, value: str, hours: Any, repeats: str, told: str, tick: int
    ) -> tuple[Any, ...]:
        if pressed == "silence-add":
            body = {matcher: value.strip(), "for_s": float(hours or 0) * _HOUR_S, "note": told}
            await self._server.ask("POST", "/silences", body | ({"repeats": repeats} if repeats else {}))
        else:
            await self._server.ask("DELETE", f"/silences/{quote(pressed['silence'], safe='')}")
        said = say("done_silence" if pressed == "silence-add" else "done_unsilence")
        return said, await self._silences(unfolded=True), tick + 1

    async def _silences(self, *, unfolded: bool = False) -> Component:
        """The silences there are, and a form for another."""
        known, session = await asyncio.gather(self._server.get("/silences"), self._server.get("/session"))
        may_act = "operate" in session["may"]
        rows = [_silence_row(one, may_act=may_in(session, "operate", one["project"])) for one in known["silences"]]
        return dmc.Accordion(
            dmc.AccordionItem(
                [
                    dmc.AccordionControl(say("silences", count=sum(one["active"] for one in known["silences"]))),
                    dmc.AccordionPanel([*(rows or [nothing(say("silences_none"))]), _silence_form() if may_act else None]),
                ],
                value="silences",
            ),
            className="card", value="silences" if unfolded else None,
        )  # fmt: skip


def _asked(view: str, severity: str, text: str) -> dict[str, str]:
    """As GET /alerts/inbox takes it."""
    return {"view": view, "severity": severity, "q": text}


def _views(counts: dict[str, int]) -> list[dict[str, str]]:
    return [{"value": view, "label": f"{say(f'view_{view}')} {counts[view]}"} for view in _VIEWS]


def _toolbar(view: str, severity: str, text: str, counts: dict[str, int]) -> list[Component]:
    severities = [{"value": "", "label": say("all")}]
    severities += [{"value": one, "label": say(f"severity_{one}")} for one in _SEVERITIES]
    return [
        dmc.SegmentedControl(id="alerts-view", data=_views(counts), value=view, size="sm"),
        dmc.SegmentedControl(id="alerts-severity", data=severities, value=severity, size="sm"),
        search_field("alerts-search", say("alerts_search"), text),
    ]


def _silence_row(silence: dict[str, Any], *, may_act: bool) -> Component:
    matchers = [f"{name} {silence[name]}" for name in ("project", "tag", "run", "rule") if silence[name]]
    repeats = f", {say('repeats_' + silence['repeats'])}" if silence["repeats"] else ""
    end = small_button(say("silence_end"), {"silence": silence["id"]})
    return html.Div(
        [
            html.B(", ".join(matchers)),
            html.Span([moment(silence["starts"]), " – ", moment(silence["ends"]), repeats]),
            html.Span([say("by_whom", who=silence["who"])]) if silence["who"] else None,
            html.Q(silence["note"]) if silence["note"] else None,
            html.Span(say("silence_on" if silence["active"] else "silence_off"), className="quiet"),
            end if may_act else None,
        ],
        className="silence-row",
    )


def _silence_form() -> Component:
    matchers = {name: say(f"matcher_{name}") for name in ("run", "project", "tag", "rule")}
    repeats = {name: say(f"repeats_{name or 'never'}") for name in ("", "daily", "weekly")}
    return form_row(
        select_field("silence-matcher", say("silence_of"), matchers, "run"),
        text_field("silence-value", say("silence_value")),
        number_field("silence-hours", say("silence_hours"), 2, min=0.1, max=8760),
        select_field("silence-repeats", say("silence_repeats"), repeats, ""),
        text_field("silence-note", say("note")),
        dmc.Button(say("silence_add"), id="silence-add", size="sm"),
    )
