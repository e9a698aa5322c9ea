"""Input fields that several pages have."""

from __future__ import annotations

from collections.abc import Sequence

import dash_mantine_components as dmc
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated

__all__ = ["choice", "search_field"]

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
