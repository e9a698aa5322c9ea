"""Decides who may do what: the one question every route asks.

Bound to loopback, reading and ingest need no key and administration needs the admin token, an admin key or an admin's
session. Bound to anything else, or with auth "required", everything needs a key or a session. What is presented counts:
a wrong, revoked or expired key is refused even where none is needed, so that a mistake is seen; an ingest key never
reads. A cookie that is not known is no credential at all: browsers send it along unasked, also to another server on
this machine.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from starlette.requests import HTTPConnection

from perfagent_server.routes.problems import ApiError
from perfagent_server.settings import Settings

if TYPE_CHECKING:
    from perfagent_server.security.keys import Keys
    from perfagent_server.security.sessions import Sessions

__all__ = ["SCOPES", "Access", "Failures", "Identity", "Scope", "require"]

Scope = Literal["read", "ingest", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "ingest", "admin")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. who: for the audit log ("key 1a2b3c4d", "admin token", "session", "anyone"); project: the only one it
    may send to, None for any."""

    who: str
    may: frozenset[Scope]
    project: str | None = None


_GRANTS: dict[str, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "ingest": frozenset({"ingest"}),
    "admin": frozenset(SCOPES),
}
_ANYONE = Identity("anyone", frozenset({"read", "ingest"}))
_NOBODY = Identity("anyone", frozenset())


class Failures:
    """Counts wrong credentials by address: more than `limit` in a minute are answered 429 for the rest of that
    minute."""

    def __init__(
        self, limit: int = 10, *, clock: Callable[[], float] = time.monotonic, addresses: int = 10_000
    ) -> None:
        self._limit, self._clock, self._addresses = limit, clock, addresses
        self._windows: dict[str, tuple[float, int]] = {}  # address -> (start of its minute, failures in it)
        self.total = 0

    def count(self, address: str) -> float:
        """Counts one failure; seconds to wait when there were too many, else 0."""
        now = self._clock()
        self.total += 1
        start, failures = self._windows.get(address, (now, 0))
        if now - start >= 60:
            start, failures = now, 0
        if address not in self._windows and len(self._windows) >= self._addresses:
            del self._windows[next(iter(self._windows))]
        self._windows[address] = (start, failures + 1)
        return start + 60 - now if failures >= self._limit else 0.0


class Access:
    """Tells who a request is from."""

    def __init__(self, settings: Settings, keys: Keys, sessions: Sessions, *, admin_token: str) -> None:
        self._settings, self.keys, self.sessions = settings, keys, sessions
        self._admin_token = admin_token.encode()
        self.failures = Failures()

    def identify(self, connection: HTTPConnection) -> Identity:
        """Raises ApiError (401, 429) for a credential that is not valid."""
        identity = self._identity(connection)
        if identity is None:
            raise self.refused(connection)
        return identity

    def still_allows(self, connection: HTTPConnection, scope: Scope) -> bool:
        """Whether a connection that was let in would be let in now. Its end is no failed attempt, and is not counted as
        one."""
        identity = self._identity(connection)
        return identity is not None and scope in identity.may

    def _identity(self, connection: HTTPConnection) -> Identity | None:
        token = bearer_token(connection)
        if token is not None:
            return self._by_token(token)
        scope = self.sessions.scope_of(connection.cookies)
        if scope is not None:
            return Identity("session", _GRANTS[scope])
        return _ANYONE if self._settings.open_access else _NOBODY

    def refused(self, connection: HTTPConnection) -> ApiError:
        """Counts a wrong credential and says so."""
        wait = self.failures.count(connection.client.host if connection.client else "")
        if wait > 0:
            seconds = math.ceil(wait)
            return ApiError(
                429, "too_many_failures", f"too many wrong keys from this address; try again in {seconds} s",
                headers={"Retry-After": str(seconds)},
            )  # fmt: skip
        return ApiError(
            401, "unauthorized", "this key is not known, revoked or expired; `perfagent keys create` makes a new one",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip

    def login(self, token: str) -> tuple[str, str | None] | None:
        """The scope of a key or of the admin token, and the key's id; None when it is not valid."""
        if self._is_admin_token(token):
            return "admin", None
        key = self.keys.find(token)
        return None if key is None else (key.scope, key.id)

    def _is_admin_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._admin_token)

    def _by_token(self, token: str) -> Identity | None:
        if self._is_admin_token(token):
            return Identity("admin token", _GRANTS["admin"])
        key = self.keys.find(token)
        return None if key is None else Identity(f"key {key.id}", _GRANTS[key.scope], key.project)


def bearer_token(connection: HTTPConnection) -> str | None:
    """The key in `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
    header = connection.headers.get("authorization")
    if header is not None:
        kind, _, token = header.partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""
    return connection.headers.get("x-api-key")


def authorize(connection: HTTPConnection, scope: Scope) -> Identity:
    """The identity of a request that may do `scope`; raises ApiError 401, 403 or 429 for any other."""
    access: Access = connection.app.state.access
    identity = access.identify(connection)
    if scope in identity.may:
        return identity
    if identity.who == "anyone":
        raise ApiError(401, "unauthorized", _WHAT_IS_MISSING[scope], headers={"WWW-Authenticate": "Bearer"})
    cure = f"; an administrator makes a key with it: `perfagent keys create {scope}`"
    raise ApiError(403, "forbidden", f"{identity.who} may not do this: it needs the scope {scope!r}{cure}")


_WHAT_IS_MISSING: dict[Scope, str] = {
    "read": "reading needs a key (Authorization: Bearer KEY) or a login; an administrator makes it: `perfagent keys create read`",
    "ingest": "sending needs a key in PERFAGENT_API_KEY; an administrator makes one: `perfagent keys create ingest`",
    "admin": (
        "this needs an administrator: the admin token from the server's data folder, an admin key, or the one-time address "
        "that `perfagent up` and `perfagent keys login` print"
    ),
}


def require(scope: Scope) -> Callable[[HTTPConnection], Awaitable[Identity]]:
    """The dependency of a route: `dependencies=[Depends(require("read"))]`. Every route has one, or stands in the list
    of open ones in tests/server/security."""
    return _REQUIREMENTS[scope]


def _requirement(scope: Scope) -> Callable[[HTTPConnection], Awaitable[Identity]]:
    async def requirement(connection: HTTPConnection) -> Identity:
        return authorize(connection, scope)

    requirement.__name__ = f"require_{scope}"
    return requirement


# One function per scope for the life of the process, so that a route's scope can be read back from its dependencies.
_REQUIREMENTS = {scope: _requirement(scope) for scope in SCOPES}
