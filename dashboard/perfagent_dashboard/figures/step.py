"""Where the time of a step goes: the phases stacked, one bucket of steps beside the next. Pure: columns in, go.Figure
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go  # type: ignore[import-untyped]

from perfagent.wire import PHASES
from perfagent_dashboard.figures.series import base_layout
from perfagent_dashboard.theme import Theme, phase_color

__all__ = ["step_figure"]


def step_figure(step: Sequence[int], phases: Mapping[str, Sequence[float]], theme: Theme) -> go.Figure:
    """phases: seconds a step, by phase, one value a bucket; a phase that is absent gets no area. All traces are there,
    in the order of the catalogue, so that the page can fill them by position."""
    traces = [
        go.Scatter(
            x=list(step) if phase in phases else [],
            y=list(phases.get(phase, ())),
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
