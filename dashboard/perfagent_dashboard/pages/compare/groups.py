"""Compares groups of runs: the best group, the table, parallel coordinates, and charts with a line and a band per group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent_dashboard.components.board import groups_overlay
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.sweep import (
    FILTERS,
    address,
    choices,
    group_name,
    group_table,
    link,
    parallel,
    with_spread,
)  # fmt: skip
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
    asked = {"by": by, "goal": goal, **{name: given.get(name) or None for name in (*FILTERS, "run")}}
    found, swept = await asyncio.gather(
        server.get("/groups", metrics="loss", **asked), server.get("/groups/runs", **asked)
    )
    drawn = found["groups"][:_MOST_DRAWN]
    if not drawn:
        return choices(found), [nothing(say("no_match"))]
    # What is in no group has nothing in common, and its band would press the others flat.
    drawn.sort(key=lambda group: group["value"] is None)
    with_lines = [group for group in drawn if group["value"] is not None] or drawn
    query = address("", asked, by=by, goal=found["goal"], run=asked["run"]).removeprefix("?")
    lines = [(group["value"] or "", group_name(found["by"], group["value"])) for group in with_lines]
    more = len(found["groups"]) + found["more"] - len(drawn)
    told = [say("groups_summary", runs=found["runs"], groups=len(drawn) + more), " "]
    back = None if asked["run"] else link(say("groups_runs"), address("/runs", asked, by=by, goal=goal))
    return choices(found), [
        html.Section(
            [html.P(_headline(found), className="headline"), html.P([*told, back], className="quiet")],
            className="card headlines",
        ),
        group_table({**found, "groups": drawn, "more": more}, asked, colored=len(lines)),
        *parallel(swept, [key for key, _ in lines]),
        html.H2(say("compare_charts")),
        html.P(say("band_how"), className="quiet"),
        groups_overlay(query, lines, found["names"], (found["goal"] or "")[4:]),
    ]


def _headline(found: Mapping[str, Any]) -> str:
    """Which group is the best."""
    first, name = found["groups"][0], (found["goal"] or "")[4:]
    figures = first["metrics"].get(name, {"n": 0})
    if not figures["n"]:
        return say("groups_no_best")
    group = group_name(found["by"], first["value"])
    return say("groups_best", name=group, metric=title_of(name), figures=with_spread(name, figures), count=figures["n"])
