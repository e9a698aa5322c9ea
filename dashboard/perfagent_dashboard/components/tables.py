"""A small table of elements, for what has tens of rows. Hundreds of rows are a grid's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.feedback import nothing

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["table"]

_MANY = 8  # columns


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str, keys: Sequence[str] = ()) -> Component:
    """empty: what to say where there is no row. keys: what a row is of, for the script that fades some. On a phone, Settings
    shows a row as lines, each with its column's head."""
    if not rows:
        return nothing(empty)
    head = html.Thead(html.Tr([html.Th(one, scope="col") if one else html.Td() for one in heads]))
    body = html.Tbody(
        [
            html.Tr(
                [html.Td(cell, **hyphenated(data_head=name)) for name, cell in zip(heads, row, strict=True)],
                **(hyphenated(data_key=keys[place]) if keys else {}),
            )
            for place, row in enumerate(rows)
        ]
    )
    tab = 0 if len(heads) > _MANY else None  # it scrolls, and keys must reach it
    return html.Div(html.Table([head, body], className="plain"), className="card scroll", tabIndex=tab)
