"""Icons: SVG files of assets/icons, drawn in the color of the text beside them."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated

__all__ = ["icon"]


def icon(name: str) -> Component:
    """Hidden from screen readers: a word stands beside it. The style sheet knows the file."""
    return html.I(className=f"icon of-{name}", **hyphenated(aria_hidden="true"))
