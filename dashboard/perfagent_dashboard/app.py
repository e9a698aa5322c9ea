"""The dashboard on the server's own FastAPI app: one ASGI app, one port, nothing from a CDN.

Dash serves the shell and routes between pages. Figures never pass through a Dash callback: the scripts in assets/ fetch
/api/v1/runs/{run}/series and append what /ws/live sends, so the cost on the page depends neither on points nor on
ranks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, unquote

from dash import Dash, Input, Output, dcc, html
from dash.backends._fastapi import reset_current_request, set_current_request
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from perfagent_dashboard import ids
from perfagent_dashboard.figures import chart_table, patterns
from perfagent_dashboard.pages import fleet, run
from perfagent_dashboard.pages.attributes import hyphenated
from perfagent_dashboard.theme import THEMES
from perfagent_dashboard.words import ENGLISH, STATE_SHAPES

if TYPE_CHECKING:
    from dash.development.base_component import Component
    from fastapi import FastAPI

__all__ = ["Source", "mount", "mount_on", "page_of"]

ASSETS = Path(__file__).with_name("assets")
HEAD_SCRIPT = "theme.js"  # runs before the first paint, so it is named in the head and not among Dash's scripts


class Source(Protocol):
    """What the dashboard wants to know of the server: the address that people and training jobs use. A Client fits."""

    @property
    def server(self) -> str: ...


class _Address:
    def __init__(self, server: str) -> None:
        self.server = server


KnownRun = Callable[[str], bool]
"""Whether there is a run of this id."""
RunNamed = Callable[[str], str | None]
"""The id of the newest run of this name."""


def mount_on(
    api: FastAPI,
    *,
    server_url: str,
    title: str = "perfagent",
    known_run: KnownRun = lambda _run: True,
    run_named: RunNamed = lambda _name: None,
    **_later: Any,
) -> Dash:
    """Entry point `perfagent.dashboard`: what `perfagent up` calls. Options of newer servers are accepted and
    ignored."""
    return mount(api, _Address(server_url), title=title, known_run=known_run, run_named=run_named)


def mount(
    api: FastAPI,
    client: Source,
    *,
    title: str = "perfagent",
    known_run: KnownRun = lambda _run: True,
    run_named: RunNamed = lambda _name: None,
) -> Dash:
    """Puts the pages on `api`, whose own routes must be registered before: every other path is answered with a page,
    which says that there is nothing and has the status 404. known_run, run_named: may wait for a database. The page of
    a run's name leads to the newest run of that name; pages of unknown runs are 404 too. The policy the pages need is
    left in `api.state.dashboard_csp`."""
    app = Dash(
        "perfagent_dashboard",
        server=api,  # type: ignore[arg-type]  # Dash's annotation knows Flask only
        title=title,
        update_title="",
        serve_locally=True,
        assets_folder=str(ASSETS),
        assets_ignore=rf"{HEAD_SCRIPT}|.*\.txt|.*\.svg",
        add_log_handler=False,
        suppress_callback_exceptions=True,
        include_pages_meta=False,
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
            {"name": "referrer", "content": "same-origin"},
        ],
        index_string=_index(client.server, title),
    )
    # No callback of ours goes over Dash's own WebSocket; with this every page has one connection less.
    app.backend.websocket_capability = False
    app.layout = layout
    register(app)
    # Dash 4.4.1 on FastAPI sets itself up only at a request of `/` or `/_dash-*`: a deep link that is the first request
    # after the start would come without scripts and styles. Its own catch-all, which it adds when the server starts,
    # belongs to the Dash of the process that came last and answers 200 to everything, so ours stands before it.
    app._setup_server()  # type: ignore[no-untyped-call]
    page = _page(app, known_run, run_named)
    api.add_api_route(
        "/{path:path}", page, methods=["GET", "HEAD"], include_in_schema=False, response_class=HTMLResponse
    )
    api.state.dashboard_csp = content_security_policy(app)
    return app


def content_security_policy(app: Dash) -> str:
    """Scripts only from here (and Dash's one inline line, by its hash); inline styles, because plotly writes them."""
    scripts = " ".join(["'self'", *app.csp_hashes()])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def layout() -> Component:
    """The shell: navigation and an empty main part, which the router fills."""
    return html.Div(
        [
            dcc.Location(id=ids.LOCATION, refresh=False),
            html.A(ENGLISH["skip"], href=f"#{ids.PAGE}", className="skip"),
            html.Header(
                [
                    html.A(
                        [html.Span(className="mark", **hyphenated(aria_hidden="true")), "perfagent"],
                        href="/",
                        className="logo",
                        **hyphenated(data_nav="/"),
                    ),
                    html.Nav(
                        [html.A(ENGLISH["fleet"], href="/", **hyphenated(data_nav="/"))],
                        **hyphenated(aria_label="Pages"),
                    ),
                    html.Span(id="crumb", className="crumb"),
                    html.Span(id="feed", className="feed", role="status"),
                    html.Button(id=ids.THEME, type="button", className="button quiet"),
                ],
                className="bar",
            ),
            html.Main(id=ids.PAGE, tabIndex="-1"),
        ],
        className="shell",
    )


def register(app: Dash) -> None:
    """The router: which page stands at an address. app.callback, never the global one: that belongs to the app built
    first."""

    @app.callback(Output(ids.PAGE, "children"), Input(ids.LOCATION, "pathname"))
    def show(pathname: str | None) -> Component:
        return page_of(pathname or "/")


def page_of(pathname: str) -> Component:
    """The page that stands at an address."""
    path = unquote(pathname)
    if path == "/":
        return fleet.layout()
    name = run_of(path)
    return missing(path) if name is None else run.layout(name)


def run_of(path: str) -> str | None:
    """The run whose page stands at an unquoted path; None where no run's page does."""
    head, _, name = path.lstrip("/").partition("/")
    return (name.strip("/") or None) if head == "run" else None


def missing(path: str) -> Component:
    return html.Section(
        [
            html.H1(ENGLISH["no_page_title"]),
            html.P(ENGLISH["no_page"].format(path=path)),
            html.A(ENGLISH["to_fleet"], href="/", className="button", **hyphenated(data_nav="/")),
        ],
        className="notice",
        **hyphenated(data_page="missing"),
    )


def _page(app: Dash, known_run: KnownRun, run_named: RunNamed) -> Any:
    async def page(request: Request) -> Response:
        name = run_of(request.path_params["path"])
        there = name is not None and await asyncio.to_thread(known_run, name)
        newest = None if name is None or there else await asyncio.to_thread(run_named, name)
        if newest is not None:  # for now: the next run of that name will be another
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"/run/{quote(newest, safe='')}{query}", 307, headers={"Cache-Control": "no-store"})
        # As Dash's own routes do: app.index() asks for the request.
        token = set_current_request(request)  # type: ignore[no-untyped-call]
        try:
            return HTMLResponse(app.index(), 200 if there else 404)  # type: ignore[no-untyped-call]
        finally:
            reset_current_request(token)  # type: ignore[no-untyped-call]

    return page


def _index(server_url: str, title: str) -> str:
    """Dash's index template. The data block is not a script to the browser; `<` is escaped so that no text can end
    it."""
    config = json.dumps(
        {
            "server": server_url,
            "title": title,
            "words": ENGLISH,
            "shapes": STATE_SHAPES,
            "themes": {name: theme.properties() for name, theme in THEMES.items()},
            "figures": {name: patterns(theme) for name, theme in THEMES.items()},
            **chart_table(),
        },
        ensure_ascii=True,
        separators=(",", ":"),
    ).replace("<", "\\u003c")
    head = int((ASSETS / HEAD_SCRIPT).stat().st_mtime)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
{{%metas%}}
<title>{{%title%}}</title>
<link rel="icon" type="image/svg+xml" href="/assets/icon.svg">
{{%css%}}
<script id="{ids.CONFIG}" type="application/json">{config}</script>
<script src="/assets/{HEAD_SCRIPT}?m={head}"></script>
</head>
<body>
{{%app_entry%}}
<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
</body>
</html>"""
