"""Users: added, changed and removed by an administrator of all projects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from perfagent_server.routes.dependencies import AdministratorOfAll, ServicesDep
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require_everywhere
from perfagent_server.security.accounts import Account, NameTaken, RoleIn, why_no_name
from perfagent_server.security.audit import record
from perfagent_server.security.passwords import why_not
from perfagent_server.security.rights import ROLES, Role
from perfagent_server.services import Services
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()

_MOST_ROLES = 200


@dataclass
class RoleOf:
    """role: viewer, operator or admin; project: null for all projects."""

    role: str
    project: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class NewUser:
    """password: 10 to 256 characters; left out, the user cannot log in until one is set."""

    name: str
    roles: list[RoleOf] = field(default_factory=list)
    password: str | None = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class UserChange:
    """What is left out stays. roles replaces all of them. A new password, and disabled, end every session of the user."""

    roles: list[RoleOf] | None = None
    password: str | None = None
    disabled: bool | None = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class RoleShown:
    role: Role
    project: str | None


@dataclass
class UserShown:
    """login: password, provider (an identity provider) or none; used: the last login."""

    name: str
    roles: list[RoleShown]
    login: str
    created: str
    disabled: str | None
    used: str | None


@dataclass
class UserList:
    users: list[UserShown]


@router.get("/users", dependencies=[Depends(require_everywhere("admin"))], responses={200: {"model": UserList}})
def list_users(services: ServicesDep) -> Response:
    """Every user, by name."""
    return reply({"users": [_shown(one) for one in services.people.accounts.everyone()]})


@router.post("/users", status_code=201, responses={201: {"model": UserShown}})
def add_user(new: NewUser, request: Request, services: ServicesDep, identity: AdministratorOfAll) -> Response:
    """Adds a user."""
    name = new.name.strip()
    if (why := why_no_name(name)) is not None:
        raise ApiError(422, "invalid", why, "name")
    roles = _roles(new.roles)
    audit = record(request, identity, "user.add", name, _told(roles))
    try:
        services.people.accounts.add(name, _hashed(services, new.password), roles, also=audit)
    except NameTaken:
        raise ApiError(
            409, "exists", f"there is a user {name!r} already; PATCH /api/v1/users/NAME changes it", "name"
        ) from None
    return reply(_shown(_known(services, name)), 201)


@router.patch("/users/{name}", responses={200: {"model": UserShown}})
def change_user(
    name: str, change: UserChange, request: Request, services: ServicesDep, identity: AdministratorOfAll
) -> Response:
    """Changes roles or password, disables or enables a user. It takes effect at once, also in open sessions and live
    pages.
    """
    known = _known(services, name)
    if known.issuer is not None and (change.roles is not None or change.password is not None):
        said = f"{known.name!r} signs in at {known.issuer}, from where roles come; only `disabled` can be changed here"
        raise ApiError(409, "not_possible", said, "roles" if change.roles is not None else "password")
    roles = None if change.roles is None else _roles(change.roles)
    told = [
        *([_told(roles)] if roles is not None else []), *(["password"] if change.password is not None else []),
        *([] if change.disabled is None else ["disabled" if change.disabled else "enabled"]),
    ]  # fmt: skip
    services.people.accounts.change(
        known.id, password=_hashed(services, change.password), roles=roles, disabled=change.disabled,
        also=record(request, identity, "user.change", known.name, "; ".join(told)),
    )  # fmt: skip
    services.hub.check_pages()
    return reply(_shown(_known(services, name)))


@router.delete("/users/{name}", status_code=204, response_class=Response)
def remove_user(name: str, request: Request, services: ServicesDep, identity: AdministratorOfAll) -> Response:
    """Removes a user and ends their sessions. What they did stays under their name."""
    known = _known(services, name)
    services.people.accounts.remove(known.id, also=record(request, identity, "user.remove", known.name))
    services.hub.check_pages()
    return Response(status_code=204)


def _known(services: Services, name: str) -> Account:
    found = services.people.accounts.find(name)
    if found is None:
        raise ApiError(404, "not_found", f"there is no user {name[:80]!r}; GET /api/v1/users lists them", "name")
    return found


def _roles(given: Sequence[RoleOf]) -> list[RoleIn]:
    if len(given) > _MOST_ROLES:
        raise ApiError(422, "invalid", f"a user may have up to {_MOST_ROLES} roles, not {len(given)}", "roles")
    for one in given:
        if one.role not in ROLES:
            said = f"role is {one.role[:40]!r}; allowed are {', '.join(ROLES)}"
            raise ApiError(422, "invalid", said, "roles")
    if len({one.project for one in given}) < len(given):
        raise ApiError(422, "invalid", "a project is named twice; a user has one role in each", "roles")
    return [(one.project, one.role) for one in given]


def _told(roles: Sequence[RoleIn]) -> str:
    """For the audit log."""
    return ", ".join(f"{role} of {project or 'all projects'}" for project, role in roles) or "no role"


def _hashed(services: Services, password: str | None) -> str | None:
    if password is None:
        return None
    if (why := why_not(password)) is not None:
        raise ApiError(422, "invalid", why, "password")
    return services.people.passwords.hash(password)


def _shown(one: Account) -> dict[str, Any]:
    return {
        "name": one.name, "roles": [{"role": role, "project": project} for project, role in one.roles],
        "login": one.login, "created": rfc3339(one.created), "disabled": rfc3339(one.disabled), "used": rfc3339(one.used),
    }  # fmt: skip
