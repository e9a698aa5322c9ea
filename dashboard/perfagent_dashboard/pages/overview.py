"""The overview, `/`: what needs somebody, worst first; below it what is running now. Nothing to do is one green line."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dash import Dash, Input, Output, State, dcc, html, no_update

from perfagent_dashboard.components.alert_card import alert_card, view_of
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.digest import digest
from perfagent_dashboard.components.feedback import trouble
from perfagent_dashboard.components.marks import severity_mark, state_badge
from perfagent_dashboard.components.server_trouble import server_trouble
from perfagent_dashboard.components.times import ago
from perfagent_dashboard.components.welcome import welcome
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["page"]

_MOST_ALERTS = 30
_MOST_RUNNING = 30


def page(server: ServerApi, address: str) -> Page:
    overview = _Overview(server, address)
    return Page(name="overview", path="/", layout=overview.layout, register=overview.register, icon="overview")


class _Overview:
    """address: of the server, for who has no run yet."""

    def __init__(self, server: ServerApi, address: str) -> None:
        self._server, self._address = server, address

    async def layout(self, **_: Any) -> Component:
        head, cards, running = await self._content()
        return html.Div(
            [
                html.Div(
                    [
                        html.Div(head, id="overview-head"),
                        html.Div(cards, id="overview-alerts", className="stack"),
                        html.Div(running, id="overview-running", className="stack"),
                    ],
                    className="stack",
                ),
                dcc.Store(id="alerts-tick", data=0),
                dcc.Store(id="overview-shown", data=digest(cards)),
            ],
            className="page overview-page",
            **hyphenated(data_page="live", data_tick="alerts-tick", data_runs="1", data_title=say("nav_overview")),
        )

    def register(self, app: Dash) -> None:
        app.callback(
            Output("overview-head", "children"), Output("overview-alerts", "children"),
            Output("overview-running", "children"), Output("overview-shown", "data"),
            Input("alerts-tick", "data"), State("overview-shown", "data"),
            prevent_initial_call=True,
        )(self._again)  # fmt: skip

    async def _again(self, _tick: int, shown: str) -> Any:
        """Redraws the alerts only if they have changed: a redraw loses the note that somebody is writing."""
        head, cards, running = await self._content()
        fresh = digest(cards)
        return head, no_update if fresh == shown else cards, running, fresh

    async def _content(self) -> tuple[list[Component], list[Component], list[Component]]:
        """The heading, the alerts, and what is running."""
        table = {"with": "verdict,latest", "limit": _MOST_RUNNING}
        try:
            firing, sick, running, session, own = await asyncio.gather(
                self._server.get("/alerts", state="firing"),
                self._server.get("/runs", **table, attention=True, sort="severity"),
                self._server.get("/runs", **table, state=["running", "starting"], sort="severity"),
                self._server.get("/session"),
                self._server.get("/self"),
            )
        except Problem as problem:
            return [trouble(problem)], [], []
        counts = sick["counts"]
        if not counts["all"]:
            return [welcome(self._address)], [], []
        stopped = own["rules_stopped"]
        needing = {row["run"]: place for place, row in enumerate(sick["runs"])}
        alerts = [
            one
            for one in firing["alerts"]
            if not one["acknowledged"] and one["severity"] != "info" and one["run"] in needing
        ]
        alerts.sort(key=lambda one: needing[one["run"]])
        cards = [alert_card(one, may_act=may_in(session, "operate", one["project"])) for one in alerts[:_MOST_ALERTS]]
        if stopped is not None:  # nothing else is to be believed then, least of all that all is well
            return [server_trouble(stopped), *(_head(counts) if counts["attention"] else [])], cards, _running(running)
        return [*_head(counts), *_open_alerts(firing["alerts"])], cards, _running(running)


def _head(counts: dict[str, Any]) -> list[Component]:
    if not counts["attention"]:
        head = html.H1([severity_mark("healthy"), " ", say("all_well", all=counts["all"])], className="all-well")
        ill = counts["severities"]["critical"] + counts["severities"]["warning"]
        link = "/runs?severity=critical&severity=warning"
        return [head, html.A(say("ended_ill", count=ill), href=link, **hyphenated(data_nav=link))] if ill else [head]
    link = "/runs?attention=1"
    return [
        html.H1(
            [
                say("attention_head", count=counts["attention"], all=counts["all"]), " ",
                html.A(say("to_table"), href=link, className="button small", **hyphenated(data_nav=link)),
            ]
        )
    ]  # fmt: skip


def _open_alerts(firing: list[dict[str, Any]]) -> list[Component]:
    """How many alerts the bar and their page count: those of severity info need nobody."""
    severities = [one["severity"] for one in firing if view_of(one) == "open"]
    if not severities:
        return []
    info = severities.count("info")
    told = say("open_alerts", count=len(severities), severe=len(severities) - info, info=info)
    return [html.A(told, href="/alerts", **hyphenated(data_nav="/alerts"))]


def _running(found: dict[str, Any]) -> list[Component]:
    if not found["runs"]:
        return [html.P(say("none_running"), className="hint")]
    rows = [_row(row) for row in found["runs"]]
    link = "/runs?state=running"
    more = found["total"] - len(rows)
    return [
        html.H2(say("running_now", count=found["total"])),
        html.Div(rows, className="card run-rows"),
        html.A(say("and_more", count=more), href=link, **hyphenated(data_nav=link)) if more > 0 else html.Span(),
    ]


def _row(row: dict[str, Any]) -> Component:
    link = f"/run/{quote(row['run'], safe='')}"
    verdict = row["verdict"]
    return html.A(
        [
            severity_mark(verdict["outcome"]),
            html.B(row["name"] or row["run"]),
            html.Span(verdict["title"] or verdict["message"], className="says"),
            html.Span(f"{say('step')} {row['step']:,}", className="quiet"),
            html.Span(ago(row["updated"]), className="quiet"),
            state_badge(row["state"]) if row["state"] != "running" else None,
        ],
        href=link, className="run-row", **hyphenated(data_nav=link),
    )  # fmt: skip
