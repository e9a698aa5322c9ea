"""Alerts or runs that are alike, as one line that unfolds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from perfagent_dashboard.components.alert_card import alert_card
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.prose import prose
from perfagent_dashboard.components.times import ago
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import say

__all__ = ["alert_rows", "fold", "take_button"]


def alert_rows(group: Mapping[str, Any], session: Mapping[str, Any], asked: Mapping[str, str]) -> list[Component]:
    """group: as GET /alerts/inbox shows it: a row each where there are few, else one line that asks for them when it is
    opened. asked: of which list, as that route takes it."""
    if group["alerts"]:
        return [alert_card(one, may_act=may_in(session, "operate", one["project"])) for one in group["alerts"]]
    counted = say("group_told", count=group["count"], runs=group["runs"])
    key = group["key"]
    rows = html.Div(
        [html.Div(id={"part": "rows", "group": key}), dcc.Store(id={"part": "asked", "group": key}, data=dict(asked))],
        className="folded",
    )
    may_take = asked["view"] == "open" and "operate" in session["may"]
    button = take_button("alerts", key, group["count"]) if may_take else None
    return [fold(group["severity"], group["title"], counted, group["since"], rows, button, key=key)]


def fold(
    severity: str,
    title: str,
    counted: str,
    since: str | None,
    rows: Component,
    button: Component | None,
    *,
    key: str = "",
) -> Component:
    """key: of the group whose rows are asked for when the line is opened; "" where they are there already."""
    told = [html.B(counted), html.H2(prose(title))]
    summary = html.Summary(told, id={"part": "head", "group": key}) if key else html.Summary(told)
    return html.Article(
        [
            severity_mark(severity),
            html.Details([summary, rows], className="what"),
            html.Div(
                [
                    html.P(ago(since), className="facts"),
                    html.Div(button, className="actions") if button is not None else None,
                ],
                className="tail",
            ),
        ],
        className="alert card fold",
    )


def take_button(of: str, key: str, count: int) -> Component:
    """Acknowledges all of a group at once. of: alerts or runs."""
    said = say("act_ack") if count == 1 else say("act_take", count=count)
    return html.Button(said, id={"take": key, "of": of}, type="button", className="button quiet thumb")
