"""Ranks against time: each rank's step time over the median of the ranks, so that a straggler is one dark row."""

from __future__ import annotations

from statistics import median

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent.wire import RankMatrix
from perfagent_dashboard.figures.series import base_layout
from perfagent_dashboard.theme import Theme

__all__ = ["rank_figure"]


def rank_figure(matrix: RankMatrix | None, theme: Theme) -> go.Figure:
    """None gives the empty pattern. 1 (the median) is the card's own color; slower is warm, faster is cool: diverging,
    and the two ends differ in lightness from the middle for every kind of color vision."""
    heat = go.Heatmap(
        x=matrix.step if matrix else [],
        y=matrix.ranks if matrix else [],
        z=_over_median(matrix) if matrix else [],
        zmin=0.8,
        zmax=1.2,
        colorscale=[[0, "#2a7fc4"], [0.5, theme.raised], [1, "#c8372d"]],
        colorbar={"thickness": 8, "outlinewidth": 0, "tickfont": {"size": 10}, "len": 1},
        hoverinfo="skip",
    )
    layout = base_layout(theme)
    layout["yaxis"] = {"tickformat": "d", "nticks": 6, "fixedrange": True, "showgrid": False}
    return go.Figure([heat], layout)


def _over_median(matrix: RankMatrix) -> list[list[float | None]]:
    columns = []
    for column in zip(*matrix.mean, strict=True):
        known = [value for value in column if value == value]
        middle = median(known) if known else 0.0
        columns.append([value / middle if value == value and middle > 0 else None for value in column])
    return [list(row) for row in zip(*columns, strict=True)]
