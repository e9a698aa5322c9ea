"""The alerts page, `/alerts`: the inbox of all runs. What needs somebody first; who has taken it; what is kept quiet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, MATCH, Dash, Input, Output, State, ctx, dcc, html, no_update

from perfagent_dashboard import ids
from perfagent_dashboard.components.alert_card import alert_card, alert_history, view_of
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.digest import digest
from perfagent_dashboard.components.feedback import note, nothing, trouble
from perfagent_dashboard.components.times import moment
from perfagent_dashboard.pages.alert_acts import ask_for
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["page"]

Alert = dict[str, Any]

_ORDER = {"critical": 0, "warning": 1, "info": 2}
_RESOLVED = 200
_SHOWN = 50  # cards at once; more on request
_HOUR_S = 3600


def page(server: ServerApi) -> Page:
    inbox = _Inbox(server)
    return Page(name="alerts", path="/alerts", layout=inbox.layout, register=inbox.register, icon="alerts")


_VIEWS = ("open", "acknowledged", "quiet", "resolved")


class _Inbox:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    async def layout(self, view: str = "open", severity: str = "", q: str = "", **_: Any) -> Component:
        """view, severity, q: of the address."""
        view = view if view in _VIEWS else "open"
        try:
            content, counts = await self._content(view, severity, q, _SHOWN)
            silences = await self._silences()
        except Problem as problem:
            return trouble(problem)
        return html.Div(
            [
                html.Div([html.H1(say("nav_alerts")), *_toolbar(view, severity, q, counts)], className="page-head"),
                html.Div(content, id="alerts-list"),
                html.Div(silences, id="alerts-silences"),
                dcc.Store(id="alerts-tick", data=0),
                dcc.Store(id="alerts-most", data=_SHOWN),
                dcc.Store(id="alerts-shown", data=digest(content)),
            ],
            className="page alerts-page",
            **hyphenated(
                data_page="live", data_tick="alerts-tick", data_title=say("nav_alerts"),
                data_address="alerts-view:view:open,alerts-severity:severity:,alerts-search:q:",
            ),
        )  # fmt: skip

    def register(self, app: Dash) -> None:
        app.callback(
            Output("alerts-list", "children"), Output("alerts-view", "data"), Output("alerts-shown", "data"),
            Input("alerts-view", "value"), Input("alerts-severity", "value"), Input("alerts-search", "value"),
            Input("alerts-tick", "data"), Input("alerts-most", "data"), State("alerts-shown", "data"),
            prevent_initial_call=True,
        )(self._show)  # fmt: skip
        app.callback(
            Output("alerts-most", "data"),
            Input({"more-alerts": ALL}, "n_clicks"), State("alerts-most", "data"),
            prevent_initial_call=True,
        )(lambda clicks, most: most + _SHOWN if any(clicks) else no_update)  # fmt: skip
        app.callback(
            Output(ids.NOTES, "sendNotifications", allow_duplicate=True),
            Output("alerts-tick", "data", allow_duplicate=True),
            Input({"act": ALL, "alert": ALL, "at": ALL}, "n_clicks"),
            State({"note-of": ALL, "at": ALL}, "value"), State({"note-of": ALL, "at": ALL}, "id"), State("alerts-tick", "data"),
            prevent_initial_call=True,
        )(self._act)  # fmt: skip
        app.callback(
            Output({"history-of": MATCH}, "children"),
            Input({"more-of": MATCH}, "n_clicks"), State({"more-of": MATCH}, "id"),
            prevent_initial_call=True,
        )(self._history)  # fmt: skip
        app.callback(
            Output(ids.NOTES, "sendNotifications", allow_duplicate=True),
            Output("alerts-silences", "children"),
            Output("alerts-tick", "data", allow_duplicate=True),
            Input("silence-add", "n_clicks"), Input({"silence": ALL}, "n_clicks"),
            State("silence-matcher", "value"), State("silence-value", "value"), State("silence-hours", "value"),
            State("silence-repeats", "value"), State("silence-note", "value"), State("alerts-tick", "data"),
            prevent_initial_call=True,
        )(self._silence)  # fmt: skip

    # ---- the list

    async def _show(self, view: str, severity: str, text: str, _tick: int, most: int, shown: str) -> Any:
        """A list that is as it was stays: drawn anew it would close a menu that somebody has just opened."""
        try:
            content, counts = await self._content(view, severity, text, most)
        except Problem as problem:
            return trouble(problem), no_update, ""
        fresh = digest(content)
        return no_update if fresh == shown else content, _views(counts), fresh

    async def _content(self, view: str, severity: str, text: str, most: int) -> tuple[Component, dict[str, int]]:
        """The cards of a view, and how many there are in each."""
        firing, resolved, session = await asyncio.gather(
            self._server.get("/alerts", state="firing", severity=severity),
            self._server.get("/alerts", state="resolved", severity=severity, limit=_RESOLVED),
            self._server.get("/session"),
        )
        alerts = [*firing["alerts"], *resolved["alerts"]]
        words = text.lower().split()
        found = [one for one in alerts if all(word in _searched(one) for word in words)]
        counts = {name: sum(view_of(one) == name for one in found) for name in _VIEWS}
        shown = [one for one in found if view_of(one) == view]
        if view != "resolved":
            shown.sort(key=lambda one: _ORDER.get(one["severity"], 3))  # stable: newest first within
        cards = [alert_card(one, may_act=may_in(session, "operate", one["project"])) for one in shown[:most]]
        if not cards:
            cards = [nothing(say(f"alerts_none_{view}" if not (words or severity) else "no_match"))]
        if "operate" not in session["may"] and shown:
            cards.insert(0, nothing(say("may_not_act")))
        if (left := len(shown) - most) > 0:
            cards.append(dmc.Button(say("alerts_more", count=left), id={"more-alerts": "next"}, variant="default"))
        return html.Div(cards, className="stack", **hyphenated(data_view=view)), counts

    # ---- people's actions

    async def _act(self, clicks: Sequence[int | None], notes: Sequence[str], noted: Sequence[Any], tick: int) -> Any:
        """Of every page: their stores have the same name."""
        asked = ctx.triggered_id
        if not asked or not any(clicks):
            return no_update, no_update
        words = {(one["note-of"], one["at"]): told for one, told in zip(noted, notes, strict=True)}
        said, done = await ask_for(self._server, asked["act"], asked["alert"], words.get((asked["alert"], asked["at"])))
        return said, (tick or 0) + 1 if done else no_update

    async def _history(self, _clicks: int | None, of: dict[str, str]) -> Any:
        """Of every page, as the acts."""
        try:
            return alert_history((await self._server.get(f"/alerts/{quote(of['more-of'], safe='')}"))["history"])
        except Problem as problem:
            return trouble(problem)

    async def _silence(
        self, add: int | None, ends: Sequence[int | None], matcher: str, value: str, hours: float, repeats: str,
        told: str, tick: int,
    ) -> Any:  # fmt: skip
        asked = ctx.triggered_id
        if asked == "silence-add" and add:
            body = {matcher: (value or "").strip(), "for_s": float(hours or 0) * _HOUR_S, "note": told or ""}
            request: tuple[str, str, Any] = "POST", "/silences", body | ({"repeats": repeats} if repeats else {})
        elif isinstance(asked, dict) and any(ends):
            request = "DELETE", f"/silences/{quote(asked['silence'], safe='')}", None
        else:
            return no_update, no_update, no_update
        try:
            await self._server.ask(*request)
        except Problem as problem:
            return note(problem.message, failed=True), no_update, no_update
        said = say("done_silence" if request[0] == "POST" else "done_unsilence")
        return note(said), await self._silences(unfolded=True), tick + 1

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


def _searched(alert: Alert) -> str:
    return " ".join(alert[name] for name in ("title", "message", "rule", "run_name", "run")).lower()


def _views(counts: dict[str, int]) -> list[dict[str, str]]:
    return [{"value": view, "label": f"{say(f'view_{view}')} {counts[view]}"} for view in _VIEWS]


def _toolbar(view: str, severity: str, text: str, counts: dict[str, int]) -> list[Component]:
    severities = [{"value": "", "label": say("all")}]
    severities += [{"value": one, "label": say(f"severity_{one}")} for one in _ORDER]
    return [
        dmc.SegmentedControl(id="alerts-view", data=_views(counts), value=view, size="sm"),
        dmc.SegmentedControl(id="alerts-severity", data=severities, value=severity, size="sm"),
        dmc.TextInput(
            id="alerts-search", value=text, placeholder=say("alerts_search"), debounce=250, size="sm", className="search",
            **{"aria-label": say("alerts_search")},
        ),
    ]  # fmt: skip


def _silence_row(silence: dict[str, Any], *, may_act: bool) -> Component:
    matchers = [f"{name} {silence[name]}" for name in ("project", "tag", "run", "rule") if silence[name]]
    repeats = f", {say('repeats_' + silence['repeats'])}" if silence["repeats"] else ""
    end = dmc.Button(say("silence_end"), id={"silence": silence["id"]}, size="compact-sm", variant="default")
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
    matchers = [{"value": name, "label": say(f"matcher_{name}")} for name in ("run", "project", "tag", "rule")]
    repeats = [{"value": name, "label": say(f"repeats_{name or 'never'}")} for name in ("", "daily", "weekly")]
    return html.Div(
        [
            dmc.Select(id="silence-matcher", label=say("silence_of"), data=matchers, value="run", size="sm", allowDeselect=False),
            dmc.TextInput(id="silence-value", label=say("silence_value"), size="sm"),
            dmc.NumberInput(id="silence-hours", label=say("silence_hours"), value=2, min=0.1, max=8760, size="sm"),
            dmc.Select(
                id="silence-repeats", label=say("silence_repeats"), data=repeats, value="", size="sm", allowDeselect=False
            ),
            dmc.TextInput(id="silence-note", label=say("note"), size="sm"),
            dmc.Button(say("silence_add"), id="silence-add", size="sm"),
        ],
        className="form-row",
    )  # fmt: skip
