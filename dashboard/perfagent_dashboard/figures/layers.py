"""Layers × steps as a heat map. Pure: the server's matrix in, a go.Figure out. Colors on a logarithmic scale where values
span decades, so that one layer that explodes does not make all others look alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

__all__ = ["bare_layout", "finite", "layer_figure"]

_DECADES = ("grad_norm", "update_ratio")
_LONGEST = 44
_FONT = 'Inter, "Noto Sans", "Noto Sans CJK SC", system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'


def layer_figure(matrix: Mapping[str, Any], family: str) -> go.Figure:
    """matrix: `layers` and `step`, and `values`: a row a layer, numbers or "NaN". The first layer is on top."""
    is_log = family in _DECADES
    rows = [[finite(value) for value in row] for row in matrix["values"]]
    shown = [[_decade(value) for value in row] for row in rows] if is_log else rows
    heat = go.Heatmap(
        x=matrix["step"], y=[_short(name) for name in matrix["layers"]], z=shown, customdata=rows, colorscale="Cividis",
        colorbar={"thickness": 10, "outlinewidth": 0, **({"tickprefix": "1e", "dtick": 1} if is_log else {})},
        hovertemplate="%{y}<br>%{x}: %{customdata:.4g}<extra></extra>",
    )  # fmt: skip
    rows_down = {"autorange": "reversed", "automargin": True, "fixedrange": True, "dtick": 1}
    return go.Figure([heat], bare_layout(yaxis=rows_down))


def bare_layout(**more: Any) -> dict[str, Any]:
    """Of a figure that is drawn once, and does not follow the theme: legible on light and dark."""
    return {
        "template": {}, "margin": {"l": 8, "r": 8, "t": 8, "b": 28}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"family": _FONT, "size": 11, "color": "#808890"},
        "xaxis": {"fixedrange": True, "showgrid": False, "zeroline": False}, **more,
    }  # fmt: skip


def finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _decade(value: float | None) -> float | None:
    return math.log10(value) if value is not None and value > 0 else None


def _short(name: str) -> str:
    """The end of a path says most."""
    return name if len(name) <= _LONGEST else f"…{name[-_LONGEST:]}"
