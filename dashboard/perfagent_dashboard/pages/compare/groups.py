"""Groups of runs beside each other: which is the best, their figures, a line with a band each, and what the settings do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.board import groups_overlay
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.group_table import FILTERS, address, group_name, group_table, with_spread
from perfagent_dashboard.components.sweep import by_choice, goal_choice, parallel
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from perfagent_dashboard.server_api import ServerApi

__all__ = ["grouped"]

_MOST_DRAWN = 20


async def grouped(
    server: ServerApi, by: str, goal: str, given: Mapping[str, Any]
) -> tuple[list[Component], list[Component]]:
    """What stands in the head of the page, and below it. given: `run`, ids or names, and the filters. Raises Problem."""
    filters = {name: given.get(name) or None for name in (*FILTERS, "run")}
    found, swept = await asyncio.gather(
        server.get("/groups", by=by, goal=goal, metrics="loss", **filters),
        server.get("/groups/runs", by=by, goal=goal, **filters),
    )
    drawn = found["groups"][:_MOST_DRAWN]
    query = address("", filters, by=found["by"], goal=found["goal"], run=filters["run"]).removeprefix("?")
    lines = [(group["value"] or "", group_name(found["by"], group["value"])) for group in drawn]
    metrics = list(dict.fromkeys([*([found["goal"][4:]] if found["goal"] else []), "loss"]))
    back = address("/runs", filters, by=found["by"], goal=goal)
    head = [by_choice(found), goal_choice(found)]
    if not drawn:
        return head, [nothing(say("no_match"))]
    more = len(found["groups"]) + found["more"] - len(drawn)
    return head, [
        html.Section(
            [
                html.P(_headline(found), className="headline"),
                html.P(
                    [
                        say("groups_summary", runs=found["runs"], groups=len(drawn) + more), " ",
                        None if filters["run"] else _button(say("groups_runs"), back),
                    ],
                    className="quiet",
                ),
            ],
            className="card headlines",
        ),
        group_table({**found, "groups": drawn, "more": more}, filters, metrics, colored=len(drawn)),
        *parallel(swept, [key for key, _ in lines]),
        html.H2(say("compare_charts")),
        html.P(say("band_how"), className="quiet"),
        groups_overlay(query, lines, found["names"], metrics[0]),
    ]  # fmt: skip


def _button(text: str, link: str) -> Component:
    return html.A(text, href=link, className="button small", **hyphenated(data_nav=link))


def _headline(found: Mapping[str, Any]) -> str:
    """Which group is the best."""
    first, name = found["groups"][0], (found["goal"] or "")[4:]
    if not first["metrics"].get(name, {}).get("n"):
        return say("groups_no_best")
    figures = first["metrics"][name]
    group = group_name(found["by"], first["value"])
    return say("groups_best", name=group, metric=title_of(name), figures=with_spread(name, figures), count=figures["n"])
