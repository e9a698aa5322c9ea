"""Settings of runs beside their results, as parallel coordinates: an element that assets/charts/parallel.js draws in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["parallel"]

_FEWEST_RUNS = 3


def parallel(found: Mapping[str, Any], order: Sequence[str]) -> list[Component]:
    """Of three runs and more whose settings differ. found: of GET /groups/runs. order: of groups or runs, by color."""
    known = [value for value in (found["results"] or [{"values": []}])[0]["values"] if value is not None]
    if len(known) < _FEWEST_RUNS or not found["settings"]:
        return []
    drawn = json.dumps({**found, "order": order})
    return [
        html.H2(say("influence")),
        html.P(say("parallel_how"), className="quiet"),
        html.Div(className="parallel card", **hyphenated(data_found=drawn)),
    ]
