"""Sessions of browsers, and the one-time addresses that open them.

A session is a random id in an HttpOnly, SameSite=Lax cookie; the server keeps its SHA-256. A one-time address is good
for one use and for as long as the process that printed it runs, at most a day. A session that a key opened ends with
that key.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, or_, select
from sqlalchemy.engine import Connection
from starlette.requests import HTTPConnection
from starlette.responses import Response

from perfagent_server.store.tables import api_key, session

if TYPE_CHECKING:
    from perfagent_server.database import Database

__all__ = ["Session", "Sessions"]

_SESSION_S = 30 * 86400.0
_LINK_S = 86400.0
# Browsers refuse a `__Host-` cookie unless it is Secure, for the whole host and set over https: no other site can plant
# one.
_SECURE_COOKIE = "__Host-perfagent"
_PLAIN_COOKIE = "perfagent_session"


@dataclass(frozen=True, slots=True)
class Session:
    """name: of the key that opened it; empty for the admin token and one-time addresses."""

    scope: str
    name: str


class Sessions:
    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock
        self._lock = threading.Lock()
        self._links: dict[bytes, tuple[str, float]] = {}  # digest -> (scope, expires)

    # --- one-time addresses -------------------------------------------------------------------------------------------

    def issue_link(self, scope: str = "admin") -> str:
        """A token for /login?token=..., good for one use."""
        token = secrets.token_urlsafe(32)
        now = self._clock()
        with self._lock:
            self._links = {digest: link for digest, link in self._links.items() if link[1] > now}
            self._links[_digest(token)] = (scope, now + _LINK_S)
        return token

    def redeem(self, token: str) -> str | None:
        """The scope that a one-time token gives, None when it is unknown, used or too old."""
        with self._lock:
            scope, expires = self._links.pop(_digest(token), ("", 0.0))
        return scope if expires > self._clock() else None

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, scope: str, *, key: str | None = None, also: Callable[[Connection], object] | None = None) -> str:
        """The id of a new session, for the cookie. key: the id of the key that opens it."""
        token, now = secrets.token_urlsafe(32), self._clock()

        def job(connection: Connection) -> None:
            connection.execute(delete(session).where(session.c.expires < now))
            values = {"digest": _digest(token), "scope": scope, "created": now, "expires": now + _SESSION_S, "key": key}
            connection.execute(insert(session).values(**values))
            if also:
                also(connection)

        self._database.write(job)
        return token

    def close(self, cookies: Mapping[str, str]) -> None:
        """Ends the session of these cookies."""
        token = _token(cookies)
        if token:
            digest = _digest(token)
            self._database.write(
                lambda connection: connection.execute(delete(session).where(session.c.digest == digest)) and None
            )

    def has_cookie(self, cookies: Mapping[str, str]) -> bool:
        """Whether find() would read the database."""
        return bool(_token(cookies))

    def find(self, cookies: Mapping[str, str]) -> Session | None:
        """The session of these cookies. Only a request that carries our cookie costs a database read.

        The session's key is looked up each time. Deleting sessions when a key is revoked would miss a login that is
        under way at that moment, and a key that expires.
        """
        token = _token(cookies)
        if not token:
            return None
        now = self._clock()
        key_holds = api_key.c.revoked.is_(None) & or_(api_key.c.expires.is_(None), api_key.c.expires > now)
        found = (
            select(session.c.scope, api_key.c.name, api_key.c.id)
            .outerjoin(api_key, api_key.c.id == session.c.key)
            .where(session.c.digest == _digest(token), session.c.expires > now)
            .where(session.c.key.is_(None) | (api_key.c.id.is_not(None) & key_holds))
        )
        with self._database.read() as connection:
            row = connection.execute(found).first()
        if row is None:
            return None
        return Session(row.scope, row.name or (f"key {row.id}" if row.id else ""))

    def set_cookie(self, response: Response, token: str, connection: HTTPConnection) -> None:
        secure = connection.url.scheme in ("https", "wss")
        response.set_cookie(
            _SECURE_COOKIE if secure else _PLAIN_COOKIE, token, max_age=int(_SESSION_S), path="/", secure=secure, httponly=True,
            samesite="lax",
        )  # fmt: skip

    def clear_cookie(self, response: Response) -> None:
        response.delete_cookie(_PLAIN_COOKIE, path="/", httponly=True, samesite="lax")
        response.delete_cookie(_SECURE_COOKIE, path="/", secure=True, httponly=True, samesite="lax")


def _token(cookies: Mapping[str, str]) -> str | None:
    return cookies.get(_SECURE_COOKIE) or cookies.get(_PLAIN_COOKIE)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
