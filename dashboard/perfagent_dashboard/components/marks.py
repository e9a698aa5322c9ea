"""Badges and marks: a state or a severity as shape, word and color."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.words import STATE_SHAPES, say

__all__ = ["severity_mark", "state_badge"]

_SHAPES = {"critical": "▲", "warning": "▲", "info": "●", "healthy": "✓", "unknown": "○"}


def state_badge(state: str) -> Component:
    known = state if state in STATE_SHAPES else "starting"
    return html.Span(
        [html.I(STATE_SHAPES[known], **hyphenated(aria_hidden="true")), say(f"state_{known}")],
        className=f"state {known}",
    )


def severity_mark(severity: str) -> Component:
    known = severity if severity in _SHAPES else "info"
    return html.Span(_SHAPES[known], className=f"severity {known}", title=say(f"severity_{known}"))
