"""Where the time of a step goes: the phases stacked, one bucket of steps beside the next."""

from __future__ import annotations

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent.wire import PHASES
from perfagent_dashboard.figures.series import base_layout
from perfagent_dashboard.theme import Theme, phase_color

__all__ = ["step_figure"]


def step_figure(theme: Theme) -> go.Figure:
    """A trace for each phase, in the order of the catalogue, so that the page can fill them by position."""
    traces = [
        go.Scatter(
            x=[],
            y=[],
            name=phase,
            mode="lines",
            line={"width": 0.5, "color": phase_color(theme, phase)},
            fillcolor=phase_color(theme, phase),
            stackgroup="step",
            hoverinfo="skip",
        )
        for phase in PHASES
    ]
    return go.Figure(traces, base_layout(theme))
