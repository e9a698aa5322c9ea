"""How a browser comes in: /login with a one-time token or a key, the session it opens, and new one-time addresses."""

from __future__ import annotations

import asyncio
import html
from dataclasses import dataclass
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from perfagent_server.refusal import RefusalError
from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.problems import ApiError, of_refusal
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import Identity, require
from perfagent_server.security.audit import record
from perfagent_server.services import Services

__all__ = ["pages", "router"]

router = APIRouter()
pages = APIRouter(include_in_schema=False)


@dataclass
class Who:
    """name: what people do with alerts is noted under it."""

    who: str
    name: str
    may: list[str]


@dataclass
class Link:
    url: str


@router.get("/session", responses={200: {"model": Who}})
async def who_am_i(request: Request, services: ServicesDep) -> Response:
    """Who this request is from and what it may do; open to everybody, so that a page can ask before it shows a
    button."""
    identity = await services.access.identify(request)
    return reply({"who": identity.who, "name": identity.name, "may": sorted(identity.may)})


@router.delete("/session", status_code=204, response_class=Response)
def log_out(request: Request, services: ServicesDep) -> Response:
    """Ends the session of this browser."""
    services.access.sessions.close(request.cookies)
    services.hub.check_pages()
    response = Response(status_code=204)
    services.access.sessions.clear_cookie(response)
    return response


@router.post("/session/links", status_code=201, responses={201: {"model": Link}})
def new_link(
    request: Request, services: ServicesDep, identity: Identity = Depends(require("admin"))  # noqa: B008
) -> Response:  # fmt: skip
    """A new one-time address that makes a browser an administrator's."""
    services.database.write(record(request, identity, "session.link"))
    return reply({"url": f"{services.settings.url}/login?token={services.access.sessions.issue_link()}"}, 201)


@pages.get("/login")
def login_page(
    request: Request, services: ServicesDep, token: str | None = None, next: str = "/"  # noqa: A002 - the address's word
) -> Response:  # fmt: skip
    """next: the page that asked for the login."""
    if token is None:
        return _form("", goes_to=next)
    scope = services.access.sessions.redeem(token)
    if scope is None:
        error = of_refusal(services.access.refused(request))
        text = "This address was used already, or is too old. Run perfagent keys login on the server for a new one, or use a key."
        return _form(error.message if error.status == 429 else text, error.status, goes_to=next)
    return _logged_in(request, services, scope, "one-time address", goes_to=next)


@pages.post("/login")
async def login(request: Request, services: ServicesDep) -> Response:
    body = await request.body()
    try:
        fields = parse_qs(body.decode(), max_num_fields=4)
    except ValueError:
        raise ApiError(400, "bad_request", "the form could not be read; send token=KEY", "token") from None
    token, goes_to = fields.get("token", [""])[0].strip(), fields.get("next", ["/"])[0]
    try:
        found = await asyncio.to_thread(services.access.login, token, request)
    except RefusalError as refusal:
        return _form(refusal.message, of_refusal(refusal).status, goes_to=goes_to)
    if found is None:
        error = of_refusal(services.access.refused(request))
        said = error.message if error.status == 429 else "This key is not known, revoked or expired."
        return _form(said, error.status, goes_to=goes_to)
    scope, key = found
    if scope == "ingest":
        said = "An ingest key can only send. Use a read, operate or admin key, or the admin token."
        return _form(said, 403, goes_to=goes_to)
    return await asyncio.to_thread(_logged_in, request, services, scope, "key", key, goes_to)


def _logged_in(
    request: Request, services: Services, scope: str, way: str, key: str | None = None, goes_to: str = "/"
) -> Response:
    identity = Identity(way, frozenset())
    session = services.access.sessions.open(scope, key=key, also=record(request, identity, "session.open", scope))
    response = RedirectResponse(_page_of_ours(goes_to), 303)
    services.access.sessions.set_cookie(response, session, request)
    return response


def _page_of_ours(address: str) -> str:
    """The path and query of an address on this server; `/` for any other, to which a link could lead somebody who has
    just logged in. Browsers read a backslash as a slash, and drop tabs and line breaks."""
    path = "".join(character for character in address if character > " ")
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"


def _form(message: str, status: int = 200, *, goes_to: str = "/") -> HTMLResponse:
    note = f'<p role="alert">{html.escape(message)}</p>' if message else ""
    page = _PAGE.replace("{note}", note).replace("{next}", html.escape(_page_of_ours(goes_to)))
    return HTMLResponse(page, status)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>perfagent: log in</title><link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 26rem; margin: 15vh auto; padding: 0 1rem }
input, button { font: inherit; width: 100%; box-sizing: border-box; padding: .6rem; margin: .4rem 0 }
[role=alert] { border-left: 4px solid #c62828; padding-left: .8rem }
</style></head><body>
<h1>perfagent</h1>
{note}
<p>Paste a read, operate or admin key, or the admin token. The one-time address that <code>perfagent up</code> prints, or that
<code>perfagent keys login</code> makes on the server, needs none.</p>
<form method="post" action="/login">
<input type="hidden" name="next" value="{next}">
<label for="token">Key</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Log in</button>
</form></body></html>
"""
