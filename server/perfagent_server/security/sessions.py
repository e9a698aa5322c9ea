"""Sessions of browsers, and the one-time addresses that open them.

A session is a random id in an HttpOnly, SameSite=Lax cookie; the server keeps its SHA-256. A one-time address is good
for one use within a day. A session that a key opened ends with that key. A user's has the roles that the user has now,
and ends when the user is disabled, is removed, or has a new password.

All writes are essential: people must get in to a server whose disk is full, to free some space.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, or_, select, update
from sqlalchemy.engine import Connection
from starlette.requests import HTTPConnection
from starlette.responses import Response

from perfagent_server.security.access import ADMIN_TOKEN, address_of, is_over_https
from perfagent_server.security.accounts import Account, role_rows
from perfagent_server.security.rights import Identity, rights_of_roles, rights_of_scope
from perfagent_server.store.changes import note_change
from perfagent_server.store.tables import account, api_key, login_link, session

if TYPE_CHECKING:
    from perfagent_server.database import Database

__all__ = ["Session", "Sessions"]

_SESSION_S = 30 * 86400.0
_PROVIDER_SESSION_S = 12 * 3600.0
"""Lifetime of a session that was opened through an identity provider: a working day. The provider does not tell us when
somebody leaves."""
_LINK_S = 86400.0
# Browsers refuse a `__Host-` cookie unless it is Secure, for the whole host and set over https: no other site can plant
# one.
_SECURE_COOKIE = "__Host-perfagent"
_PLAIN_COOKIE = "perfagent_session"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One of a user's. id: for its user only; it opens nothing. origin: the address that opened it; agent: the browser's
    User-Agent. Times are Unix seconds."""

    id: str
    created: float
    expires: float
    origin: str
    agent: str
    current: bool


