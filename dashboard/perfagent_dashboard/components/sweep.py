"""What pages of sweeps share: by what runs are grouped, what makes a run the best, settings beside results, and saved views.
Two are elements that scripts fill: assets/charts/parallel.js and assets/pages/views.js."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["by_choice", "goal_choice", "parallel", "views_menu"]

_MOST_GOALS = 60
_FEWEST_RUNS = 3


def by_choice(found: Mapping[str, Any]) -> Component:
    """found: of GET /groups or /groups/runs."""
    names = {one: say(f"by_{one}") for one in ("group", "tag")}
    data = [{"value": one, "label": names.get(one, one)} for one in found["choices"]]
    return dmc.Select(
        id="by", data=data, value=found["by"], placeholder=say("group_by"), size="sm", w=175, clearable=True, searchable=True,
        **hyphenated(aria_label=say("group_by")),
    )  # fmt: skip


def goal_choice(found: Mapping[str, Any], *, hidden: bool = False) -> Component:
    """Each metric twice: its usual direction first, the other one behind all."""
    usual = found["goals"][:_MOST_GOALS]
    turned = [("min:" if one.startswith("max:") else "max:") + one[4:] for one in usual]
    listed = dict.fromkeys([*usual, *turned, *([found["goal"]] if found["goal"] else [])])
    data = [{"value": one, "label": say(f"goal_{one[:3]}", name=title_of(one[4:]))} for one in listed]
    return dmc.Select(
        id="goal", data=data, value=found["goal"], size="sm", w=210, searchable=True, allowDeselect=False,
        display="none" if hidden else None, **hyphenated(aria_label=say("goal")),
    )  # fmt: skip


def parallel(found: Mapping[str, Any], order: Sequence[str]) -> list[Component]:
    """Of three runs and more whose settings differ. found: of GET /groups/runs. order: of groups or runs, by color."""
    known = [value for column in found["results"][:1] for value in column["values"] if value is not None]
    if len(known) < _FEWEST_RUNS or not found["settings"]:
        return []
    drawn = json.dumps({**found, "order": order})
    return [
        html.H2(say("influence")),
        html.P(say("parallel_how"), className="quiet"),
        html.Div(className="parallel card", **hyphenated(data_found=drawn)),
    ]


def views_menu(page: str) -> Component:
    return html.Div(className="views", **hyphenated(data_views=page))
