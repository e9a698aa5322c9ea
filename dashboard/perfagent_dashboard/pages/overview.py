"""The overview, `/`: what needs somebody, worst first; below it what is running now, or ended last where nothing is. Nothing
to do is one green line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from perfagent.wire import BAD_ENDS
from perfagent_dashboard.components.alert_card import beyond
from perfagent_dashboard.components.alert_groups import fold, take_button
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.digest import digest
from perfagent_dashboard.components.feedback import trouble
from perfagent_dashboard.components.marks import severity_mark, state_badge
from perfagent_dashboard.components.numbers import number, quantity, si
from perfagent_dashboard.components.prose import prose
from perfagent_dashboard.components.server_trouble import server_trouble
from perfagent_dashboard.components.times import ago
from perfagent_dashboard.components.welcome import welcome
from perfagent_dashboard.pages.alike_runs import MOST_RUNS, AlikeRuns, alike_runs, said_of
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import say

__all__ = ["page"]

_FOLDED = 3
"""So many runs with one verdict are one line."""
_MOST_OF_A_KIND = 50
_MOST_RUNNING = 30
_MOST_ASKED = 100
"""Running ones, of which some need somebody."""
_MOST_ENDED = 5


def page(server: ServerApi, address: str) -> Page:
    overview = _Overview(server, address)
    return Page(name="overview", path="/", layout=overview.layout, register=overview.register, icon="overview")


class _Overview:
    """address: of the server, for who has no run yet."""

    def __init__(self, server: ServerApi, address: str) -> None:
        self._server, self._address = server, address

    async def layout(self, **_: Any) -> Component:
        made = time.time()
        head, cards, running = await self._content()
        return html.Div(
            [
                html.Div(
                    [
                        html.Div(head, id="overview-head", className="page-head"),
                        html.Div(cards, id="overview-alerts", className="alert-list"),
                        html.Div(running, id="overview-running", className="stack"),
                    ],
                    className="stack",
                ),
                dcc.Store(id="alerts-tick", data=0),
                dcc.Store(id="overview-shown", data=digest(cards)),
            ],
            className="page overview-page",
            **hyphenated(
                data_page="live", data_tick="alerts-tick", data_runs="1", data_title=say("nav_overview"), data_made=str(made)
            ),
        )  # fmt: skip

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
        """The heading, the runs that need somebody, and what is running."""
        try:
            sick, running, session, own = await asyncio.gather(
                self._server.get("/runs", **{"with": "verdict"}, attention=True, sort="severity", limit=MOST_RUNS),
                self._server.get(
                    "/runs", **{"with": "verdict,latest,timing"}, state=["running", "starting"], sort="severity",
                    limit=_MOST_ASKED,
                ),
                self._server.get("/session"),
                self._server.get("/self"),
            )  # fmt: skip
            ended = [] if running["runs"] else await self._ended()
        except Problem as problem:
            return [trouble(problem)], [], []
        counts = sick["counts"]
        if not counts["all"]:
            return [welcome(self._address)], [], []
        lines = [line for some in alike_runs(sick["runs"]) for line in _needing(some, session)]
        if (left := sick["total"] - len(sick["runs"])) > 0:
            lines.append(_more("/runs?attention=1", left))
        stopped = own["rules_stopped"]
        if stopped is not None:  # nothing else is to be believed then, least of all that all is well
            return (
                [server_trouble(stopped), *(_head(sick) if counts["attention"] else [])],
                lines,
                _running(running, ended),
            )
        return _head(sick), lines, _running(running, ended)

    async def _ended(self) -> list[dict[str, Any]]:
        """The newest runs that ended in the last day."""
        found = await self._server.get(
            "/runs", **{"with": "verdict,latest,timing"}, state=["finished", *BAD_ENDS], sort="updated",
            since=(datetime.now(UTC) - timedelta(days=1)).isoformat(), limit=_MOST_ENDED,
        )  # fmt: skip
        return [*found["runs"]]


def _head(sick: dict[str, Any]) -> list[Component]:
    counts = sick["counts"]
    if not counts["attention"]:
        head = html.H1([severity_mark("healthy"), " ", say("all_well", all=counts["all"])], className="all-well")
        ill = counts["severities"]["critical"] + counts["severities"]["warning"]
        link = "/runs?severity=critical&severity=warning"
        return [head, html.A(say("ended_ill", count=ill), href=link, **hyphenated(data_nav=link))] if ill else [head]
    link = "/runs?attention=1"
    critical = sum(row["verdict"]["outcome"] == "critical" for row in sick["runs"])
    split = say("attention_split", critical=critical, others=len(sick["runs"]) - critical)
    return [
        html.H1(say("attention_head", count=counts["attention"], all=counts["all"])),
        html.Span(split if sick["total"] == len(sick["runs"]) else "", className="quiet"),
        html.A(say("to_table"), href=link, **hyphenated(data_nav=link)),
    ]


def _needing(some: AlikeRuns, session: dict[str, Any]) -> list[Component]:
    """A line a run; one for many runs that are alike."""
    rows = [_sick_row(row, session) for row in some.rows[:_MOST_OF_A_KIND]]
    if len(some.rows) < _FOLDED:
        return rows
    if (left := len(some.rows) - len(rows)) > 0:
        rows.append(_more("/runs?attention=1", left))
    may_act = all(may_in(session, "operate", row["project"]) for row in some.rows)
    button = take_button("runs", some.key, len(some.rows)) if may_act else None
    counted = say("alike_runs", count=len(some.rows))
    newest = max(row["verdict"]["since"] or row["updated"] for row in some.rows)
    severity = some.rows[0]["verdict"]["outcome"]
    return [fold(severity, some.title, counted, newest, html.Div(rows, className="folded"), button)]


def _sick_row(row: Mapping[str, Any], session: dict[str, Any]) -> Component:
    link = f"/run/{quote(row['run'], safe='')}"
    verdict, alerts = row["verdict"], row["alerts"]
    others, rest = sum(alerts.get("firing", {}).values()) - 1, beyond(said_of(row), verdict["message"])
    facts = [
        html.Span(say("more_alerts", count=others)) if others > 0 else None,
        html.Span(row["project"]),
        ago(verdict["since"] or row["updated"]),
    ]
    may_act = may_in(session, "operate", row["project"])
    return html.Article(
        [
            severity_mark(verdict["outcome"]),
            html.A(
                [
                    html.B(row["name"] or row["run"]),
                    html.H2(prose(said_of(row))),
                    html.Span(prose(rest), className="beyond") if rest else None,
                ],
                href=link, className="run what", **hyphenated(data_nav=link),
            ),
            html.P(facts, className="facts"),
            html.Div(take_button("run", row["run"], 1), className="actions") if may_act else None,
        ],
        className="alert card",
        **hyphenated(data_run=row["run"]),
    )  # fmt: skip


def _more(link: str, count: int) -> Component:
    return html.A(say("and_more", count=count), href=link, className="more", **hyphenated(data_nav=link))


def _running(found: dict[str, Any], ended: list[dict[str, Any]]) -> list[Component]:
    """Those that need nobody: the others stand above. ended: shown where none is running."""
    if not found["runs"]:
        none = html.P(say("none_running"), className="hint")
        rows = [_row(row) for row in ended if not row["needs_attention"]]
        return [none, html.H2(say("ended_lately")), html.Div(rows, className="card run-rows")] if rows else [none]
    well = [row for row in found["runs"] if not row["needs_attention"]]
    rows = [_row(row) for row in well[:_MOST_RUNNING]]
    above = len(found["runs"]) - len(well)
    left = found["total"] - above - len(rows)
    return [
        html.H2(say("running_above" if above else "running_now", count=found["total"], above=above)),
        html.Div(rows, className="card run-rows") if rows else html.Span(),
        _more("/runs?state=running", left) if left > 0 else html.Span(),
    ]


def _row(row: dict[str, Any]) -> Component:
    link = f"/run/{quote(row['run'], safe='')}"
    verdict = row["verdict"]
    return html.A(
        [
            severity_mark(verdict["outcome"]),
            html.B(row["name"] or row["run"]),
            html.Span([verdict["title"] or verdict["message"], _taken(row)], className="says"),
            html.Span(_figures(row), className="quiet"),
            html.Span(f"{say('step')} {row['step']:,}", className="quiet"),
            html.Span(ago(row["updated"]), className="quiet"),
            state_badge(row["state"]) if row["state"] != "running" else None,
        ],
        href=link, className="run-row", **hyphenated(data_nav=link),
    )  # fmt: skip


def _taken(row: dict[str, Any]) -> str:
    """That somebody works on what is wrong."""
    firing = row["alerts"].get("firing", {})
    return f" · {say('view_acknowledged')}" if {"critical", "warning"} & {*firing} else ""


def _figures(row: dict[str, Any]) -> str:
    """The newest loss, and how fast it is."""
    loss, rate = row["loss"], row["timing"]["throughput_name"]
    said = [f"{loss} {si(number(row['latest'].get(loss)))}"] if loss in row["latest"] else []
    said += [" ".join(quantity(rate, number(row["timing"]["throughput"])))] if rate else []
    return " · ".join(said)
