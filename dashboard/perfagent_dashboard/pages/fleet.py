"""The fleet page, `/`: every run in one line. Filled and kept live by assets/40-fleet.js."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import html

from perfagent_dashboard.pages.attributes import hyphenated
from perfagent_dashboard.words import ENGLISH

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["layout"]

_COLUMNS = ("state", "run", "verdict", "step", "throughput", "loss", "trend", "gpu", "seen")
_NUMBERS = ("step", "throughput", "loss", "gpu", "seen")


def layout() -> Component:
    heads = [
        html.Th(
            ENGLISH[f"column_{name}"],
            scope="col",
            className="number" if name in _NUMBERS else f"of-{name}",
            title=ENGLISH.get(f"column_{name}_hint"),
        )
        for name in _COLUMNS
    ]
    return html.Div(
        [
            html.Div(
                [
                    html.H1(ENGLISH["runs"]),
                    html.Div(
                        id="fleet-states",
                        className="chips",
                        role="group",
                        **hyphenated(aria_label=ENGLISH["column_state"]),
                    ),
                    html.Div(
                        [
                            html.Div(id="fleet-project"),
                            html.Div(id="fleet-search"),
                        ],
                        className="fleet-filter",
                    ),
                ],
                className="fleet-head",
            ),
            html.Div(
                html.Table([html.Thead(html.Tr(heads)), html.Tbody(id="fleet-rows")], className="runs"),
                id="fleet-table",
                className="card table-card",
            ),
            html.Div(id="fleet-note"),
        ],
        className="page fleet",
        **hyphenated(data_page="fleet"),
    )
