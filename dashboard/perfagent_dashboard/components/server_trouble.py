"""The server's own trouble: its rules have stopped. Shown above the alerts of runs, for none of those is to be trusted."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.times import ago

__all__ = ["server_trouble"]


def server_trouble(finding: dict[str, Any]) -> Component:
    return html.Section(
        [
            html.H1([severity_mark("critical"), " ", finding["title"]]),
            html.P([finding["message"], " ", html.Span(ago(finding["since"]), className="quiet")]),
            html.P(finding["fix"], className="hint"),
        ],
        className="alert card",
        role="alert",
        **hyphenated(data_rule=finding["rule"]),
    )
