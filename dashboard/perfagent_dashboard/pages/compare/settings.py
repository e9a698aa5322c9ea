"""What differs in the settings of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["different"]

_GROUPS = {
    "yours": "config_yours", "found": "config_found", "code": "config_code", "environment": "config_environment",
    "packages": "config_packages",
}  # fmt: skip


def different(found: Mapping[str, Any], names: Sequence[str], search: str) -> list[Component]:
    """search: words that a setting's name or one of its values must all have."""
    words = search.lower().split()
    rows = [
        [
            html.Div([html.B(one["name"]), html.Br(), html.Small(say(_GROUPS[one["group"]]))]),
            *map(_value, one["values"]),
        ]
        for one in found["different"]
        if all(word in f"{one['name']} {one['values']}".lower() for word in words)
    ]
    equal = sum(found["equal"].values())
    return [
        table([say("setting"), *names], rows, empty=say("nothing_found" if words else "no_difference")),
        nothing(say("equal_settings", count=equal)) if equal else html.Span(),
    ]


def _value(value: Any) -> Component:
    if value is None:
        return html.Span("–", className="quiet")
    return html.Code(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
