"""Layers: a heat map of layer × step, for gradient norms, update ratios and dead units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import html

from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.parts import graph
from perfagent_dashboard.figures.layers import layer_figure
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content", "heat_map"]

_POINTS = 120


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    families = facts.families
    choices = [{"value": family, "label": say(f"family_{family.rstrip('/')}")} for family in families]
    return [
        dmc.SegmentedControl(id="layers-family", data=choices, value=families[0], size="sm"),
        html.Div(await heat_map(server, facts.id, families[0]), id="layers-map"),
    ]


async def heat_map(server: ServerApi, run: str, family: str) -> Component:
    found: dict[str, Any] = await server.get(run_path(run, "layers"), family=family.rstrip("/"), points=_POINTS)
    if not found["layers"]:
        return nothing(say("layers_none"))
    hint = html.P(say(f"family_{family.rstrip('/')}_hint"), className="quiet")
    height_px = min(1400, 90 + 16 * len(found["layers"]))
    return html.Div([hint, graph(layer_figure(found, family.rstrip("/")), height_px)])
