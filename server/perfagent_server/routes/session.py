"""Who is logged in: this session, one's other sessions, one's password, and new one-time addresses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict
from starlette.responses import Response

from perfagent_server.refusal import RefusalError
from perfagent_server.routes.dependencies import AdministratorOfAll, ServicesDep
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.accounts import Account
from perfagent_server.security.audit import record
from perfagent_server.security.passwords import why_not
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()


@dataclass
class Who:
    """name: what people do with alerts is noted under it. user: whether it is a user, who has a password and sessions.
    may: in one project or more; or in that of `run`. everywhere: in all projects, and on the server. projects: what it may
    beyond that in some projects, by project."""

    who: str
    name: str
    user: bool
    may: list[str]
    everywhere: list[str]
    projects: dict[str, list[str]]


@dataclass
class SessionShown:
    """origin: the address that opened it; agent: its browser; current: whether it is the one that asks."""

    id: str
    created: str
    expires: str
    origin: str
    agent: str
    current: bool


@dataclass
class SessionList:
    """login: how the user signs in: "password" or "provider" (an identity provider)."""

    login: str
    sessions: list[SessionShown]


@dataclass
class NewPassword:
    """password: the new one, 10 to 256 characters; old: the present one."""

    old: str
    password: str

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class Link:
    url: str


@router.get("/session", responses={200: {"model": Who}})
async def who_am_i(
    request: Request, services: ServicesDep, run: Annotated[str | None, Query(max_length=128)] = None
) -> Response:
    """Who the caller is, and what the caller may do. Open to everybody. `run`: what the caller may do with that run."""
    identity = await services.access.identify(request)
    rights = identity.rights
    may = rights.scopes if run is None or not rights.by_project else await _may_with(services, identity, run)
    return reply(
        {
            "who": identity.who, "name": identity.name, "user": identity.user is not None, "may": sorted(may),
            "everywhere": sorted(rights.everywhere),
            "projects": {project: sorted(scopes) for project, scopes in sorted(rights.by_project.items())},
        }
    )  # fmt: skip


@router.delete("/session", status_code=204, response_class=Response)
async def log_out(request: Request, services: ServicesDep) -> Response:
    """Ends the session of this browser."""
    sessions = services.access.sessions
    identity = await asyncio.to_thread(sessions.find, request.cookies)
    audit = None if identity is None else record(request, identity, "session.close")
    await asyncio.to_thread(sessions.close, request.cookies, also=audit)
    services.hub.check_pages()
    response = Response(status_code=204)
    sessions.clear_cookie(response)
    return response


async def _the_user(request: Request, services: ServicesDep) -> Account:
    """The user who is logged in. Raises ApiError where it is none."""
    identity = await services.access.identify(request)
    found = await asyncio.to_thread(services.people.accounts.by_id, identity.user) if identity.user else None
    if found is None:
        said = "only a user who is logged in has sessions and a password of their own; log in at /login by name"
        raise ApiError(401, "unauthorized", said, headers={"WWW-Authenticate": "Bearer"})
    return found


User = Annotated[Account, Depends(_the_user)]


@router.get("/sessions", responses={200: {"model": SessionList}})
def own_sessions(request: Request, services: ServicesDep, user: User) -> Response:
    """The sessions of the user who is logged in, newest first."""
    found = services.access.sessions.of_user(user.id, request.cookies)
    shown = [
        {
            "id": one.id, "created": rfc3339(one.created), "expires": rfc3339(one.expires), "origin": one.origin,
            "agent": one.agent, "current": one.current,
        }
        for one in found
    ]  # fmt: skip
    return reply({"login": user.login, "sessions": shown})


@router.delete("/sessions/{session_id}", status_code=204, response_class=Response)
def end_session(session_id: str, request: Request, services: ServicesDep, user: User) -> Response:
    """Ends one of the caller's own sessions, such as that of a lost laptop."""
    audit = record(request, _as_identity(user), "session.end", session_id)
    if not services.access.sessions.end(user.id, session_id, also=audit):
        said = f"you have no session {session_id[:40]!r}; GET /api/v1/sessions lists them"
        raise ApiError(404, "not_found", said, "session_id")
    services.hub.check_pages()
    return Response(status_code=204)


@router.post("/session/password", status_code=204, response_class=Response)
async def change_password(new: NewPassword, request: Request, services: ServicesDep, user: User) -> Response:
    """Sets a new password for the user who is logged in, and ends the user's other sessions."""
    people = services.people
    if user.issuer is not None:
        raise ApiError(409, "not_possible", f"you sign in at {user.issuer}; change your password there")
    if (why := why_not(new.password)) is not None:
        raise ApiError(422, "invalid", why, "password")
    try:
        await people.check(user.name, new.old, request)
    except RefusalError as refusal:
        if refusal.why == "unauthorized":
            raise ApiError(422, "invalid", "this is not your present password", "old") from None
        raise
    hashed = await asyncio.to_thread(people.passwords.hash, new.password)
    audit = record(request, _as_identity(user), "user.password", user.name)
    kept = services.access.sessions.digest(request.cookies)
    await asyncio.to_thread(people.accounts.change, user.id, password=hashed, keep_session=kept, also=audit)
    services.hub.check_pages()
    return Response(status_code=204)


@router.post("/session/links", status_code=201, responses={201: {"model": Link}})
def new_link(request: Request, services: ServicesDep, identity: AdministratorOfAll) -> Response:
    """Makes an address that works once and makes a browser an administrator's."""
    services.database.write(record(request, identity, "session.link"))
    return reply({"url": f"{services.settings.url}/login?token={services.access.sessions.issue_link()}"}, 201)


async def _may_with(services: Services, identity: Identity, run: str) -> frozenset[str]:
    project = await asyncio.to_thread(services.runs.project_of, run)
    if project is None or not identity.sees(project):
        return frozenset()
    return frozenset(scope for scope in identity.may if identity.rights.may(scope, project))


def _as_identity(user: Account) -> Identity:
    return Identity(f"user {user.name}", user.rights, name=user.name, user=user.id)
