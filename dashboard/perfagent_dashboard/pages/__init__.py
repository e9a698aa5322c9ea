"""One module a page. It has `page(server) -> Page`, and its place in the bar is that in `all_pages()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.pages import alerts, compare, overview, run, runs, settings
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from perfagent_dashboard.server_api import ServerApi

__all__ = ["all_pages", "missing"]


def all_pages(server: ServerApi, address: str) -> list[Page]:
    """In the order of the bar. address: of the server, as training jobs use it."""
    first = [one.page(server, address) for one in (overview, runs)]
    return [*first, *(one.page(server) for one in (run, compare, alerts, settings))]


def missing(**_: Any) -> Component:
    """What stands at an address without a page."""
    return html.Section(
        [
            html.H1(say("no_page_title")),
            html.P(say("no_page")),
            html.A(say("to_fleet"), href="/runs", className="button", **hyphenated(data_nav="/runs")),
        ],
        className="notice",
        **hyphenated(data_page="missing"),
    )
