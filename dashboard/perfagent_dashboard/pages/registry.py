"""Pages: where each stands, what it is called, and which scripts it needs. `register_pages()` hands them to Dash Pages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dash
from dash import Dash

from perfagent_dashboard.components.feedback import trouble
from perfagent_dashboard.server_api import Problem
from perfagent_dashboard.words import say

__all__ = ["Page", "page_at", "register_pages"]

log = logging.getLogger("perfagent.dashboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """path: `/runs`, or with a variable: `/run/<run>`. layout: takes the variables of the path and the query of the
    address as keywords; may be async. register: adds its callbacks. icon: of the bar, in assets/icons; empty: it is not in
    the bar. grid, charts: whether it has a table of AG Grid, or plotly charts."""

    name: str
    path: str
    layout: Callable[..., Any]
    register: Callable[[Dash], None] = lambda _app: None
    icon: str = ""
    grid: bool = False
    charts: bool = False

    @property
    def title(self) -> str:
        return f"nav_{self.name}"

    def is_at(self, path: str) -> bool:
        if "<" not in self.path:
            return path == self.path
        head = self.path.partition("<")[0]
        return path.startswith(head) and len(path) > len(head)


def register_pages(pages: list[Page], missing: Callable[..., Any]) -> None:
    """Into Dash's registry, which is one for the whole process: a second app registers the same again."""
    for page in pages:
        where = {"path_template": page.path} if "<" in page.path else {"path": page.path}
        title = f"{say(page.title)} · perfagent" if page.icon else "perfagent"  # a run's page has the name of its run
        dash.register_page(f"perfagent_dashboard.pages.{page.name}", layout=_guarded(page.layout), title=title, **where)  # type: ignore[no-untyped-call]
    dash.register_page("perfagent_dashboard.pages.not_found_404", layout=missing, title="perfagent")  # type: ignore[no-untyped-call]


def _guarded(layout: Callable[..., Any]) -> Callable[..., Any]:
    """The layout, or a page that says that it failed; why stands in the server's log."""

    async def shown(**given: Any) -> Any:
        try:
            made = layout(**given)
            return await made if inspect.isawaitable(made) else made
        except Exception:
            log.exception("a page of the dashboard failed")
            return trouble(Problem(500, say("page_failed")))

    return shown


def page_at(pages: list[Page], path: str) -> Page | None:
    return next((page for page in pages if page.is_at(path)), None)
