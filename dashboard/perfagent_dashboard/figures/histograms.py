"""Draws histograms over steps as a heat map: the share of values in each bin, step by step. Pure: the server's histograms in,
a go.Figure out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent_dashboard.figures.layers import bare_layout

__all__ = ["histogram_figure"]

_BINS = 64
_NARROW = 1e-9  # of a bin
_LEAST_PCT = 0.01
"""Colors are of decades, so that the zeros of an activation do not make all else look alike; less than this is blank."""


def histogram_figure(found: Sequence[Mapping[str, Any]]) -> go.Figure:
    """found: histograms, each with bins between its own `low` and `high`. They are laid over bins that all share."""
    low, high = min(one["low"] for one in found), max(one["high"] for one in found)
    width = high / _BINS - low / _BINS  # the difference of both may be too large for a float
    middles = [low + (at + 0.5) * width for at in range(_BINS)]
    columns = [_shares(one, low, width) for one in found]
    if len(found) == 1:
        bars = go.Bar(
            x=middles, y=columns[0], marker={"color": "#5b7fa6"}, hovertemplate="%{x:.4g}: %{y:.2f} %<extra></extra>"
        )
        return go.Figure([bars], bare_layout(bargap=0, yaxis={"ticksuffix": " %", "fixedrange": True}))
    rows = [*zip(*columns, strict=True)]
    decades = [[math.log10(share) if share >= _LEAST_PCT else None for share in row] for row in rows]
    ticks = {"tickvals": [-2, -1, 0, 1, 2], "ticktext": ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"]}
    heat = go.Heatmap(
        x=[one["step"] for one in found], y=middles, z=decades, customdata=rows, colorscale="Cividis",
        colorbar={"thickness": 10, "outlinewidth": 0, **ticks},
        hovertemplate="%{x}: %{customdata:.2f} % ≈ %{y:.4g}<extra></extra>",
    )  # fmt: skip
    return go.Figure([heat], bare_layout(yaxis={"automargin": True, "fixedrange": True, "showgrid": False}))


def _shares(one: Mapping[str, Any], low: float, width: float) -> list[float]:
    """Percent of the values in each of the shared bins: a bin counts for those that it lies over, as far as it does."""
    shares = [0.0] * _BINS
    counts = one["counts"]
    whole = sum(counts) or 1
    first = one["low"] / width - low / width
    own = (one["high"] / width - one["low"] / width) / len(counts)
    for at, count in enumerate(counts):
        begin, end = first + at * own, first + (at + 1) * own
        bins = range(int(begin), min(_BINS, int(end) + 1)) if count else ()
        if end - begin < _NARROW:  # beside a histogram that is a billion times as wide
            shares[min(_BINS - 1, int(begin))] += 100 * count / whole
            continue
        for bin_ in bins:
            shares[bin_] += 100 * count / whole * max(0.0, min(end, bin_ + 1) - max(begin, bin_)) / (end - begin)
    return shares
