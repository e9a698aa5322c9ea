"""Decides who may do what: the one question every route asks.

Bound to loopback, reading and ingest need no key and administration needs the admin token, an admin key or an admin's
session. Bound to anything else, or with auth "required", everything needs a key or a session. What is presented counts:
a wrong, revoked or expired key is refused even where none is needed, so that a mistake is seen; an ingest key never
reads. A cookie that is not known is no credential at all: browsers send it along unasked, also to another server on
this machine.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from starlette.requests import HTTPConnection

from perfagent_server.refusal import RefusalError
from perfagent_server.security.keys import is_shaped_like_key
from perfagent_server.settings import Settings

if TYPE_CHECKING:
    from perfagent_server.security.keys import Keys
    from perfagent_server.security.sessions import Sessions

__all__ = ["SCOPES", "Access", "Failures", "Identity", "Scope", "require"]

Scope = Literal["read", "ingest", "operate", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "ingest", "operate", "admin")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. who: for the audit log ("key 1a2b3c4d", "admin token", "session", "anyone"); name: as people call them,
    on what they do with alerts: the name of their key, "local" on a loopback without keys; project: the only one it may
    send to, None for any."""

    who: str
    may: frozenset[Scope]
    project: str | None = None
    name: str = ""


_GRANTS: dict[str, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "ingest": frozenset({"ingest"}),
    "operate": frozenset({"read", "operate"}),
    "admin": frozenset(SCOPES),
}
_ANYONE = Identity("anyone", frozenset({"read", "ingest", "operate"}), name="local")
_NOBODY = Identity("anyone", frozenset())


class Failures:
    """Counts wrong credentials by address: more than `limit` in a minute are answered 429 for the rest of that
    minute. Safe from any thread."""

    def __init__(
        self, limit: int = 10, *, clock: Callable[[], float] = time.monotonic, addresses: int = 10_000
    ) -> None:
        self._limit, self._clock, self._addresses = limit, clock, addresses
        self._windows: dict[str, tuple[float, int]] = {}  # address -> (start of its minute, failures in it)
        self._lock = threading.Lock()
        self.total = 0

    def count(self, address: str) -> float:
        """Counts one failure; seconds to wait when there were too many, else 0."""
        now = self._clock()
        with self._lock:
            self.total += 1
            start, failures = self._windows.get(address, (now, 0))
            if now - start >= 60:
                start, failures = now, 0
            if address not in self._windows and len(self._windows) >= self._addresses:
                del self._windows[next(iter(self._windows))]
            self._windows[address] = (start, failures + 1)
        return start + 60 - now if failures >= self._limit else 0.0

    def take_back(self, address: str) -> None:
        """What was counted before it was known was no failure."""
        with self._lock:
            self.total -= 1
            start, failures = self._windows.get(address, (0.0, 1))
            self._windows[address] = (start, max(failures - 1, 0))


