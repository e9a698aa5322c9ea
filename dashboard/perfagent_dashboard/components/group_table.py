"""Groups of runs as a table: how many, how they fare, mean and spread of each metric, and the best run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from dash import html

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.numbers import quantity
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["FILTERS", "address", "group_name", "group_table", "with_spread"]

FILTERS = ("q", "severity", "state", "project", "attention")
"""What of the address says which runs are in the groups."""


def address(page: str, view: Mapping[str, Any], **more: Any) -> str:
    """Of a page that shows the same runs."""
    given = {**{name: view.get(name) for name in FILTERS}, **more}
    given["attention"] = "1" if given["attention"] else None
    query = urlencode({name: value for name, value in given.items() if value}, doseq=True, safe=":,/")
    return f"{page}?{query}" if query else page


def group_table(
    found: Mapping[str, Any], view: Mapping[str, Any], metrics: Sequence[str], *, colored: int = 0
) -> Component:
    """found: of GET /groups. view: the filters of the page. colored: so many have a color, which is that of their line."""
    groups = found["groups"]
    heads = [_by(found["by"]), say("column_runs"), say("column_worst"), *map(title_of, metrics), say("best_run")]
    rows = [
        [
            _name(group, view, place if place < colored else None), _count(group), _worst(group["severity"]),
            *(_spread(name, group["metrics"][name], group["runs"]) for name in metrics),
            _best_run(group["best"], found) if group["best"] else say("na"),
        ]
        for place, group in enumerate(groups)
    ]  # fmt: skip
    keys = [group["value"] or "" for group in groups]
    more = nothing(say("groups_more", count=found["more"])) if found["more"] else None
    return html.Div([table(heads, rows, empty=say("no_match"), keys=keys), more], className="groups")


def group_name(by: str, value: str | None) -> str:
    """As a line is called: `lr 0.001`, or the name of the group."""
    if value is None:
        return say("no_group", by=_by(by))
    return f"{_by(by)} {value}" if by.startswith("config.") else value


def _by(by: str) -> str:
    return by.removeprefix("config.") if by.startswith("config.") else say(f"by_{by}")


def _name(group: Mapping[str, Any], view: Mapping[str, Any], place: int | None) -> Component:
    swatch = html.I(className="swatch", style={"background": f"var(--series-{place})"}) if place is not None else None
    name = say("no_value") if group["value"] is None else group["value"]
    if group["search"] is None:
        return html.Span([swatch, html.Span(name, className="quiet")])
    link = address("/runs", view, q=f"{view.get('q') or ''} {group['search']}".strip())
    return html.Span([swatch, html.A(name, href=link, title=say("group_open"), **hyphenated(data_nav=link))])


def _worst(severity: str) -> Component:
    return html.Span([severity_mark(severity), f" {say(f'severity_{severity}')}"])


def _count(group: Mapping[str, Any]) -> Component:
    states = ", ".join(f"{count:,} {say(f'state_{state}').lower()}" for state, count in group["states"].items())
    return html.Span(states if len(group["states"]) == 1 else [f"{group['runs']:,} ", html.Small(states)])


def _spread(name: str, figures: Mapping[str, Any], runs: int) -> Component:
    """And of how many runs, where it is not all of them."""
    count = html.Small(f" n = {figures['n']}") if figures["n"] != runs else None
    return html.Span([with_spread(name, figures), count])


def with_spread(name: str, figures: Mapping[str, Any]) -> str:
    """Mean ± standard deviation."""
    parts = [quantity(name, figures[one]) for one in ("mean", "spread") if figures[one] is not None]
    return " ± ".join(" ".join(part).strip() for part in parts) or say("na")


def _best_run(best: Mapping[str, Any], found: Mapping[str, Any]) -> Component:
    link = f"/run/{best['run']}"
    star = html.B(f"★ {say('best')} ", className="best") if best == found["best"] else None
    value = " ".join(quantity(found["goal"][4:], best["value"])).strip()
    return html.Span([star, html.A(best["name"], href=link, **hyphenated(data_nav=link)), html.Small(f" {value}")])
