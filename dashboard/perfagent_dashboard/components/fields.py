"""Input fields and buttons of forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated

__all__ = ["choice", "form_row", "number_field", "search_field", "select_field", "small_button", "text_field"]

_TYPED_MS = 250


def search_field(ident: str, label: str, value: str = "") -> Component:
    """Tells what was typed when nothing more is typed for a moment."""
    return dmc.TextInput(
        id=ident, value=value, placeholder=label, debounce=_TYPED_MS, size="sm", className="search",
        **hyphenated(aria_label=label),
    )  # fmt: skip


def choice(ident: str, label: str, options: Sequence[tuple[str, str]]) -> Component:
    """One of some options, (value, text) each; the first is chosen."""
    data = [{"value": value, "label": text} for value, text in options]
    return dmc.Select(
        id=ident, data=data, value=options[0][0], size="sm", allowDeselect=False, w=130, **hyphenated(aria_label=label)
    )


def text_field(ident: str, label: str, value: str = "", **look: Any) -> Component:
    return dmc.TextInput(id=ident, label=label, value=value, size="sm", **look)


def number_field(ident: Any, label: str, value: float | None = None, **look: Any) -> Component:
    return dmc.NumberInput(id=ident, label=label, value=value, size="sm", **look)


def select_field(ident: str, label: str, options: Mapping[str, str], value: str | None, **look: Any) -> Component:
    """options: value -> text."""
    data = [{"value": one, "label": text} for one, text in options.items()]
    return dmc.Select(id=ident, label=label, data=data, value=value, size="sm", allowDeselect=False, **look)


def small_button(text: str, ident: Any) -> Component:
    """In a row of a table."""
    return dmc.Button(text, id=ident, size="compact-sm", variant="default")


def form_row(*parts: Component) -> Component:
    return html.Div([*parts], className="form-row")
