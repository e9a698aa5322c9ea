"""One alert: what is wrong in which run since when, who has taken it, and what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import html

from perfagent_dashboard.components.attributes import OPENS, hyphenated
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.prose import advice, prose
from perfagent_dashboard.components.times import UNTIL_UNDONE, ago, is_ahead, moment
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["alert_actions", "alert_card", "alert_history", "taken", "view_of"]

Alert = dict[str, Any]


def alert_card(alert: Alert, *, may_act: bool) -> Component:
    """alert: as the API shows it."""
    title = alert["title"] or alert["message"]
    is_open = alert["state"] == "firing"
    return html.Article(
        [
            severity_mark(alert["severity"]),
            html.Div(
                [
                    html.H2(prose(title)),
                    html.P(_facts(alert), className="facts"),
                    html.P(taken(alert), className="taken") if taken(alert) else None,
                    _more(alert, title),
                ],
                className="what",
            ),
            alert_actions(alert) if is_open and may_act else None,
        ],
        className=f"alert card {alert['state']}",
        **hyphenated(data_alert=alert["id"]),
    )


def view_of(alert: Alert) -> str:
    """In which of the four lists of the alerts page an alert stands. bar.js counts the open ones in the same way."""
    if alert["state"] != "firing":
        return "resolved"
    if alert["acknowledged"]:
        return "acknowledged"
    is_quiet = any(is_ahead(alert[name]) for name in ("muted_until", "snoozed_until", "silenced_until"))
    return "quiet" if is_quiet else "open"


def _facts(alert: Alert) -> list[Component | str | None]:
    link = f"/run/{quote(alert['run'], safe='')}"
    parts: list[Any] = [
        html.A(alert["run_name"] or alert["run"], href=link, className="run", **hyphenated(data_nav=link)),
        html.Span(alert["rule"].replace("_", " ")),
        html.Span([say("since_word"), " ", ago(alert["since"])]),
    ]
    if alert["since_step"] is not None:
        parts.append(html.Span(f"{say('step')} {alert['since_step']:,}"))
    if len(alert["ranks"]) > 1:
        parts.append(html.Span(say("ranks", count=len(alert["ranks"]))))
    if alert["state"] == "resolved":
        parts.append(html.Span([say("resolved_word"), " ", ago(alert["resolved"])]))
    return parts


def taken(alert: Mapping[str, Any]) -> list[Component | str]:
    """Who has it, and what keeps it quiet."""
    said: list[Any] = []
    if alert["acknowledged"]:
        who = alert["acknowledged_by"] or say("somebody")
        said.append(html.Span([say("acknowledged_by", who=who), " ", ago(alert["acknowledged"])]))
        if alert["note"]:
            said.append(html.Q(alert["note"]))
    for name in ("muted_until", "snoozed_until", "silenced_until"):
        if is_ahead(alert[name]):
            forever = alert[name].startswith(UNTIL_UNDONE)
            end: Any = say(f"{name}_ever") if forever else [say(name), " ", moment(alert[name])]
            said.append(html.Span(end, className="quiet"))
    return said


def _more(alert: Alert, title: str) -> Component:
    """The whole sentence, its cost, what to do, and what happened to it, which is asked for when this is opened."""
    fix = advice(alert["fix"])
    return html.Details(
        [
            html.Summary(say("more_text"), id={"more-of": alert["id"]}),
            html.P(prose(alert["message"])) if alert["message"] != title else None,
            html.P(say("costs", cost=alert["cost"])) if alert["cost"] else None,
            html.H3(say("fix")) if fix else None,
            fix,
            html.Div(id={"history-of": alert["id"]}),
        ]
    )


def alert_history(events: Sequence[Mapping[str, str]]) -> Component:
    """What happened to an alert, oldest first."""
    rows = []
    for event in events:
        known = say(f"alert_{event['event']}") if event["event"] in HAPPENINGS else event["event"]
        by = f", {say('by_whom', who=event['who'])}" if event["who"] else ""
        rows.append(
            html.Li([moment(event["time"]), " ", html.B(known), by, *([": ", event["note"]] if event["note"] else [])])
        )
    return html.Div([html.H3(say("alert_history")), html.Ol(rows)])


HAPPENINGS = (
    "fired", "reopened", "worse", "better", "resolved",
    "acknowledged", "unacknowledged", "muted", "unmuted", "snoozed", "unsnoozed",
)  # fmt: skip


_OPENS = OPENS | {"className": "button thumb"}


def alert_actions(alert: Alert, at: str = "card") -> Component:
    """Acknowledge with a note, snooze, mute, resolve; each that is done can be undone. at: where on the page it stands, since
    an alert may be there twice."""
    acknowledged, snoozed, muted = (
        alert["acknowledged"],
        is_ahead(alert["snoozed_until"]),
        is_ahead(alert["muted_until"]),
    )
    first = (
        _button(alert, "unack", at, variant="default")
        if acknowledged
        else dmc.Popover(
            [
                dmc.PopoverTarget(say("acknowledge"), boxWrapperProps=_OPENS),
                dmc.PopoverDropdown(
                    [
                        dmc.TextInput(
                            id={"note-of": alert["id"], "at": at}, label=say("note"), placeholder=say("note_hint"),
                            **{"data-autofocus": True},
                        ),
                        _button(alert, "ack", at, mt="sm"),
                    ]
                ),
            ],
            position="bottom-end", withArrow=True, trapFocus=True, width=280,
        )
    )  # fmt: skip
    items = [
        *([] if snoozed else [_item(alert, f"snooze-{how}", at) for how in ("1h", "8h", "resolved")]),
        *([_item(alert, "unsnooze", at)] if snoozed else []),
        _item(alert, "unmute" if muted else "mute", at),
        _item(alert, "resolve", at),
    ]
    return html.Div(
        [
            first,
            dmc.Menu(
                [
                    dmc.MenuTarget(say("quiet_menu"), boxWrapperProps=_OPENS),
                    dmc.MenuDropdown(items),
                ],
                position="bottom-end",
            ),
        ],
        className="actions",
    )  # fmt: skip


def _button(alert: Alert, act: str, at: str, **look: Any) -> Component:
    return dmc.Button(say(f"act_{act}"), id=_id(alert, act, at), size="sm", className="thumb", **look)


def _item(alert: Alert, act: str, at: str) -> Component:
    return dmc.MenuItem(say(f"act_{act}"), id=_id(alert, act, at))


def _id(alert: Alert, act: str, at: str) -> dict[str, str]:
    return {"act": act, "alert": alert["id"], "at": at}
