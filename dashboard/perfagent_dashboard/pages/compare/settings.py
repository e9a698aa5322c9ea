"""What differs in the settings of runs, and, where several runs do, what it does: a line a run through the settings to its
result, and a point a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.parallel import Axis, parallel, scatter
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["different", "influence"]

_MOST_AXES = 7
_FEWEST_RUNS = 3
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


def influence(found: Mapping[str, Any]) -> list[Component]:
    """Of three runs and more whose own settings differ in numbers or words."""
    sides = found["sides"]
    own = [one for one in found["differences"]["different"] if one["group"] in ("yours", "found")]
    plain = {one["name"]: [value for value in map(_plain, one["values"]) if value is not None] for one in own}
    settings = [Axis(name, values) for name, values in plain.items() if len(values) == len(sides)][:_MOST_AXES]
    results = _results(found)
    if len(sides) < _FEWEST_RUNS or not settings or not results:
        return []
    names = [side["name"] for side in sides]
    points = [scatter(setting, result, names) for setting in settings[:2] for result in results[:2]]
    return [
        html.H2(say("influence")),
        html.Div([parallel([*settings, *results], names)], className="card scroll"),
        html.Div([one for one in points if one is not None], className="scatters"),
    ]


def _plain(value: Any) -> float | str | None:
    if isinstance(value, (bool, str)):
        return str(value)
    return float(value) if isinstance(value, (int, float)) else None


def _results(found: Mapping[str, Any]) -> list[Axis]:
    sides = found["sides"]
    axes = []
    speed = next((one for one in found["speed"] if None not in one["values"]), None)
    if speed is not None:
        axes.append(Axis(title_of(speed["name"]), list(speed["values"]), is_result=True))
    losses = [side["loss_at"] for side in sides]
    if None not in losses:
        axes.append(Axis(say("loss_near", step=f"{found['common_step']:,}"), losses, is_result=True))
    return axes
