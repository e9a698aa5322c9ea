"""One series as a chart: the band from min to max with an outline, the mean, its smoothed form, marks for NaN and Inf,
and dots.

Pure: a Series in, a go.Figure out. The page takes the empty figure as a pattern and fills it (assets/charts/series_chart.js), so
the look is decided here once. The outline matters: one step of 1e6 among a million is one bucket of a thousand, and a
band without an outline is then less than one pixel wide and fades away. The band is a trace of its own, closed at every
gap: filled from one line to the other, it would reach across gaps, through values that never were. The dots are points
between gaps, of which no line can be drawn, with their range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent.wire import Series
from perfagent_dashboard.theme import FONT, Theme

__all__ = ["BAND", "HIGH", "LOW", "MEAN", "NONFINITE", "POINTS", "SMOOTH", "base_layout", "series_figure"]

# Positions of the traces, from back to front; assets/charts/series_chart.js fills them by these numbers.
BAND, LOW, HIGH, MEAN, SMOOTH, NONFINITE, POINTS = range(7)


def series_figure(series: Series | None, theme: Theme) -> go.Figure:
    """The chart of a series; None gives the empty pattern. Buckets without a finite value are gaps in the lines."""
    step = series.step if series else []
    low, high, mean = (_gaps(column) for column in ((series.min, series.max, series.mean) if series else ([], [], [])))
    bad = [at for at, count in zip(step, series.nonfinite, strict=True) if count] if series else []
    band = _band(step, low, high)
    alone = _alone(mean)
    edge = {"width": 0.9, "color": theme.band_edge}
    traces = [
        go.Scatter(x=band[0], y=band[1], mode="none", fill="toself", fillcolor=theme.band, hoverinfo="skip"),
        go.Scatter(x=step, y=low, mode="lines", line=edge, hoverinfo="skip"),
        go.Scatter(x=step, y=high, mode="lines", line=edge, hoverinfo="skip"),
        go.Scatter(x=step, y=mean, mode="lines", line={"width": 1.5, "color": theme.accent}, hoverinfo="skip"),
        go.Scatter(x=[], y=[], mode="lines", line={"width": 2, "color": theme.accent}, hoverinfo="skip", visible=False),
        go.Scatter(
            x=bad,
            y=[0.94] * len(bad),
            yaxis="y2",
            mode="markers",
            marker={"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": theme.critical}},
            hoverinfo="skip",
        ),
        go.Scatter(
            x=[step[at] for at in alone],
            y=[mean[at] for at in alone],
            mode="markers",
            marker={"size": 5, "color": theme.accent},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [_more(mean[at], high[at]) for at in alone],
                "arrayminus": [_more(low[at], mean[at]) for at in alone],
                "color": theme.band_edge,
                "thickness": 1.5,
                "width": 0,
            },
            hoverinfo="skip",
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
        # With an angle given, plotly does not measure every label to find one: a quarter of the time of a live update.
        "tickangle": 0,
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


def _gaps(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _band(
    step: Sequence[int], low: Sequence[float | None], high: Sequence[float | None]
) -> tuple[list[int | None], list[float | None]]:
    """The edge of the band: along low and back along high, again for every stretch without a gap that is not a mere
    line."""
    x: list[int | None] = []
    y: list[float | None] = []
    for known, group in groupby(range(len(step)), lambda at: low[at] is not None and high[at] is not None):
        forth = list(group)
        if not known or all(low[at] == high[at] for at in forth):
            continue
        back = forth[::-1]
        x += [*(step[at] for at in forth), *(step[at] for at in back), None]
        y += [*(low[at] for at in forth), *(high[at] for at in back), None]
    return x, y


def _alone(values: Sequence[float | None]) -> list[int]:
    """Positions of what has no neighbour to draw a line to."""
    around = [None, *values, None]
    return [
        at for at, value in enumerate(values) if value is not None and around[at] is None and around[at + 2] is None
    ]


def _more(low: float | None, high: float | None) -> float:
    return high - low if low is not None and high is not None else 0.0
