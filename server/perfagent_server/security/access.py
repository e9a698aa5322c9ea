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
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from perfagent.endpoint.local_server import announcement
from perfagent_server.refusal import RefusalError
from perfagent_server.security.failures import Failures
from perfagent_server.security.keys import is_shaped_like_key
from perfagent_server.security.proof_check import ProofCheck
from perfagent_server.security.rights import SCOPES, Identity, Rights, Scope, rights_of_scope
from perfagent_server.settings import Settings

if TYPE_CHECKING:
    from perfagent_server.security.keys import Keys
    from perfagent_server.security.sessions import Sessions

__all__ = ["Access", "address_of", "authorize", "bearer_token", "is_over_https", "require", "require_everywhere"]

_ANYONE = Identity("anyone", Rights(frozenset({"read", "ingest", "operate"})), name="local")
_NOBODY = Identity("anyone")
ADMIN_TOKEN = Identity("admin token", rights_of_scope("admin", None), name="admin")


_ADMITTED = "perfagent.admitted"
_UNGUESSABLE = 32
"""Characters of an admin token that was made by a machine. (That of the data folder has 43.) A shorter one may have been
made up by a person."""


class Access:
    """Tells who a request is from."""

    def __init__(
        self, settings: Settings, keys: Keys, sessions: Sessions, *, admin_token: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._proofs = ProofCheck(admin_token, announcement(settings.local_url))
        self.keys, self.sessions = keys, sessions
        self._is_open = settings.open_access
        self.is_published_over_https = settings.url.lower().startswith("https:")
        self._admin_token = admin_token.encode()
        self.failures = Failures(clock=monotonic)
        self.guesses = Failures(clock=monotonic)  # of the admin token

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Who asks. Raises RefusalError for a credential that is not valid. Reads the database, if that is
        needed, on another thread."""
        if self._needs_database(connection):
            return await asyncio.to_thread(self._identify, connection)
        return self._identify(connection)

    def still_sees(self, connection: HTTPConnection, projects: frozenset[str] | None) -> bool:
        """Whether a connection that was let in to read these projects would be let in now, to the same ones. Its end is
        no failed attempt, and is not counted as one."""
        token = bearer_token(connection)
        if token is not None and (self._is_admin_token(token) or self._proofs.is_right(token, *_asked(connection))):
            return True
        identity = self._by_session(connection) if token is None else self._by_key(token)
        return identity is not None and "read" in identity.may and identity.seen_projects == projects

    def _identify(self, connection: HTTPConnection) -> Identity:
        token = bearer_token(connection)
        identity = self._by_session(connection) if token is None else self._by_token(token, connection)
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
            return found
        return _ANYONE if self._is_open else _NOBODY

    def refused(self, connection: HTTPConnection) -> RefusalError:
        """Counts a wrong credential and says so."""
        wait = self.failures.count(address_of(connection))
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
        return ("admin", None) if self._is_admitted_admin_token(token, connection) else None

    def _by_token(self, token: str, connection: HTTPConnection) -> Identity | None:
        found = self._by_key(token)
        if found is None and self._is_admitted_admin_token(token, connection):
            return ADMIN_TOKEN
        return found

    def _by_key(self, token: str) -> Identity | None:
        key = self.keys.find(token)
        if key is None:
            return None
        return Identity(
            f"key {key.id}", rights_of_scope(key.scope, key.project), key.project, key.name or f"key {key.id}",
            has_key=True, limits=key.limits,
        )  # fmt: skip

    def _is_admitted_admin_token(self, token: str, connection: HTTPConnection) -> bool:
        """Whether it is the token, or a proof of it: let in whatever else came from its address. Only a token short
        enough to be guessed is counted before it is compared: after too many wrong ones from an address, the right one
        is refused there too until the minute is over, else the limit would limit nothing. What looks like a key is no
        guess: a job whose key was revoked must not shut out the administrator of its machine."""
        if connection.scope.get(_ADMITTED) == token:  # a proof is used up when its request is asked for the second time
            return True
        if is_shaped_like_key(token) and not self._is_admin_token_shaped_like_key:
            return False
        if len(self._admin_token) >= _UNGUESSABLE:
            is_right = self._is_right(token, connection)
            if not is_right:
                self._count_guess(connection)
            return is_right
        self._count_guess(connection)
        if not self._is_right(token, connection):
            return False
        self.guesses.take_back(address_of(connection))
        return True

    def _is_right(self, token: str, connection: HTTPConnection) -> bool:
        if not self._is_admin_token(token) and not self._proofs.admits(token, *_asked(connection)):
            return False
        connection.scope[_ADMITTED] = token
        return True

    def _count_guess(self, connection: HTTPConnection) -> None:
        """Raises RefusalError when there were too many from this address."""
        address = address_of(connection)
        wait = self.guesses.count(address)
        if wait > 0:
            self.failures.count(address)
            raise _too_many(wait)

    def _is_admin_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._admin_token)

    @property
    def _is_admin_token_shaped_like_key(self) -> bool:
        return is_shaped_like_key(self._admin_token.decode())


def is_over_https(connection: HTTPConnection) -> bool:
    """Whether the browser speaks TLS, so that cookies are Secure. A proxy that is not trusted cannot tell; the public address
    can."""
    access: Access = connection.app.state.access
    return connection.url.scheme in ("https", "wss") or access.is_published_over_https


def _asked(connection: HTTPConnection) -> tuple[str, str]:
    """Method and target of a request, as they were sent."""
    scope = connection.scope
    query = scope["query_string"]
    target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
    return scope.get("method", "GET"), target.decode("latin-1")  # a WebSocket begins as a GET


def address_of(connection: HTTPConnection) -> str:
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
    key: str | None = None
    for name, value in connection.scope["headers"]:  # names are in lower case; Headers take five times as long
        if name == b"authorization":
            kind, _, token = str(value, "latin-1").partition(" ")
            return token.strip() if kind.lower() == "bearer" else ""
        if name == b"x-api-key" and key is None:
            key = str(value, "latin-1")
    return key


async def authorize(connection: HTTPConnection, scope: Scope, *, everywhere: bool = False) -> Identity:
    """The identity of a request that may do `scope` in one project or more, or everywhere; raises RefusalError for any
    other."""
    access: Access = connection.app.state.access
    identity = await access.identify(connection)
    if scope in (identity.rights.everywhere if everywhere else identity.may):
        return identity
    if identity.who == "anyone":
        raise RefusalError("unauthorized", _WHAT_IS_MISSING[scope])
    raise RefusalError("forbidden", f"{identity.who} may not do this: {lacking(scope, everywhere=everywhere)}")


def lacking(scope: Scope, *, everywhere: bool = False) -> str:
    """What somebody needs who is known, and may not do this."""
    of_all = " in all projects" if everywhere else ""
    role = _ROLE_WITH[scope]
    as_user = (
        f"the role {role}{of_all}, which an administrator gives (`perfagent users role NAME {role}`), or "
        if role
        else ""
    )
    return f"it needs {as_user}a key with the scope {scope!r}{of_all} (`perfagent keys create {scope}`)"


_ROLE_WITH: dict[Scope, str] = {"read": "viewer", "ingest": "", "operate": "operator", "admin": "admin"}

_WHAT_IS_MISSING: dict[Scope, str] = {
    "read": "reading needs a key (Authorization: Bearer KEY) or a login; an administrator makes it: `perfagent keys create read`",
    "ingest": "sending needs a key in PERFAGENT_API_KEY; an administrator makes one: `perfagent keys create ingest`",
    "operate": (
        "acting on runs and alerts needs a key with the scope operate, or a login of an operator; an administrator makes it: "
        "`perfagent keys create operate`"
    ),
    "admin": (
        "this needs an administrator: the admin token from the server's data folder, an admin key, the login of an admin, or "
        "the one-time address that `perfagent up` and `perfagent keys login` print"
    ),
}

Requirement = Callable[[HTTPConnection], Awaitable[Identity]]


def require(scope: Scope) -> Requirement:
    """The dependency of a route that works on what belongs to projects: `Depends(require("read"))`. The caller has the
    scope in one project or more; the route itself keeps to these. Every route has a requirement, or stands in the list of
    open ones in tests/server/security."""
    return _REQUIREMENTS[scope, False]


def require_everywhere(scope: Scope) -> Requirement:
    """The dependency of a route that works on what belongs to the server, or to all projects."""
    return _REQUIREMENTS[scope, True]


def _requirement(scope: Scope, *, everywhere: bool) -> Requirement:
    async def requirement(connection: HTTPConnection) -> Identity:
        return await authorize(connection, scope, everywhere=everywhere)

    requirement.__name__ = f"require_{scope}" + ("_everywhere" if everywhere else "")
    return requirement


# One function each for the life of the process: a request asks it once, and a route's scope can be read back from it.
_REQUIREMENTS = {
    (scope, everywhere): _requirement(scope, everywhere=everywhere) for scope in SCOPES for everywhere in (False, True)
}
