"""What a page says about itself: that there is nothing, that a request failed, what a button did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from perfagent_dashboard.server_api import Problem

__all__ = ["note", "nothing", "trouble"]


def nothing(text: str) -> Component:
    return html.P(text, className="hint")


def trouble(problem: Problem) -> Component:
    """In the place of what could not be shown."""
    is_locked = problem.status in (401, 403)
    return html.Section(
        [
            html.H1(say("locked_title" if is_locked else "failed_title")),
            html.P(say("locked") if is_locked else problem.message),
        ],
        className="notice",
        role="alert",
        **hyphenated(data_page="trouble"),
    )


def note(message: str, *, failed: bool = False, undo: Sequence[Sequence[Any]] = ()) -> list[dict[str, Any]]:
    """For the container of notes: shown for some seconds, longer where something failed or can be undone. undo: with a button
    that sends these requests, (method, path below /api/v1, body) each."""
    told: dict[str, Any] = {
        "action": "show", "message": message, "color": "red" if failed else "teal", "autoClose": 12000 if failed else 4000,
        "withBorder": True,
    }  # fmt: skip
    if undo:  # the container draws it outside of Dash's tree, which calls nothing: assets/start.js asks
        button = html.Button(
            say("undo"),
            type="button",
            className="button small",
            disable_n_clicks=True,
            **hyphenated(data_undo=json.dumps(undo)),
        )
        told |= {"message": html.Div([message, button], className="undo", disable_n_clicks=True), "autoClose": 12000}
    return [told]