class Sessions:
    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    # --- one-time addresses -------------------------------------------------------------------------------------------

    def issue_link(self, scope: str = "admin") -> str:
        """A token for /login?token=..., good for one use."""
        token, now = secrets.token_urlsafe(32), self._clock()

        def job(connection: Connection) -> None:
            connection.execute(delete(login_link).where(login_link.c.expires < now))
            connection.execute(insert(login_link).values(digest=_digest(token), scope=scope, expires=now + _LINK_S))

        self._database.write(job, essential=True)
        return token

    def redeem(self, token: str) -> str | None:
        """The scope that a one-time token gives, None when it is unknown, used or too old."""
        its = login_link.c.digest == _digest(token)
        with self._database.read() as connection:  # a guess costs no write
            row = connection.execute(select(login_link.c.scope, login_link.c.expires).where(its)).first()
        if row is None or row.expires <= self._clock():
            return None

        def job(connection: Connection) -> bool:
            return connection.execute(delete(login_link).where(its)).rowcount == 1

        taken = self._database.write(job, essential=True)
        return str(row.scope) if taken else None

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(
        self, connection: HTTPConnection, *, scope: str = "", key: str | None = None, user: Account | None = None,
        also: Callable[[Connection], object] | None = None,
    ) -> str:  # fmt: skip
        """The id of a new session, for the cookie: of the scope of a key (whose id is `key`) or of the admin token, or of a
        user, as it was when the password was compared."""
        token, now = secrets.token_urlsafe(32), self._clock()
        lasts_s = _PROVIDER_SESSION_S if user is not None and user.issuer is not None else _SESSION_S
        values = {
            "digest": _digest(token), "scope": scope, "created": now, "expires": now + lasts_s, "key": key,
            "account": user and user.id, "epoch": user.epoch if user else 0, "origin": address_of(connection)[:128],
            "agent": connection.headers.get("user-agent", "")[:256],
        }  # fmt: skip

        def job(database: Connection) -> None:
            database.execute(delete(session).where(session.c.expires < now))
            database.execute(insert(session).values(**values))
            if user is not None:
                database.execute(update(account).where(account.c.id == user.id).values(used=now))
            if also:
                also(database)

        self._database.write(job, essential=True)
        return token

    def close(self, cookies: Mapping[str, str], *, also: Callable[[Connection], object] | None = None) -> None:
        """Ends the session of these cookies. also: runs in the same transaction, if there was one."""
        digest = self.digest(cookies)
        if digest is None:
            return
        its = session.c.digest == digest
        with self._database.read() as connection:  # a stranger's cookie costs no write
            if connection.execute(select(session.c.digest).where(its)).first() is None:
                return

        def job(connection: Connection) -> None:
            if connection.execute(delete(session).where(its)).rowcount:
                note_change(connection, "session")
                if also:
                    also(connection)

        self._database.write(job, essential=True)

    def has_cookie(self, cookies: Mapping[str, str]) -> bool:
        """Whether find() would read the database."""
        return bool(_token(cookies))

    def find(self, cookies: Mapping[str, str]) -> Identity | None:
        """Whose session these cookies name. Only a request that carries our cookie costs a database read.

        The session's key, or its user, is looked up each time. Deleting sessions when a key is revoked would miss a login
        that is under way at that moment, and a key that expires.
        """
        token = _token(cookies)
        if not token:
            return None
        now = self._clock()
        key_holds = api_key.c.revoked.is_(None) & or_(api_key.c.expires.is_(None), api_key.c.expires > now)
        user_holds = account.c.disabled.is_(None) & (account.c.epoch == session.c.epoch)
        found = (
            select(
                session.c.scope, api_key.c.name, api_key.c.id.label("key"), api_key.c.project,
                account.c.id.label("user"), account.c.name.label("user_name"),
            )
            .outerjoin(api_key, api_key.c.id == session.c.key)
            .outerjoin(account, account.c.id == session.c.account)
            .where(session.c.digest == _digest(token), session.c.expires > now)
            .where(session.c.key.is_(None) | (api_key.c.id.is_not(None) & key_holds))
            .where(session.c.account.is_(None) | (account.c.id.is_not(None) & user_holds))
        )  # fmt: skip
        with self._database.read() as connection:
            row = connection.execute(found).first()
            roles = role_rows(connection, row.user) if row is not None and row.user else []
        if row is None:
            return None
        if row.user:
            return Identity(f"user {row.user_name}", rights_of_roles(roles), name=row.user_name, user=row.user)
        if row.key:
            rights = rights_of_scope(row.scope, row.project)
            return Identity(f"key {row.key}", rights, row.project, row.name or f"key {row.key}")
        return ADMIN_TOKEN

    def of_user(self, user: str, cookies: Mapping[str, str]) -> list[Session]:
        """All of a user's, newest first. cookies: of who asks; one of them is `current`."""
        present = self.digest(cookies)
        query = select(session).join(account, account.c.id == session.c.account).order_by(session.c.created.desc())
        its = query.where(
            session.c.account == user, session.c.expires > self._clock(), session.c.epoch == account.c.epoch
        )
        with self._database.read() as connection:
            rows = connection.execute(its).all()
        return [
            Session(
                id=_shown(row.digest), created=row.created, expires=row.expires, origin=row.origin, agent=row.agent,
                current=row.digest == present,
            )
            for row in rows
        ]  # fmt: skip

    def end(self, user: str, ident: str, *, also: Callable[[Connection], object]) -> bool:
        """Ends a session of a user; False where there is none of this id."""

        def job(connection: Connection) -> bool:
            digests = connection.execute(select(session.c.digest).where(session.c.account == user)).scalars()
            wanted = [digest for digest in digests if _shown(digest) == ident]
            if not wanted:
                return False
            connection.execute(delete(session).where(session.c.digest.in_(wanted)))
            note_change(connection, "session", user)
            also(connection)
            return True

        return self._database.write(job, essential=True)

    @staticmethod
    def digest(cookies: Mapping[str, str]) -> bytes | None:
        """Under which the session of these cookies is kept."""
        token = _token(cookies)
        return _digest(token) if token else None

    def set_cookie(self, response: Response, token: str, connection: HTTPConnection) -> None:
        secure = is_over_https(connection)
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


def _shown(digest: bytes) -> str:
    return digest.hex()[:16]
