"""Parts of a tab: a section with a heading, and a figure that the server drew."""

from __future__ import annotations

from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

__all__ = ["graph", "part"]


def part(title: Any, *content: Component | None) -> Component:
    return html.Section([html.H2(title), *content], className="part")


def graph(figure: Any, height_px: int) -> Component:
    height = {"height": f"{height_px}px"}
    return dcc.Graph(figure=figure, config={"displayModeBar": False}, style=height, className="card")
