"""What stands around every page: the bar with its navigation, and the place that Dash Pages fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dash_mantine_components as dmc
from dash import dcc, html

from perfagent_dashboard import ids
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.icons import icon
from perfagent_dashboard.words import language, say

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from perfagent_dashboard.pages.registry import Page

__all__ = ["bar", "shell"]

_OTHER = {"en": "zh", "zh": "en"}
_MANTINE = {"fontFamily": "inherit", "primaryColor": "blue", "defaultRadius": "md", "cursorType": "pointer"}


def bar(pages: list[Page]) -> Component:
    """pages: those of the bar, in its order."""
    links = [
        html.A(
            [icon(page.icon), html.Span(say(page.title)), html.Span(className="count", id=f"count-{page.name}")],
            href=page.path,
            **hyphenated(data_nav=page.path),
        )
        for page in pages
        if page.icon
    ]
    return html.Header(
        [
            html.A(
                [html.Span(className="mark", **hyphenated(aria_hidden="true")), "perfagent"],
                href="/", className="logo", **hyphenated(data_nav="/"),
            ),
            html.Nav(links, **hyphenated(aria_label=say("pages"))),
            html.Span(id="crumb", className="crumb"),
            html.Span(id="feed", className="feed", role="status"),
            html.Button(icon("keyboard"), id=ids.KEYS, type="button", className="button quiet", title=say("keys_title")),
            html.Button(id=ids.LANGUAGE, type="button", className="button quiet", lang=_OTHER[language()]),
            html.Button(id=ids.THEME, type="button", className="button quiet"),
            html.Span(id=ids.ACCOUNT, className="account"),
        ],
        className="bar",
    )  # fmt: skip


def shell(pages: list[Page]) -> Component:
    return dmc.MantineProvider(
        html.Div(
            [
                html.A(say("skip"), href=f"#{ids.PAGE}", className="skip"),
                bar(pages),
                html.Main(html.Div(id="_pages_content", disable_n_clicks=True), id=ids.PAGE, tabIndex="-1"),
                _pages_parts(),
                dmc.NotificationContainer(id=ids.NOTES, position="bottom-right"),
            ],
            className="shell",
        ),
        id="mantine",
        theme=_MANTINE,
        defaultColorScheme="auto",
    )


def _pages_parts() -> Component:
    """What `dash.page_container` holds beside the page. Ours, because the store of the title needs a first value: Dash's
    own script for the title fails without."""
    return html.Div(
        [
            dcc.Location(id="_pages_location", refresh="callback-nav"),
            dcc.Store(id="_pages_store", data={"title": "perfagent"}),
            html.Div(id="_pages_dummy", disable_n_clicks=True),
        ],
        hidden=True,
    )