class Access:
    """Tells who a request is from."""

    def __init__(self, settings: Settings, keys: Keys, sessions: Sessions, *, admin_token: str) -> None:
        self._settings, self.keys, self.sessions = settings, keys, sessions
        self._admin_token = admin_token.encode()
        self.failures = Failures()
        self.guesses = Failures()  # of the admin token, which a person may have made up

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Who asks. Raises RefusalError for a credential that is not valid. Reads the database, if that is
        needed, on another thread."""
        if self._needs_database(connection):
            return await asyncio.to_thread(self._identify, connection)
        return self._identify(connection)

    def still_allows(self, connection: HTTPConnection, scope: Scope) -> bool:
        """Whether a connection that was let in would be let in now. Its end is no failed attempt, and is not counted as
        one."""
        token = bearer_token(connection)
        if token is not None and self._is_admin_token(token):
            return True
        identity = self._by_session(connection) if token is None else self._by_key(token)
        return identity is not None and scope in identity.may

    def _identify(self, connection: HTTPConnection) -> Identity:
        token = bearer_token(connection)
        identity = self._by_session(connection) if token is None else self._by_token(token, _address(connection))
        if identity is None:
            raise self.refused(connection)
        return identity

    def _needs_database(self, connection: HTTPConnection) -> bool:
        """A guess on the safe side: whether to know who asks takes a look into the tables."""
        token = bearer_token(connection)
        return self.sessions.has_cookie(connection.cookies) if token is None else self.keys.must_load(token)

    def _by_session(self, connection: HTTPConnection) -> Identity:
        found = self.sessions.find(connection.cookies)
        if found is not None:
            return Identity("session", _GRANTS[found.scope], name=found.name or "admin")
        return _ANYONE if self._settings.open_access else _NOBODY

    def refused(self, connection: HTTPConnection) -> RefusalError:
        """Counts a wrong credential and says so."""
        wait = self.failures.count(_address(connection))
        if wait > 0:
            return _too_many(wait)
        return RefusalError(
            "unauthorized", "this key is not known, revoked or expired; `perfagent keys create` makes a new one"
        )

    def login(self, token: str, connection: HTTPConnection) -> tuple[Scope, str | None] | None:
        """The scope of a key or of the admin token, and the key's id; None when it is not valid. Reads the database."""
        key = self.keys.find(token)
        if key is not None:
            return key.scope, key.id
        return ("admin", None) if self._is_admitted_admin_token(token, _address(connection)) else None

    def _by_token(self, token: str, address: str) -> Identity | None:
        found = self._by_key(token)
        if found is None and self._is_admitted_admin_token(token, address):
            return Identity("admin token", _GRANTS["admin"], name="admin")
        return found

    def _by_key(self, token: str) -> Identity | None:
        key = self.keys.find(token)
        return (
            None
            if key is None
            else Identity(f"key {key.id}", _GRANTS[key.scope], key.project, key.name or f"key {key.id}")
        )

    def _is_admitted_admin_token(self, token: str, address: str) -> bool:
        """Counts before it compares: after too many wrong ones from an address, the right one is refused there too
        until the minute is over, else the limit would limit nothing. What looks like a key is no guess:
        a job whose key was revoked must not shut out the administrator of its machine."""
        if is_shaped_like_key(token) and not self._is_admin_token_shaped_like_key:
            return False
        wait = self.guesses.count(address)
        if wait > 0:
            self.failures.count(address)
            raise _too_many(wait)
        if not self._is_admin_token(token):
            return False
        self.guesses.take_back(address)
        return True

    def _is_admin_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._admin_token)

    @property
    def _is_admin_token_shaped_like_key(self) -> bool:
        return is_shaped_like_key(self._admin_token.decode())


def _address(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client else ""


def _too_many(wait_s: float) -> RefusalError:
    seconds = math.ceil(wait_s)
    return RefusalError(
        "too_many_failures",
        f"too many wrong keys from this address; try again in {seconds} s (an admin key or an open session still works)",
        retry_after_s=seconds,
    )


def bearer_token(connection: HTTPConnection) -> str | None:
    """The key in `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
    header = connection.headers.get("authorization")
    if header is not None:
        kind, _, token = header.partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""
    return connection.headers.get("x-api-key")


async def authorize(connection: HTTPConnection, scope: Scope) -> Identity:
    """The identity of a request that may do `scope`; raises RefusalError for any other."""
    access: Access = connection.app.state.access
    identity = await access.identify(connection)
    if scope in identity.may:
        return identity
    if identity.who == "anyone":
        raise RefusalError("unauthorized", _WHAT_IS_MISSING[scope])
    cure = f"; an administrator makes a key with it: `perfagent keys create {scope}`"
    raise RefusalError("forbidden", f"{identity.who} may not do this: it needs the scope {scope!r}{cure}")


_WHAT_IS_MISSING: dict[Scope, str] = {
    "read": "reading needs a key (Authorization: Bearer KEY) or a login; an administrator makes it: `perfagent keys create read`",
    "ingest": "sending needs a key in PERFAGENT_API_KEY; an administrator makes one: `perfagent keys create ingest`",
    "operate": (
        "acting on alerts needs a key with the scope operate, or a login with one; an administrator makes it: "
        "`perfagent keys create operate`"
    ),
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
        return await authorize(connection, scope)

    requirement.__name__ = f"require_{scope}"
    return requirement


# One function per scope for the life of the process, so that a route's scope can be read back from its dependencies.
_REQUIREMENTS = {scope: _requirement(scope) for scope in SCOPES}
