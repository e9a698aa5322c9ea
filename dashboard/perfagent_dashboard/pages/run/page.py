"""What stands on the page of a run and what keeps it fresh. The server's messages count a store up (assets/pages/live.js); then
each part that has changed is shown anew."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, dcc, html, no_update, set_props

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.digest import digest
from perfagent_dashboard.components.feedback import trouble
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.pages.run.actions import Actions, dialogs
from perfagent_dashboard.pages.run.facts import RunFacts, read_facts, run_path
from perfagent_dashboard.pages.run.head import head
from perfagent_dashboard.pages.run.notes import NotesForm, notes_panel
from perfagent_dashboard.pages.run.step_bar import step_bar
from perfagent_dashboard.pages.run.tabs import TABS, Tab
from perfagent_dashboard.pages.run.tabs.config import sections
from perfagent_dashboard.pages.run.tabs.console import refreshed
from perfagent_dashboard.pages.run.tabs.layers import heat_map
from perfagent_dashboard.pages.run.tabs.media import SLIDER
from perfagent_dashboard.pages.run.tabs.media import logged as media_logged
from perfagent_dashboard.pages.run.tabs.media import sections as media_sections
from perfagent_dashboard.pages.run.tiles import read_trends, tiles, window_of
from perfagent_dashboard.pages.run.verdict import tone_of_run, verdict_band
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["page"]

_TABS = {tab.name: tab for tab in TABS}
_AGAIN_MS = 3000
_PARTS = ("head", "announced", "verdict", "notes", "figures", "step")
"""Of the top of the page, each shown anew only when it differs."""


def page(server: ServerApi) -> Page:
    run = _RunPage(server)
    return Page(name="run", path="/run/<run_in_path>", layout=run.layout, register=run.register, charts=True)


class _RunPage:
    def __init__(self, server: ServerApi) -> None:
        self._server = server
        self._actions, self._notes = Actions(server), NotesForm(server)

    async def layout(self, run_in_path: str, tab: str = "charts", **_: Any) -> Component:
        """run_in_path: the id, quoted. tab: of the address."""
        ident, made = unquote(run_in_path).strip("/"), time.time()
        try:
            facts = await read_facts(self._server, ident)
            top = await self._top(facts)
            shown = tab if tab in _TABS and _TABS[tab].is_there(facts) else "charts"
            content = await self._content(shown, facts)
        except Problem as problem:
            return _unknown(ident) if problem.status == 404 else trouble(problem)
        parts: dict[str, Component] = {
            name: html.Div(top[name], id=f"run-{name}", className=f"run-{name}") for name in _PARTS
        }
        parts["announced"] = html.P(top["announced"], id="run-announced", className="heard", role="status")
        parts["notes"] = html.Div([parts["notes"], html.Div(id="notes-form")], className="with-form")
        charts = await _TABS["charts"].content(self._server, facts)
        return html.Div(
            [
                *parts.values(),
                dmc.Tabs(_tabs(facts), id="run-tabs", value=shown, className="run-tabs", keepMounted=False),
                html.Div(charts, id="run-charts", hidden=shown != "charts"),
                html.Div(content, id="run-tab", className="stack"),
                *dialogs(),
                dcc.Store(id="alerts-tick", data=0),
                dcc.Interval(id="run-again", interval=_AGAIN_MS, disabled=not facts.is_unsettled),
                dcc.Store(id="run-shown", data={name: digest(top[name]) for name in _PARTS}),
                dcc.Store(id="run-id", data=facts.id),
                dcc.Store(id="run-tab-shown", data=digest(content)),
            ],
            className="page run-page",
            **hyphenated(
                data_page="live", data_tick="alerts-tick", data_run=facts.id, data_title=facts.run["name"] or facts.id,
                data_address="run-tabs:tab:charts", data_made=str(made), data_may="change" if "operate" in facts.may else "read",
            ),
        )  # fmt: skip

    def register(self, app: Dash) -> None:
        app.callback(
            *(Output(f"run-{name}", "children") for name in _PARTS),
            Output("run-tabs", "children"), Output("run-shown", "data"), Output("run-again", "disabled"),
            Input("alerts-tick", "data"), Input("run-again", "n_intervals"), State("run-id", "data"), State("run-shown", "data"),
            State("run-tabs", "value"), State("run-tab-shown", "data"),
            prevent_initial_call=True,
        )(self._again)  # fmt: skip
        app.callback(
            Output("run-tab", "children"), Output("run-charts", "hidden"), Output("run-tab-shown", "data"),
            Input("run-tabs", "value"), State("run-id", "data"),
            prevent_initial_call=True,
        )(self._tab)  # fmt: skip
        app.callback(
            Output("layers-map", "children"),
            Input("layers-family", "value"),
            State("run-id", "data"),
            prevent_initial_call=True,
        )(self._layers)
        sliders = {"type": SLIDER, "name": ALL}
        app.callback(
            Output("media-sections", "children"), Output("media-shown", "data"),
            Input("alerts-tick", "data"), Input(sliders, "value"), State(sliders, "id"), State(sliders, "max"),
            State("run-id", "data"), State("media-shown", "data"),
            prevent_initial_call=True,
        )(self._media)  # fmt: skip
        app.callback(
            Output("console-lines", "children"),
            Input("console-search", "value"), Input("console-rank", "value"), Input("console-stream", "value"),
            Input("alerts-tick", "data"), State("run-id", "data"),
            prevent_initial_call=True,
        )(self._console)  # fmt: skip
        app.callback(
            Output("config-sections", "children"),
            Input("config-search", "value"),
            State("run-id", "data"),
            prevent_initial_call=True,
        )(self._config)
        self._actions.register(app)
        self._notes.register(app)

    async def _top(self, facts: RunFacts) -> dict[str, Any]:
        figures = tiles(facts, await read_trends(self._server, facts))
        over = window_of(facts.timing)
        verdict = facts.verdict
        tone = tone_of_run(facts)
        return {
            "head": head(facts),
            "announced": f"{say(f'severity_{tone}')}: {verdict['title'] or verdict['message']}",
            "verdict": verdict_band(facts),
            "notes": notes_panel(facts),
            "figures": html.Div(figures),
            "step": step_bar(facts.timing)
            or (html.P(say("figures_over", over=over), className="quiet") if over else None),
        }

    async def _again(self, _tick: int, _again: int, run: str, shown: dict[str, str], tab: str, tab_shown: str) -> Any:
        try:
            facts = await read_facts(self._server, run)
            top = await self._top(facts)
            content = None if _TABS[tab].is_kept else await self._content(tab, facts)
        except Problem as problem:
            if problem.status != 404:  # the badge in the bar tells that the server is away
                return (no_update,) * (len(_PARTS) + 3)
            return *(_unknown(run) if name == "verdict" else None for name in _PARTS), [], {}, True
        fresh = {name: digest(top[name]) for name in _PARTS} | {"tabs": digest(_tabs(facts))}
        parts = (no_update if fresh[name] == shown.get(name) else top[name] for name in _PARTS)
        if content is not None and (of_tab := digest(content)) != tab_shown:
            set_props("run-tab", {"children": content})
            set_props("run-tab-shown", {"data": of_tab})
        return (
            *parts,
            no_update if fresh["tabs"] == shown.get("tabs") else _tabs(facts),
            fresh,
            not facts.is_unsettled,
        )

    async def _tab(self, tab: str, run: str) -> Any:
        """The board of the charts stays where it is, hidden or not: it is live by itself."""
        if tab == "charts":
            return [], False, digest([])
        try:
            content = await self._content(tab, await read_facts(self._server, run))
        except Problem as problem:
            return trouble(problem), True, ""
        return content, True, digest(content)

    async def _content(self, tab: str, facts: RunFacts) -> Any:
        """Of a tab, below the charts."""
        return [] if tab == "charts" else await _TABS[tab].content(self._server, facts)

    async def _layers(self, family: str, run: str) -> Any:
        try:
            return await heat_map(self._server, run, family)
        except Problem as problem:
            return trouble(problem)

    async def _media(
        self, _tick: int, values: list[int], sliders: list[dict[str, str]], newest: list[int], run: str, shown: str
    ) -> Any:
        """A slider at its end follows what comes."""
        at = zip(sliders, values, newest, strict=True)
        chosen = {one["name"]: value for one, value, last in at if value is not None and value < last}
        try:
            found = await media_logged(self._server, run)
            if (fresh := digest([found, chosen])) == shown:
                return no_update, no_update
            return await media_sections(self._server, run, found, chosen), fresh
        except Problem:
            return no_update, no_update

    async def _console(self, search: str, rank: str, stream: str, _tick: int, run: str) -> Any:
        try:
            summary = await self._server.get(run_path(run))
            several = summary["world_size"] > 1
            return await refreshed(self._server, run, search or "", rank or "", stream or "", several=several)
        except Problem:
            return no_update

    async def _config(self, search: str, run: str) -> Any:
        try:
            return sections(await self._server.get(run_path(run)), search or "")
        except Problem as problem:
            return trouble(problem)


def _tabs(facts: RunFacts) -> list[Component]:
    """With empty panels, for a tab must name one: what it shows stands below, where the charts stay when another opens."""
    there = [tab for tab in TABS if tab.is_there(facts)]
    panels = [dmc.TabsPanel(value=tab.name, children=None) for tab in there]
    return [dmc.TabsList([_tab(tab, facts) for tab in there]), *panels]


def _tab(tab: Tab, facts: RunFacts) -> Component:
    counted = tab.count(facts)
    said = [html.Span(counted, className="count quiet")] if counted else []
    speaking = {one["severity"] for one in (facts.verdict, *facts.findings) if _leads_to(facts, one["rule"], tab)}
    if worst := next((one for one in ("critical", "warning") if one in speaking), ""):
        said.append(html.Span("▲", className=f"severity {worst}", title=say("tab_marked")))
    title = tab.title(facts) if tab.title else say(f"tab_{tab.name}")
    return dmc.TabsTab([title, *said], value=tab.name, **hyphenated(data_value=tab.name))


def _leads_to(facts: RunFacts, rule: str, tab: Tab) -> bool:
    """Whether what a rule finds is seen in this tab."""
    home = next((one for one in TABS if rule in one.rules), None)
    return home is tab if home is not None else (facts.marks.get(rule) or [""])[0].startswith(tab.marks)


def _unknown(run: str) -> Component:
    link = html.A(say("to_runs"), href="/runs", className="button", **hyphenated(data_nav="/runs"))
    return html.Section(
        [html.H1(say("no_run_title", run=run)), html.P(say("no_run")), link],
        className="notice",
        **hyphenated(data_page="missing"),
    )
