"""Ranks against time: each rank's step time over the median of the ranks, so that a straggler is one dark row."""

from __future__ import annotations

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent_dashboard.figures.series import base_layout
from perfagent_dashboard.theme import Theme

__all__ = ["rank_figure"]


def rank_figure(theme: Theme) -> go.Figure:
    """1 (the median) is the card's own color; slower is warm, faster is cool: diverging, and the two ends differ in
    lightness from the middle for every kind of color vision."""
    heat = go.Heatmap(
        x=[],
        y=[],
        z=[],
        zmin=0.8,
        zmax=1.2,
        colorscale=[[0, "#2a7fc4"], [0.5, theme.raised], [1, "#c8372d"]],
        colorbar={"thickness": 8, "outlinewidth": 0, "tickfont": {"size": 10}, "len": 1},
        hoverinfo="skip",
    )
    layout = base_layout(theme)
    layout["yaxis"] = {"tickformat": "d", "nticks": 6, "fixedrange": True, "showgrid": False}
    return go.Figure([heat], layout)
