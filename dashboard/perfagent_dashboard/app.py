"""The dashboard on the server's own FastAPI app: one ASGI app, one port, nothing from a CDN.

Dash serves the pages, and answers what people click. Charts never pass through a Dash callback: the modules in assets/
fetch /api/v1/runs/{run}/series and append what /ws/live sends, so the cost on the page depends neither on points nor on
ranks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dash import Dash, set_props
from dash._utils import interpolate_str
from dash.backends._fastapi import get_current_request, reset_current_request, set_current_request
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from perfagent_dashboard import ids
from perfagent_dashboard.components.feedback import note
from perfagent_dashboard.document import FIRST, Bundles, add_files, document, policy_hash
from perfagent_dashboard.first_paint import FirstPaint
from perfagent_dashboard.pages import all_pages, missing
from perfagent_dashboard.pages.registry import Page, page_at, register_pages
from perfagent_dashboard.report_file import serve_reports
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.shell import shell
from perfagent_dashboard.static_files import Assets, serve_suites
from perfagent_dashboard.words import LANGUAGES, language, say

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["mount_on"]

log = logging.getLogger("perfagent.dashboard")

ASSETS = Path(__file__).with_name("assets")


KnownRun = Callable[[Request, str], Awaitable[bool]]
"""Whether there is a run of this id that whoever asks may see."""
RunNamed = Callable[[Request, str], Awaitable[str | None]]
"""The id of the newest run of this name that whoever asks may see."""


def mount_on(api: FastAPI, *, server_url: str, known_run: KnownRun, run_named: RunNamed) -> Dash:
    """Puts the pages on `api`, whose own routes must be registered before: every other path is answered with a page,
    which says that there is nothing and has the status 404. known_run, run_named: may wait for a database. The page of
    a run's name leads to the newest run of that name; pages of unknown runs are 404 too. The policy the pages need is
    left in `api.state.dashboard_csp`. The entry point `perfagent.dashboard`."""
    server_api = ServerApi(api)
    pages = all_pages(server_api, server_url)
    assets, mounted, joined = Assets(ASSETS), list[_PagedDash](), dict[str, bytes]()
    assets.serve(api)
    serve_suites(api, mounted, joined)
    serve_reports(api, server_api, server_url)
    first = FirstPaint(server_api, pages)
    document_of = _document_route(mounted, server_api, first, known_run, run_named)
    api.add_api_route("/", document_of, methods=["GET", "HEAD"], include_in_schema=False)  # before Dash's own
    app = _PagedDash(
        "perfagent_dashboard",
        server=api,  # type: ignore[arg-type]  # Dash's annotation knows Flask only
        title="perfagent",
        update_title="",
        serve_locally=True,
        assets_folder=str(ASSETS),
        assets_ignore=".*",  # the document names them
        add_log_handler=False,
        suppress_callback_exceptions=True,
        include_pages_meta=False,
        use_pages=True,
        pages_folder="",
        use_async=True,
        on_error=_failed,
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
            {"name": "referrer", "content": "same-origin"},
        ],
    )
    mounted.append(app)
    # No callback of ours goes over Dash's own WebSocket; with this every page has one connection less.
    app.backend.websocket_capability = False
    app.layout = lambda: shell(pages)
    app.pages = pages
    register_pages(pages, missing)
    for page in pages:
        page.register(app)
    _set_up(app)
    app.bundles = Bundles(app)
    joined.update(app.bundles.joined)
    add_files(assets, server_url, app.bundles, pages)
    app.documents = {one: document(one, assets) for one in LANGUAGES}
    app.index_string = app.documents["en"]
    api.add_api_route(
        "/{path:path}", document_of, methods=["GET", "HEAD"], include_in_schema=False, response_class=HTMLResponse
    )
    api.state.dashboard_csp = content_security_policy(app, policy_hash(assets.text("theme.js")))
    return app


def _failed(error: Exception) -> None:
    """Logs the error and tells the viewer; the page stays as it was."""
    log.error("a callback of the dashboard failed", exc_info=error)
    set_props(ids.NOTES, {"sendNotifications": note(say("callback_failed"), failed=True)})


class _PagedDash(Dash):
    """Each page's document is in the language of its viewer, and names the scripts that the page needs."""

    pages: list[Page]
    bundles: Bundles
    documents: dict[str, str]

    def interpolate_index(self, **parts: str) -> str:  # type: ignore[override]
        asked = get_current_request()
        page = page_at(self.pages, asked.url.path)
        parts["scripts"] = self.bundles.needed(parts["scripts"], page)
        whole = str(interpolate_str(self.documents[language()], **parts))  # type: ignore[no-untyped-call]
        return whole.replace(FIRST, asked.state.first)


