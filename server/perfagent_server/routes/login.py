"""How a browser comes in: /login with name and password, at an OpenID provider, with a key, or by a one-time address."""

from __future__ import annotations

import asyncio
import contextlib
import html
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from perfagent_server.database import StorageFull
from perfagent_server.refusal import RefusalError
from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.problems import ApiError, of_refusal
from perfagent_server.security.access import ADMIN_TOKEN
from perfagent_server.security.accounts import Account, NameTaken, RoleIn
from perfagent_server.security.audit import record
from perfagent_server.security.rights import NO_RIGHTS, Identity
from perfagent_server.services import Services

if TYPE_CHECKING:
    from perfagent_server.security.oidc import OpenIdProvider, SignedIn

__all__ = ["pages"]

pages = APIRouter(include_in_schema=False)

_PAGE = (Path(__file__).parents[1] / "static" / "login.html").read_text()
_NOBODY = Identity("anyone", NO_RIGHTS)


@pages.get("/login")
def login_page(
    request: Request, services: ServicesDep, token: str | None = None, next: str = "/"  # noqa: A002 - the address's word
) -> Response:  # fmt: skip
    """next: the page that asked for the login."""
    if token is None:
        return _form(services, "", goes_to=next)
    scope = services.access.sessions.redeem(token)
    if scope is None:
        error = of_refusal(services.access.refused(request))
        text = "This address was used already, or is too old. Run perfagent keys login on the server for a new one, or use a key."
        return _refused(services, error if error.status == 429 else ApiError(error.status, error.code, text), next)
    audit = record(request, ADMIN_TOKEN, "session.open", detail="one-time address")
    return _logged_in(request, services, services.access.sessions.open(request, scope=scope, also=audit), next)


@pages.post("/login")
async def login(request: Request, services: ServicesDep) -> Response:
    """name and password, or token: a key or the admin token."""
    body = await request.body()
    try:
        fields = parse_qs(body.decode(), max_num_fields=6)
    except ValueError:
        said = "the form could not be read; send name=NAME&password=PASSWORD, or token=KEY"
        raise ApiError(400, "bad_request", said, "token") from None
    token, goes_to = fields.get("token", [""])[0].strip(), fields.get("next", ["/"])[0]
    name, password = fields.get("name", [""])[0].strip(), fields.get("password", [""])[0]
    try:
        if name or password:
            return await _by_password(request, services, name, password, goes_to)
        return await asyncio.to_thread(_by_token, request, services, token, goes_to)
    except RefusalError as refusal:
        return await asyncio.to_thread(_refused, services, of_refusal(refusal), goes_to)


async def _by_password(request: Request, services: Services, name: str, password: str, goes_to: str) -> Response:
    people = services.people
    try:
        user = await people.check(name, password, request)
    except RefusalError as refusal:
        await asyncio.to_thread(_note_failure, request, services, name, refusal.why)
        raise
    response = await asyncio.to_thread(_open_for, request, services, user, "password", goes_to)
    people.remember_device(response, user, request)
    return response


def _note_failure(request: Request, services: Services, name: str, why: str) -> None:
    """In the audit log; the name only where it is one, for people type passwords into the wrong field. Attempts that were
    refused unseen are left out: they could fill the log."""
    if why == "unauthorized":
        known = services.people.accounts.find(name)
        audit = record(request, _NOBODY, "session.refused", known.name if known else "", "wrong password")
        with contextlib.suppress(StorageFull):  # no stranger uses up the room that is reserved
            services.database.write(audit)


def _by_token(request: Request, services: Services, token: str, goes_to: str) -> Response:
    found = services.access.login(token, request)
    if found is None:
        error = of_refusal(services.access.refused(request))
        said = error.message if error.status == 429 else "This key is not known, revoked or expired."
        return _refused(services, ApiError(error.status, error.code, said, headers=error.headers), goes_to)
    scope, key = found
    if scope == "ingest":
        said = "An ingest key can only send. Use a read, operate or admin key, or the admin token."
        return _form(services, said, 403, goes_to=goes_to)
    who = ADMIN_TOKEN if key is None else Identity(f"key {key}", NO_RIGHTS)
    session = services.access.sessions.open(
        request, scope=scope, key=key, also=record(request, who, "session.open", detail=scope)
    )
    return _logged_in(request, services, session, goes_to)


# --- at an OpenID provider --------------------------------------------------------------------------------------------


@pages.get("/login/oidc")
async def to_provider(request: Request, services: ServicesDep, next: str = "/") -> Response:  # noqa: A002
    """Leads to the provider."""
    try:
        return await _provider(services).begin(request, _page_of_ours(next))
    except RefusalError as refusal:
        return await asyncio.to_thread(_refused, services, of_refusal(refusal), next)


@pages.get("/login/oidc/callback")
async def from_provider(request: Request, services: ServicesDep) -> Response:
    """Where the provider leads back to, with a code."""
    provider = _provider(services)
    try:
        signed_in = await provider.finish(request)
        response = await asyncio.to_thread(_admit, request, services, signed_in)
    except RefusalError as refusal:
        response = await asyncio.to_thread(_refused, services, of_refusal(refusal), "/")
    provider.forget(response)
    return response


