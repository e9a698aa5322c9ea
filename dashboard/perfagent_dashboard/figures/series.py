"""One series as a chart: the band from min to max with an outline, the mean, its smoothed form, marks for NaN and Inf,
and dots.

The page takes the empty figure as a pattern and fills its traces by their position, from back to front
(assets/charts/series_chart.js), so the look is decided here once. The outline matters: one step of 1e6 among a million
is one bucket of a thousand, and a band without an outline is then less than one pixel wide and fades away. The band is
a trace of its own, closed at every gap: filled from one line to the other, it would reach across gaps, through values
that never were. The dots are points between gaps, of which no line can be drawn, with their range.
"""

from __future__ import annotations

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent_dashboard.theme import FONT, Theme

__all__ = ["base_layout", "series_figure"]


def series_figure(theme: Theme) -> go.Figure:
    """The chart of a series without its data; buckets without a finite value become gaps in the lines."""
    edge = {"width": 0.9, "color": theme.band_edge}
    line = {"width": 1.5, "color": theme.accent}
    bad = {"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": theme.critical}}
    dots = {"size": 5, "color": theme.accent}
    reach = {"type": "data", "symmetric": False, "array": [], "arrayminus": [], "thickness": 1.5, "width": 0}
    traces = [
        go.Scatter(x=[], y=[], mode="none", fill="toself", fillcolor=theme.band, hoverinfo="skip"),
        go.Scatter(x=[], y=[], mode="lines", line=edge, hoverinfo="skip"),
        go.Scatter(x=[], y=[], mode="lines", line=edge, hoverinfo="skip"),
        go.Scatter(x=[], y=[], mode="lines", line=line, hoverinfo="skip"),
        go.Scatter(x=[], y=[], mode="lines", line={**line, "width": 2}, hoverinfo="skip", visible=False),
        go.Scatter(x=[], y=[], yaxis="y2", mode="markers", marker=bad, hoverinfo="skip"),
        go.Scatter(
            x=[], y=[], mode="markers", marker=dots, error_y={**reach, "color": theme.band_edge}, hoverinfo="skip"
        ),
    ]
    layout = base_layout(theme)
    layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return go.Figure(traces, layout)


def base_layout(theme: Theme) -> dict[str, object]:
    """What all charts of the page share; no plotly template, it would weigh 7 kB a figure."""
    axis = {
        "gridcolor": theme.grid,
        "linecolor": theme.line,
        "zeroline": False,
        "automargin": False,
        "tickfont": {"size": 11},
        # With an angle given, and room for every label, plotly measures none: a third of the time of a live update.
        "tickangle": 0,
        "ticklabeloverflow": "allow",
    }
    return {
        "template": {},
        "margin": {"l": 52, "r": 16, "t": 6, "b": 22},
        "showlegend": False,
        "hovermode": False,
        "dragmode": "zoom",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 11, "color": theme.muted},
        "xaxis": {**axis, "showgrid": False, "ticks": "outside", "ticklen": 3, "tickcolor": theme.line, "nticks": 6},
        "yaxis": {**axis, "nticks": 5, "fixedrange": True, "exponentformat": "SI"},
        "newselection": {"line": {"color": theme.accent}},
    }
