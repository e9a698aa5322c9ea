"""A board of live charts: an empty element that assets/charts fills, with what it is to show in its attributes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dash import html

from perfagent_dashboard.components.attributes import hyphenated

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["board", "groups_overlay", "overlay"]


def board(run: str, *, sections: Sequence[str] = (), names: Sequence[str] = (), axis: str = "") -> Component:
    """sections, names: only these, in this order; axis: the horizontal one at first."""
    told = {"data_run": run, "data_sections": ",".join(sections), "data_names": ",".join(names), "data_axis": axis}
    return html.Div(className="board", **hyphenated(**{name: value for name, value in told.items() if value}))


def overlay(runs: Sequence[tuple[str, str]], names: Iterable[str]) -> Component:
    """Several runs, (id, name) each, over each other: one line a run in every chart. The first is drawn with its band.
    names: of the series of all."""
    told = {"data_run": runs[0][0], "data_over": json.dumps(runs), "data_series": json.dumps([*names])}
    return html.Div(className="board", **hyphenated(**told))


def groups_overlay(query: str, groups: Sequence[tuple[str, str]], names: Sequence[str], first: str) -> Component:
    """A line with a band a group, (key, label) each. query: of GET /groups/series, without the name; names: of all series;
    first: whose chart comes first."""
    told = {"data_query": query, "data_over": json.dumps(groups), "data_series": json.dumps(names), "data_first": first}
    return html.Div(className="board", **hyphenated(**told))