def _set_up(app: Dash) -> None:
    """What Dash 4.4.1 on FastAPI does at the first request of `/` or `/_dash-*` only: a deep link that is the first
    request after the start would come without scripts and styles. Dash's own catch-all, which it adds when the server
    starts, belongs to the Dash of the process that came last and answers 200 to everything, so ours stands before
    it."""

    async def prepare() -> None:
        for hook in app.backend._before_request_funcs:  # type: ignore[attr-defined]
            made = hook()
            if inspect.isawaitable(made):
                await made

    apart = threading.Thread(target=lambda: asyncio.run(prepare()))  # a loop may run on this thread
    apart.start()
    apart.join()


def content_security_policy(app: Dash, *hashes: str) -> str:
    """Scripts only from here (and the lines in the document, by their hashes); inline styles, because plotly and Mantine write
    them; fonts as data, because AG Grid's icons are one."""
    scripts = " ".join(["'self'", *app.csp_hashes(), *hashes])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _document_route(
    mounted: Sequence[_PagedDash], server_api: ServerApi, first: FirstPaint, known_run: KnownRun, run_named: RunNamed
) -> Any:
    """mounted: holds the app once it is there."""

    async def page_document(request: Request) -> Response:
        app, path = mounted[0], "/" + request.path_params.get("path", "")
        name = run_at(path)
        there = page_at(app.pages, path) is not None
        view = await _view_at(server_api, request, path)
        if view is not None:  # for now: it may be saved anew
            return RedirectResponse(view, 307, headers={"Cache-Control": "no-store"})
        if name is not None and not (there := await known_run(request, name)):
            newest = await run_named(request, name)
            if newest is not None:  # for now: the next run of that name will be another
                query = f"?{request.url.query}" if request.url.query else ""
                return RedirectResponse(
                    f"/run/{quote(newest, safe='')}{query}", 307, headers={"Cache-Control": "no-store"}
                )
        # As Dash's own routes do: app.index() asks for the request.
        token = set_current_request(request)  # type: ignore[no-untyped-call]
        try:
            request.state.first = await first.of(page_at(app.pages, path), name if there else None)
            return HTMLResponse(app.index(), 200 if there else 404)  # type: ignore[no-untyped-call]
        finally:
            reset_current_request(token)  # type: ignore[no-untyped-call]

    return page_document


async def _view_at(server_api: ServerApi, request: Request, path: str) -> str | None:
    """The address that a view stands for, where `/views/NAME` was asked for and the viewer sees one of this name."""
    head, _, name = path.lstrip("/").partition("/")
    if head != "views":
        return None
    token = set_current_request(request)  # type: ignore[no-untyped-call]
    try:
        found = await server_api.get("/views", project=request.query_params.get("project"))
    except Problem:
        return None
    finally:
        reset_current_request(token)  # type: ignore[no-untyped-call]
    return next((str(view["address"]) for view in found["views"] if view["name"] == name), None)


def run_at(path: str) -> str | None:
    """The run whose page stands at an unquoted path; None where no run's page does."""
    head, _, name = path.lstrip("/").partition("/")
    return (name.strip("/") or None) if head == "run" else None
