"""One alert: what is wrong in which run since when, who has taken it, and what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import OPENS, hyphenated
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.prose import advice, prose
from perfagent_dashboard.components.times import UNTIL_UNDONE, ago, is_ahead, moment
from perfagent_dashboard.words import say

__all__ = ["alert_actions", "alert_card", "alert_history", "beyond", "taken"]

Alert = dict[str, Any]


def alert_card(alert: Alert, *, may_act: bool) -> Component:
    """One line that unfolds. alert: as the API shows it."""
    title = alert["title"] or alert["message"]
    rest = beyond(title, alert["message"])
    return html.Article(
        [
            severity_mark(alert["severity"]),
            html.Details(
                [
                    html.Summary(
                        [html.H2(prose(title)), html.Span(prose(rest), className="beyond") if rest else None],
                        id={"part": "more", "alert-of": alert["id"]},
                    ),
                    *_more(alert, rest),
                ],
                className="what",
            ),
            html.P([*_facts(alert), *taken(alert)], className="facts"),
            alert_actions(alert) if alert["state"] == "firing" and may_act else None,
        ],
        className=f"alert card {alert['state']}",
        **hyphenated(data_alert=alert["id"]),
    )


def beyond(title: str, message: str) -> str:
    """What a message says beyond the title, with which it usually begins."""
    rest = message.removeprefix(title).lstrip(" :;,.：；，。") if message.startswith(title) else message
    return rest[:1].upper() + rest[1:]


def _facts(alert: Alert) -> list[Component | str | None]:
    link = f"/run/{quote(alert['run'], safe='')}"
    parts: list[Any] = [
        html.A(alert["run_name"] or alert["run"], href=link, className="run", **hyphenated(data_nav=link)),
        html.Span(alert["project"]),
        html.Span(ago(alert["since"])),
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


def _more(alert: Alert, rest: str) -> list[Component | None]:
    """The whole sentence, its cost, what to do, and what happened to it, which is asked for when this is opened."""
    fix = advice(alert["fix"])
    return [
        html.P(prose(rest)) if rest else None,
        html.P(say("costs", cost=alert["cost"])) if alert["cost"] else None,
        html.H3(say("fix")) if fix else None,
        fix,
        html.Div(id={"part": "history", "alert-of": alert["id"]}),
    ]


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


_OPENS = OPENS | {"className": "button quiet thumb"}


def alert_actions(alert: Alert, at: str = "card") -> Component:
    """Acknowledge, snooze, mute, resolve; each that is done can be undone. Who has acknowledged an alert may say more about
    it. at: where on the page it stands, since an alert may be there twice."""
    snoozed, muted = is_ahead(alert["snoozed_until"]), is_ahead(alert["muted_until"])
    first = [_button(alert, "unack", at), _note(alert, at)] if alert["acknowledged"] else [_button(alert, "ack", at)]
    items = [
        *([] if snoozed else [_item(alert, f"snooze-{how}", at) for how in ("1h", "8h", "resolved")]),
        *([_item(alert, "unsnooze", at)] if snoozed else []),
        _item(alert, "unmute" if muted else "mute", at),
        _item(alert, "resolve", at),
    ]
    menu = dmc.Menu(
        [dmc.MenuTarget(say("quiet_menu"), boxWrapperProps=_OPENS), dmc.MenuDropdown(items)], position="bottom-end"
    )
    return html.Div([*first, menu], className="actions")


def _note(alert: Alert, at: str) -> Component:
    """What others should know of an alert that somebody has."""
    field = dmc.TextInput(
        id={"note-of": alert["id"], "at": at}, label=say("note"), placeholder=say("note_hint"), value=alert["note"],
        **{"data-autofocus": True},
    )  # fmt: skip
    return dmc.Popover(
        [
            dmc.PopoverTarget(say("note"), boxWrapperProps=_OPENS),
            dmc.PopoverDropdown(html.Div([field, _button(alert, "note", at)], className="stack")),
        ],
        position="bottom-end", withArrow=True, trapFocus=True, width=280,
    )  # fmt: skip


def _button(alert: Alert, act: str, at: str) -> Component:
    return html.Button(say(f"act_{act}"), id=_id(alert, act, at), type="button", className="button quiet thumb")


def _item(alert: Alert, act: str, at: str) -> Component:
    return dmc.MenuItem(say(f"act_{act}"), id=_id(alert, act, at))


def _id(alert: Alert, act: str, at: str) -> dict[str, str]:
    return {"act": act, "alert": alert["id"], "at": at}
