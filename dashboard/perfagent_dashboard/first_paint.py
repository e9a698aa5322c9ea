"""Renders what a page shows before its script runs: the bar, and the verdict of a run. On a slow line, or beside a busy
server, a reader sees this in place of an empty page, until the page takes its place (assets/start.js)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.marks import severity_mark, state_badge
from perfagent_dashboard.components.prose import prose, steps
from perfagent_dashboard.pages.run.facts import run_path
from perfagent_dashboard.pages.run.verdict import tone_of
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.shell import bar
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from perfagent_dashboard.pages.registry import Page

T = TypeVar("T")

__all__ = ["FirstPaint", "markup"]

_PATIENCE_S = 0.5
_DEAD = ("Button",)  # what does nothing without the script
_VOID = ("Br", "Hr", "Img", "Input")


class FirstPaint:
    def __init__(self, server: ServerApi, pages: list[Page]) -> None:
        self._server, self._pages = server, pages

    async def of(self, page: Page | None, run: str | None) -> str:
        """HTML. run: its id, where the page is one of a run. The script finds in it who is logged in, and how many alerts are
        open."""
        title = say(page.title) if page is not None and page.icon else say("loading")
        heading = [html.Div(html.H1(title), className="page-head")]
        session, inbox, main = await asyncio.gather(
            self._in_time(self._server.get("/session"), None),
            self._in_time(self._counts(), None),
            self._in_time(self._verdict(run) if run is not None else _at_once(heading), heading),
        )
        known = escape(json.dumps({"session": session, "inbox": inbox}))
        shown = markup([bar(self._pages), html.Main(html.Div(main, className="page"))])
        return f'<div id="first" class="shell" data-known="{known}">{shown}</div>'

    async def _counts(self) -> dict[str, Any]:
        """As far as the bar shows them."""
        inbox = await self._server.get("/alerts/inbox")
        return {name: inbox[name] for name in ("counts", "severities")}

    async def _in_time(self, asked: Awaitable[T], otherwise: T) -> T:
        """The page itself will say what has failed."""
        try:
            return await asyncio.wait_for(asked, _PATIENCE_S)
        except (Problem, TimeoutError):
            return otherwise

    async def _verdict(self, ident: str) -> list[Component]:
        run, verdict = await asyncio.gather(
            self._server.get(run_path(ident)), self._server.get(run_path(ident, "verdict"))
        )
        return [_head(run), _band(run, verdict)]


async def _at_once(shown: T) -> T:
    return shown


def _head(run: Mapping[str, Any]) -> Component:
    named = [
        html.Span(f"{run['project']} /", className="path"),
        html.H1(run["name"] or run["run"]),
        state_badge(run["state"]),
    ]
    return html.Div(html.Div(named, className="named"), className="run-head")


def _band(run: Mapping[str, Any], verdict: Mapping[str, Any]) -> Component:
    tone = tone_of(verdict, run["state"])
    what_to_do = steps(verdict["fix"])
    first = html.P([html.B(say("first")), " ", *prose(what_to_do[0])], className="first") if what_to_do else None
    title = prose(verdict["title"] or verdict["message"] or say("judging"))
    return html.Section(
        [html.Header([severity_mark(tone), html.H2(title)]), html.Div(first, className="says")],
        className=f"verdict card {tone}",
    )


def markup(node: Any) -> str:
    """HTML of elements of `dash.html`, without their ids, which the page itself will have; other components need a script."""
    if isinstance(node, list | tuple):
        return "".join(map(markup, node))
    if not isinstance(node, Component):
        return escape(str(node)) if node is not None else ""
    known = node.to_plotly_json()  # type: ignore[no-untyped-call]
    kind, given = known["type"], known["props"]
    if known["namespace"] != "dash_html_components" or kind in _DEAD:
        return ""
    names = {
        "className": "class",
        **{name: name for name in given if name in ("href", "title", "lang", "role") or "-" in name},
    }
    attributes = "".join(f' {names[name]}="{escape(str(given[name]))}"' for name in names if name in given)
    start = f"<{kind.lower()}{attributes}>"
    return start if kind in _VOID else f"{start}{markup(given.get('children'))}</{kind.lower()}>"