def _provider(services: Services) -> OpenIdProvider:
    if services.provider is None:
        said = "no OpenID provider is set up on this server; PERFAGENT_OIDC_ISSUER names one"
        raise ApiError(404, "not_found", said)
    return services.provider


def _admit(request: Request, services: Services, who: SignedIn) -> Response:
    """A user who has signed in has the roles that the provider gives now; without one nobody comes in. Raises
    RefusalError."""
    accounts = services.people.accounts
    known = accounts.by_subject(who.issuer, who.subject)
    if known is None and who.roles:
        known = _appear(request, services, who)
    elif known is not None and list(known.roles) != sorted(who.roles, key=_by_project):
        audit = record(request, _NOBODY, "user.change", known.name, "roles as the provider says")
        accounts.change(known.id, roles=who.roles, also=audit)
        services.hub.check_pages()
    if known is None or not who.roles:
        said = f"{who.name} has signed in, and none of their groups has a role here; an administrator maps one (oidc_roles)"
        raise RefusalError("forbidden", said)
    if known.disabled is not None:
        raise RefusalError("forbidden", f"{known.name} is disabled here; an administrator enables the user again")
    return _open_for(request, services, known, "provider", who.goes_to)


def _by_project(role: RoleIn) -> str:
    return role[0] or ""


def _appear(request: Request, services: Services, who: SignedIn) -> Account:
    """At the first sign-in. Never takes over a user who is there already. Raises RefusalError."""
    accounts = services.people.accounts
    audit = record(request, _NOBODY, "user.add", who.name, "first sign-in at the provider")
    try:
        ident = accounts.add(who.name, None, who.roles, issuer=who.issuer, subject=who.subject, also=audit)
    except NameTaken:
        said = f"there is another user {who.name!r} here already; an administrator removes that one first"
        raise RefusalError("forbidden", said) from None
    made = accounts.by_id(ident)
    assert made is not None
    return made


# --- both -------------------------------------------------------------------------------------------------------------


def _open_for(request: Request, services: Services, user: Account, way: str, goes_to: str) -> Response:
    identity = Identity(f"user {user.name}", user.rights, name=user.name, user=user.id)
    audit = record(request, identity, "session.open", detail=way)
    return _logged_in(request, services, services.access.sessions.open(request, user=user, also=audit), goes_to)


def _logged_in(request: Request, services: Services, session: str, goes_to: str) -> Response:
    response = RedirectResponse(_page_of_ours(goes_to), 303)
    services.access.sessions.set_cookie(response, session, request)
    return response


def _page_of_ours(address: str) -> str:
    """The path and query of an address on this server; `/` for any other, to which a link could lead somebody who has
    just logged in. Browsers read a backslash as a slash, and drop tabs and line breaks."""
    path = "".join(character for character in address if character > " ")
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"


def _refused(services: Services, error: ApiError, goes_to: str) -> Response:
    response = _form(services, error.message[:1].upper() + error.message[1:], error.status, goes_to=goes_to)
    response.headers.update(error.headers or {})
    return response


def _form(services: Services, message: str, status: int = 200, *, goes_to: str = "/") -> HTMLResponse:
    """Name and password first where there are users; else what an administrator needs. Reads the database."""
    page_of_ours = _page_of_ours(goes_to)
    going = f'<input type="hidden" name="next" value="{html.escape(page_of_ours)}">'
    provider, by_name = services.provider, services.people.accounts.exist()
    parts = {
        "note": f'<p role="alert">{html.escape(message)}</p>' if message else "",
        "provider": "" if provider is None else _BUTTON.format(quote(page_of_ours), html.escape(provider.name)),
        "password": _BY_NAME.format(going) if by_name else "",
        "key": (_BY_KEY_TOO if by_name or provider is not None else _BY_KEY).format(going),
    }
    page = _PAGE
    for name, part in parts.items():
        page = page.replace(f"{{{name}}}", part, 1)
    return HTMLResponse(page, status, headers={"Cache-Control": "no-store"})


_BUTTON = '<a class="button" href="/login/oidc?next={}">Sign in with {}</a>'
_BY_NAME = """<form method="post" action="/login">
{}
<label for="name">Name</label>
<input id="name" name="name" autocomplete="username" autocapitalize="none" spellcheck="false" required autofocus>
<label for="password">Password</label>
<input id="password" name="password" type="password" autocomplete="current-password" required>
<button>Log in</button>
</form>"""
_BY_KEY = """<form method="post" action="/login">
{}
<label for="token">Key</label>
<input id="token" name="token" type="password" autocomplete="off" required>
<button class="other">Log in with the key</button>
</form>
<p>A read, operate or admin key, or the admin token. The one-time address that <code>perfagent up</code> prints, or that
<code>perfagent keys login</code> makes on the server, needs none.</p>"""
_BY_KEY_TOO = f"<details><summary>Log in with a key</summary>{_BY_KEY}</details>"
