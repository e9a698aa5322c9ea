"""API keys: made, listed, limited and revoked by an administrator. A key's secret is in the answer that made it and nowhere
else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from perfagent.errors import ConfigError
from perfagent.wire.frame import MAX_NAME_BYTES
from perfagent_server.routes.dependencies import Administrator, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.audit import listed, record
from perfagent_server.security.keys import KEY_SCOPES, Key, KeyScope
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()

_MAX_EXPIRES_S = 100 * 365 * 86400.0


@dataclass
class NewKey:
    """scope: ingest, read, operate or admin; project: the only one that it sends to, sees and changes; expires_in_s: None
    is never; limits: its own, instead of the server's, by name: requests_per_s, samples_per_s, bytes_per_s,
    runs_per_hour; above the server's only an administrator of all projects sets one."""

    scope: str
    name: str = ""
    project: str | None = None
    expires_in_s: float | None = None
    limits: dict[str, float] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class KeyLimits:
    """limits: by name, as in POST /keys; {}: the server's."""

    limits: dict[str, float]

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class KeyShown:
    id: str
    scope: KeyScope
    name: str
    project: str | None
    created: str
    expires: str | None
    revoked: str | None
    used: str | None
    limits: dict[str, float]


@dataclass
class KeyMade(KeyShown):
    key: str


@dataclass
class KeyList:
    keys: list[KeyShown]


@router.post("/keys", status_code=201, responses={201: {"model": KeyMade}})
def create_key(new: NewKey, request: Request, services: ServicesDep, identity: Administrator) -> Response:
    """Makes a key. `key` is shown only in this answer. An administrator of some projects makes keys of these projects."""
    if new.scope not in KEY_SCOPES:
        raise ApiError(422, "invalid", f"scope is {new.scope[:80]!r}; allowed are {', '.join(KEY_SCOPES)}", "scope")
    if len(new.name.encode()) > MAX_NAME_BYTES:
        raise ApiError(422, "invalid", f"name may have up to {MAX_NAME_BYTES} bytes", "name")
    if new.project is not None and not 1 <= len(new.project.encode()) <= MAX_NAME_BYTES:
        raise ApiError(422, "invalid", f"project must have 1 to {MAX_NAME_BYTES} bytes", "project")
    check_project(identity, "admin", new.project or "")
    expires = None
    if new.expires_in_s is not None:
        if not 0 < new.expires_in_s <= _MAX_EXPIRES_S:  # false for NaN too
            raise ApiError(422, "invalid", "expires_in_s must be above 0 and at most a hundred years", "expires_in_s")
        expires = time.time() + new.expires_in_s
    limits = _checked_limits(services, identity, new.limits or {})
    audit = record(request, identity, "key.create", new.name, new.scope, project=new.project or "")
    key, token = services.access.keys.create(
        new.scope, new.name, project=new.project, expires=expires, limits=limits, also=audit
    )
    return reply({**_shown(key), "key": token}, 201)


@router.get("/keys", responses={200: {"model": KeyList}})
def list_keys(services: ServicesDep, identity: Administrator) -> Response:
    """Every key without its secret, also revoked and expired ones, newest first. An administrator of some projects sees
    those of these projects.
    """
    return reply({"keys": [_shown(key) for key in services.access.keys.list() if _administers(identity, key)]})


@router.delete("/keys/{key_id}", status_code=204, response_class=Response)
def revoke_key(key_id: str, request: Request, services: ServicesDep, identity: Administrator) -> Response:
    """Revokes a key. From now on it is refused, and so are the browser sessions and live pages that were opened with
    it.
    """
    known = _known(services, identity, key_id)
    audit = record(request, identity, "key.revoke", key_id, known.name, project=known.project or "")
    services.access.keys.revoke(key_id, also=audit)
    services.hub.check_pages()
    return Response(status_code=204)


@router.patch("/keys/{key_id}", responses={200: {"model": KeyShown}})
def limit_key(
    key_id: str, changes: KeyLimits, request: Request, services: ServicesDep, identity: Administrator
) -> Response:
    """Sets the key's own limits, which replace those before, for what it sends from now on."""
    known = _known(services, identity, key_id)
    limits = _checked_limits(services, identity, changes.limits)
    audit = record(request, identity, "key.limit", key_id, listed(limits), project=known.project or "")
    return reply(_shown(services.access.keys.set_limits(key_id, limits, also=audit) or known))


def _known(services: Services, identity: Identity, key_id: str) -> Key:
    """The key of this id. Raises ApiError where there is none, or none that this administrator may change."""
    known = next((key for key in services.access.keys.list() if key.id == key_id), None)
    if known is None or not _administers(identity, known):
        raise ApiError(404, "not_found", f"there is no key {key_id[:40]!r}; GET /api/v1/keys lists them", "key_id")
    return known


def _checked_limits(services: Services, identity: Identity, limits: dict[str, float]) -> dict[str, float]:
    """Limits keep one sender from slowing down the others, so an administrator of some projects does not lift the
    server's."""
    defaults = services.sender_limits.defaults
    try:
        defaults.but(limits)
    except ConfigError as error:
        raise ApiError(422, "invalid", str(error), "limits") from None
    for name, value in limits.items():
        allowed = getattr(defaults, name)
        if value > allowed and "admin" not in identity.rights.everywhere:
            said = f"{name} may be at most {allowed:.15g}, the server's own; only an administrator of all projects raises it"
            raise ApiError(403, "forbidden", said, "limits")
    return limits


def _administers(identity: Identity, key: Key) -> bool:
    if key.project is None:
        return "admin" in identity.rights.everywhere
    return identity.rights.may("admin", key.project)


def _shown(key: Key) -> dict[str, Any]:
    return {
        "id": key.id, "scope": key.scope, "name": key.name, "project": key.project, "created": rfc3339(key.created),
        "expires": rfc3339(key.expires), "revoked": rfc3339(key.revoked), "used": rfc3339(key.used),
        "limits": key.limits,
    }  # fmt: skip
