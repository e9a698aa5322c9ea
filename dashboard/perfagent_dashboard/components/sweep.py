"""Components of the pages Runs and Compare: the choice of grouping and goal, the table of groups, parallel coordinates and saved
views. Scripts fill the last two (assets/charts/parallel.js, assets/pages/views.js)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import dash_mantine_components as dmc
from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.numbers import quantity
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = [
    "FILTERS", "address", "choices", "group_name", "group_table", "link", "parallel", "swatch", "views_menu",
    "with_spread",
]  # fmt: skip

FILTERS = ("q", "severity", "state", "project", "attention")
"""What of the address says which runs are in the groups."""
_MOST_GOALS = 60
_FEWEST_RUNS = 3


def address(page: str, view: Mapping[str, Any], **more: Any) -> str:
    """Of a page that shows the same runs."""
    given = {**{name: view.get(name) for name in FILTERS}, **more}
    given["attention"] = "1" if given["attention"] else None
    return f"{page}?{urlencode({name: value for name, value in given.items() if value}, doseq=True, safe=':,/')}"


def link(text: str, to: str) -> Component:
    return html.A(text, href=to, className="button small", **hyphenated(data_nav=to))


def choices(found: Mapping[str, Any], *, has_goal: bool = True) -> list[Component]:
    """By what runs are grouped, and which metric makes a run the best: each twice, its usual direction first. found: of GET
    /groups or /groups/runs."""
    named = {one: say(f"by_{one}") for one in ("group", "tag")}
    usual = found["goals"][:_MOST_GOALS]
    turned = [("min:" if one.startswith("max:") else "max:") + one[4:] for one in usual]
    goals = {one: say(f"goal_{one[:3]}", name=title_of(one[4:])) for one in (*usual, *turned, found["goal"]) if one}
    return [
        dmc.Select(
            id="by", data=[{"value": one, "label": named.get(one, one)} for one in found["choices"]], value=found["by"],
            placeholder=say("group_by"), size="sm", w=175, clearable=True, searchable=True,
            **hyphenated(aria_label=say("group_by")),
        ),
        dmc.Select(
            id="goal", data=[{"value": one, "label": text} for one, text in goals.items()], value=found["goal"], size="sm",
            w=210, searchable=True, allowDeselect=False, display=None if has_goal else "none",
            **hyphenated(aria_label=say("goal")),
        ),
    ]  # fmt: skip


def group_table(found: Mapping[str, Any], view: Mapping[str, Any], *, colored: int = 0) -> Component:
    """found: of GET /groups. view: the filters of the page. colored: so many have a color, which is that of their line."""
    groups = found["groups"]
    metrics = list(groups[0]["metrics"]) if groups else []
    heads = [_by(found["by"]), say("column_runs"), say("column_worst"), *map(title_of, metrics), say("best_run")]
    rows = [
        [
            html.Span([swatch(place) if place < colored else None, _name(group, view)]), _count(group),
            html.Span([severity_mark(group["severity"]), " " + say(f"severity_{group['severity']}")]),
            *(_figures(name, group) for name in metrics), _best_run(group["best"], found),
        ]
        for place, group in enumerate(groups)
    ]  # fmt: skip
    more = nothing(say("groups_more", count=found["more"])) if found["more"] else None
    shown = table(heads, rows, empty=say("no_match"), keys=[group["value"] or "" for group in groups])
    return html.Div([shown, more], className="groups")


def swatch(place: int) -> Component:
    return html.I(className="swatch", style={"background": f"var(--series-{place})"})


def group_name(by: str, value: str | None) -> str:
    """As a line is called: `lr 0.001`, or the name of the group."""
    if value is None:
        return say("no_group", by=_by(by))
    return f"{_by(by)} {value}" if by.startswith("config.") else value


def _by(by: str) -> str:
    return by.removeprefix("config.") if by.startswith("config.") else say(f"by_{by}")


def _name(group: Mapping[str, Any], view: Mapping[str, Any]) -> Component:
    if group["search"] is None:
        return html.Span(group["value"] or say("no_value"), className="quiet")
    to = address("/runs", view, q=f"{view.get('q') or ''} {group['search']}".strip())
    return html.A(group["value"], href=to, title=say("group_open"), **hyphenated(data_nav=to))


def _count(group: Mapping[str, Any]) -> Component:
    states = ", ".join(f"{count:,} {say(f'state_{state}').lower()}" for state, count in group["states"].items())
    return html.Span(states if len(group["states"]) == 1 else [f"{group['runs']:,} ", html.Small(states)])


def _figures(name: str, group: Mapping[str, Any]) -> Component:
    """And of how many runs, where it is not all of them."""
    figures = group["metrics"][name]
    count = html.Small(f" n = {figures['n']}") if figures["n"] != group["runs"] else None
    return html.Span([with_spread(name, figures), count])


def with_spread(name: str, figures: Mapping[str, Any]) -> str:
    """Mean ± standard deviation."""
    parts = [quantity(name, figures[one]) for one in ("mean", "spread") if figures[one] is not None]
    return " ± ".join(" ".join(part).strip() for part in parts) or say("na")


def _best_run(best: Mapping[str, Any] | None, found: Mapping[str, Any]) -> Component:
    if best is None:
        return html.Span(say("na"), className="quiet")
    star = html.B(f"★ {say('best')} ", className="best") if best == found["best"] else None
    value = " ".join(quantity(found["goal"][4:], best["value"])).strip()
    to = f"/run/{quote(best['run'], safe='')}"
    return html.Span([star, html.A(best["name"], href=to, **hyphenated(data_nav=to)), html.Small(f" {value}")])


def parallel(found: Mapping[str, Any], order: Sequence[str]) -> list[Component]:
    """Of three runs and more whose settings differ. found: of GET /groups/runs. order: of groups or runs, by color."""
    known = [value for column in found["results"][:1] for value in column["values"] if value is not None]
    if len(known) < _FEWEST_RUNS or not found["settings"]:
        return []
    drawn = html.Div(className="parallel card", **hyphenated(data_found=json.dumps({**found, "order": order})))
    return [html.H2(say("influence")), html.P(say("parallel_how"), className="quiet"), drawn]


def views_menu(page: str) -> Component:
    return html.Div(className="views", **hyphenated(data_views=page))
