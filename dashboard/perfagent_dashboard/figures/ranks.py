"""Ranks × steps as a heat map: each rank's own work over the median of the ranks, so that a straggler is one row."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent_dashboard.figures.layers import bare_layout, finite

__all__ = ["rank_figure"]

_FASTER_MEDIAN_SLOWER = [[0, "#2a7fc4"], [0.5, "rgba(128,136,144,.14)"], [1, "#c8372d"]]
"""Both ends differ in lightness from the middle for every kind of color vision."""


def rank_figure(matrix: Mapping[str, Any], hover: str) -> go.Figure:
    """matrix: `ranks` and `step`, and `mean`: a row a rank. hover: with `%{y}` for the rank, `%{z}` for its share."""
    rows = [[finite(value) for value in row] for row in matrix["mean"]]
    columns = ([value for value in column if value is not None] for column in zip(*rows, strict=True))
    middles = [median(known) if known else None for known in columns]
    shares = [
        [value / middle if value is not None and middle else None for value, middle in zip(row, middles, strict=True)]
        for row in rows
    ]
    heat = go.Heatmap(
        x=matrix["step"], y=matrix["ranks"], z=shares, zmin=0.8, zmax=1.2, colorscale=_FASTER_MEDIAN_SLOWER,
        colorbar={"thickness": 10, "outlinewidth": 0, "tickvals": [0.8, 1, 1.2], "ticktext": ["≤ 0.8", "1", "≥ 1.2"]},
        hovertemplate=f"{hover}<br>%{{x}}<extra></extra>",
    )  # fmt: skip
    whole_numbers = {
        "tickformat": "d",
        "nticks": 6,
        "automargin": True,
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
    }
    return go.Figure([heat], bare_layout(yaxis=whole_numbers))
