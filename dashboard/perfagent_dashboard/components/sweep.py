"""Controls that pages of sweeps share: by what runs are grouped, what makes a run the best, and views saved under a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["by_choice", "goal_choice", "metrics_of", "views_menu"]

_MOST_GOALS = 60


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
    goal = found["goal"]
    chosen = f"{'max' if goal['higher'] else 'min'}:{goal['name']}" if goal else None
    usual = found["goals"][:_MOST_GOALS]
    turned = [("min:" if one.startswith("max:") else "max:") + one[4:] for one in usual]
    listed = dict.fromkeys([*usual, *turned, *([chosen] if chosen else [])])
    data = [{"value": one, "label": say(f"goal_{one[:3]}", name=title_of(one[4:]))} for one in listed]
    return dmc.Select(
        id="goal", data=data, value=chosen, size="sm", w=210, searchable=True, allowDeselect=False,
        display="none" if hidden else None, **hyphenated(aria_label=say("goal")),
    )  # fmt: skip


def metrics_of(columns: str) -> list[str]:
    """Of the columns that were chosen; settings have no mean."""
    return [name for name in columns.split(",") if name and not name.startswith("config:")]


def views_menu(page: str) -> Component:
    """An empty element, which assets/pages/views.js fills."""
    return html.Div(className="views", **hyphenated(data_views=page))
