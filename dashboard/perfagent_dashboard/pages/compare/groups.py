"""Groups of runs beside each other: which is the best, their figures, a line with a band each, and what the settings do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.board import groups_overlay
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.group_table import FILTERS, address, group_name, group_table
from perfagent_dashboard.components.numbers import quantity
from perfagent_dashboard.components.parallel import parallel
from perfagent_dashboard.components.sweep import by_choice, goal_choice
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
    chosen = _spelled(found["goal"])
    asked = {"by": found["by"], "goal": chosen, **filters}
    query = urlencode({name: value for name, value in asked.items() if value}, doseq=True)
    lines = [(group["value"] or "", group_name(found["by"], group["value"])) for group in drawn]
    metrics = list(dict.fromkeys([*([found["goal"]["name"]] if found["goal"] else []), "loss"]))
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
                        html.A(say("groups_runs"), href=back, **hyphenated(data_nav=back)),
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


def _spelled(goal: Mapping[str, Any] | None) -> str | None:
    return f"{'max' if goal['higher'] else 'min'}:{goal['name']}" if goal else None


def _headline(found: Mapping[str, Any]) -> str:
    """Which group is the best, and by how much more than its spread the next one is behind."""
    goal, first = found["goal"], found["groups"][0]
    figures = first["metrics"][goal["name"]] if goal else None
    if figures is None or figures["mean"] is None:
        return say("groups_no_best")
    name, mean = group_name(found["by"], first["value"]), " ".join(quantity(goal["name"], figures["mean"])).strip()
    what = title_of(goal["name"])
    deviation = " ".join(quantity(goal["name"], figures["spread"])).strip()
    return say("groups_best", name=name, metric=what, mean=mean, spread=deviation, count=figures["n"])
