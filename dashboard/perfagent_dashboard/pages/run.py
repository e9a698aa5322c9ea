"""The run page, `/run/<id>`: verdict first, then figures, then charts. Filled and kept live by assets/50-run.js."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import html

from perfagent_dashboard.pages.attributes import hyphenated
from perfagent_dashboard.words import ENGLISH

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["layout"]


def layout(run: str) -> Component:
    """run: the id, from the address. The order here is the order of the page; each container is filled by name."""
    return html.Div(
        [
            html.Div(id="run-head", className="run-head"),
            html.P(id="run-announced", className="heard", role="status"),  # for screen readers: another verdict
            html.Div(
                [
                    html.Section(
                        id="run-verdict",
                        className="verdict wait",
                        **hyphenated(aria_label=ENGLISH["verdict"]),
                    ),
                    html.Section(id="run-figures", className="figures"),
                ],
                className="run-top",
            ),
            html.Div(id="run-tools", className="tools", role="toolbar", **hyphenated(aria_label=ENGLISH["tools"])),
            html.Div(id="run-charts", className="grid"),
            html.Div(id="run-note"),
            html.Div(id="run-below", className="below"),
        ],
        className="page run",
        **hyphenated(data_page="run", data_run=run),
    )
