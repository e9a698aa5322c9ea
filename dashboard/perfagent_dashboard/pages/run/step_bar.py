"""Where a step goes: one bar of its phases, with a legend. A phase leads to its chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import html
from dash.development.base_component import Component

from perfagent.wire import Timing
from perfagent_client.models import parse
from perfagent_client.timing_table import step_shares
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.numbers import percent
from perfagent_dashboard.pages.run.tiles import window_of
from perfagent_dashboard.words import say, title_of

__all__ = ["step_bar"]


def step_bar(timing: Mapping[str, Any]) -> Component | None:
    """None where no phase was measured."""
    parts = step_shares(parse(Timing, dict(timing)))
    if not parts:
        return None
    segments, legend = [], []
    for part in parts:
        color = {"background": f"var(--phase-{part.color})"}
        title = part.title if part.color == "named" else title_of(part.series)
        said = f"{title} {part.pct:.1f} % · {part.time}"
        segments.append(
            html.I(
                title=said, style={**color, "flexGrow": part.pct},
                **hyphenated(data_goto=part.series, aria_hidden="true"),
            )
        )  # fmt: skip
        legend.append(
            html.Button(
                [html.I(style=color), title, html.B(f"{percent(part.pct / 100)} %")],
                type="button", className="share", title=said, **hyphenated(data_goto=part.series),
            )
        )  # fmt: skip
    head = html.H3(say("where_over", over=window_of(timing)) if timing["window"] else say("where"))
    return html.Div(
        [html.Div(segments, className="segments"), html.Div([*legend, head], className="shares")],
        className="bar-of-step",
    )
