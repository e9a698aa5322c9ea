"""The compare page, `/compare?runs=a,b`: what differs in a sentence, then speed with its interval, loss and memory, settings,
and the charts over each other. The first run is the baseline; `a:100-500` is a window of a run. With `by=config.lr`, a line
is a group of runs (groups.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.board import overlay
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.fields import search_field
from perfagent_dashboard.components.sweep import choices, parallel, views_menu
from perfagent_dashboard.pages.compare.groups import grouped
from perfagent_dashboard.pages.compare.summary import different, headlines, runs_table, step_table
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.pages.run.facts import run_path
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["MOST_COMPARED", "page"]

MOST_COMPARED = 20
_SUGGESTED = 200


def page(server: ServerApi) -> Page:
    compare = _Compare(server)
    return Page(
        name="compare", path="/compare", layout=compare.layout, register=compare.register, icon="compare", charts=True
    )


class _Compare:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    async def layout(self, runs: str | list[str] = "", by: str = "", goal: str = "", **filters: Any) -> Component:
        """runs: of the address, with commas between them, or named several times as in the API. filters: of the page Runs,
        which say what is grouped."""
        named = ",".join([runs] if isinstance(runs, str) else runs)
        every = list(dict.fromkeys(one for one in named.split(",") if one))
        asked = every[:MOST_COMPARED]
        try:
            if by:
                head, content = await grouped(self._server, by, goal, {**filters, "run": every})
            else:
                head, content = await self._of_runs(asked, goal)
        except Problem as problem:
            head, content = [await self._picker(asked)], [nothing(problem.message)]
        cut = len(every) > len(asked) and not by
        return html.Div(
            [
                html.Div([html.H1(say("nav_compare")), *head, views_menu("compare")], className="page-head"),
                nothing(say("compare_cut", most=MOST_COMPARED, count=len(every))) if cut else None,
                dcc.Store(id="compare-regroup"),
                html.Div(content, className="stack"),
            ],
            className="page compare-page",
            **hyphenated(data_page="live", data_title=say("nav_compare")),
        )

    def register(self, app: Dash) -> None:
        app.callback(
            Output("_pages_location", "search", allow_duplicate=True),
            Input("compare-runs", "value"), State("_pages_location", "search"),
            prevent_initial_call=True,
        )(_address)  # fmt: skip
        app.clientside_callback(  # type: ignore[no-untyped-call]
            ClientsideFunction("sweep", "regroup"), Output("compare-regroup", "data"), Input("by", "value"),
            Input("goal", "value"), prevent_initial_call=True,
        )  # fmt: skip
        app.callback(
            Output("compare-settings", "children"),
            Input("compare-search", "value"), State("compare-differences", "data"),
            prevent_initial_call=True,
        )(_found)  # fmt: skip

    async def _picker(self, asked: Sequence[str]) -> Component:
        """Runs by name, where it means one run only; else by id. A window is typed behind it."""
        try:
            listed = (await self._server.get("/runs", limit=_SUGGESTED))["runs"]
        except Problem:
            listed = []
        names = [run["name"] for run in listed]
        known = {
            run["run"]: run["name"]
            if run["name"] and "," not in run["name"] and names.count(run["name"]) == 1
            else run["run"]
            for run in listed
        }
        chosen = list(dict.fromkeys(known.get(one, one) for one in asked))
        return dmc.TagsInput(
            id="compare-runs", value=chosen, data=list(known.values()), maxTags=MOST_COMPARED, limit=30,
            placeholder=say("compare_add"), size="sm", className="picker", splitChars=[","], acceptValueOnBlur=False,
            **hyphenated(aria_label=say("compare_add")),
        )  # fmt: skip

    async def _of_runs(self, asked: Sequence[str], goal: str) -> tuple[list[Component], list[Component]]:
        """What stands in the head of the page, and below it."""
        picker = await self._picker(asked)
        if len(asked) < 2:
            return [picker], [nothing(say("compare_none" if not asked else "compare_one"))]
        found = await self._server.get("/compare", runs=list(asked))
        sides = found["sides"]
        runs = list(dict.fromkeys(side["run"] for side in sides))
        swept, *listed = await asyncio.gather(
            self._server.get("/groups/runs", goal=goal, run=runs),
            *(self._server.get(run_path(run, "names")) for run in runs),
        )
        names = dict.fromkeys(name for one in listed for name in one["names"])
        return [picker, *choices(swept)], self._content(found, swept, names)

    @staticmethod
    def _content(found: Mapping[str, Any], swept: Mapping[str, Any], names: Iterable[str]) -> list[Component]:
        sides = found["sides"]
        link = ",".join(quote(side["run"], safe="") for side in sides)
        return [
            headlines(found, swept),
            html.H2(say("compare_charts"), id="compare-charts", **hyphenated(data_runs=link)),
            overlay([(side["run"], side["name"]) for side in sides], names),
            html.H2(say("compare_runs")),
            runs_table(found, swept),
            *parallel(swept, [side["run"] for side in sides]),
            *step_table(found),
            html.Div(
                [html.H2(say("compare_settings")), search_field("compare-search", say("config_search"))],
                className="head-row",
            ),
            dcc.Store(
                id="compare-differences", data={"names": [side["name"] for side in sides], **found["differences"]}
            ),
            html.Div(different(found["differences"], [side["name"] for side in sides], ""), id="compare-settings"),
        ]


def _address(runs: Sequence[str], now: str) -> Any:
    """Leads to the same page of these runs."""
    named = "runs=" + ",".join(quote(one.strip(), safe=":-") for one in runs) if runs else ""
    goal = urlencode([(name, value) for name, value in parse_qsl((now or "").lstrip("?")) if name == "goal"])
    wanted = "?" + "&".join(part for part in (named, goal) if part) if runs else ""
    return no_update if wanted == (now or "") else wanted


def _found(search: str, held: Mapping[str, Any]) -> Any:
    return different(held, held["names"], search or "")
