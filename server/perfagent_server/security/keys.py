"""API keys and the two secrets in the data folder: the admin token and the pepper.

A key is `pfa_<scope>_<8 id>_<43 base62>`: 256 random bits, of which the server keeps only an HMAC-SHA256 with its
pepper, found by the id and compared in constant time. A slow password hash would be wrong here: the secret cannot be
guessed, and argon2 would cost 0.75 s on each of a thousand requests a second (HMAC: 8 µs).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import string
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from sqlalchemy import insert, select, update
from sqlalchemy.engine import Connection

from perfagent.errors import ResourceError
from perfagent_server.limits import LIMITS
from perfagent_server.store.changes import note_change
from perfagent_server.store.stored_json import stored_object
from perfagent_server.store.tables import api_key

if TYPE_CHECKING:
    from perfagent_server.database import Database

__all__ = [
    "KEY_SCOPES",
    "PEPPER_FILE",
    "Key",
    "KeyScope",
    "Keys",
    "is_shaped_like_key",
    "secret_file",
]

KeyScope = Literal["ingest", "read", "operate", "admin"]
KEY_SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
PEPPER_FILE = "key-pepper"

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_ID_LENGTH = 8
_SECRET_LENGTH = 43  # 43 * log2(62) = 256.03 bits
_RELOAD_S = 10.0  # how long another process's revocation may take to be seen here
_USED_S = 60.0  # how exact `used` is: one write a minute and key, whatever the traffic


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secret. Times are Unix seconds; limits: its own, by name (limits.py), instead of the server's."""

    id: str
    scope: KeyScope
    name: str
    project: str | None
    created: float
    expires: float | None
    revoked: float | None
    used: float | None
    limits: Mapping[str, float] = field(default_factory=dict)


def secret_file(path: Path) -> str:
    """The secret in a file that only its owner can read; made at the first start. Raises ResourceError if others can
    read it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise ResourceError(
                f"{path} can be read by others; run `chmod 600 {path}`, or delete it to have a new one made"
            ) from None
        text = path.read_text().strip()
        if len(text) < 16:
            raise ResourceError(f"{path} holds no usable secret; delete it to have a new one made") from None
        return text
    with os.fdopen(descriptor, "w") as file:
        text = secrets.token_urlsafe(32)
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    return text


class Keys:
    """The keys of this server. `find` is on the path of every request: no database read for a key that was seen
    lately."""

    def __init__(self, database: Database, pepper: str, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._pepper, self._clock = database, pepper.encode(), clock
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._changes = 0  # here or elsewhere, which what is being read may lack
        self._known: dict[str, tuple[Key, bytes]] = {}
        self._loaded = -_RELOAD_S
        self._read()

    def create(
        self, scope: KeyScope, name: str = "", *, project: str | None = None, expires: float | None = None,
        limits: Mapping[str, float] | None = None, also: Callable[[Connection], object] | None = None,
    ) -> tuple[Key, str]:  # fmt: skip
        """A new key and its token, which is shown this once. also: runs in the same transaction (the audit log)."""
        identifier, secret = _random(_ID_LENGTH), _random(_SECRET_LENGTH)
        key = Key(identifier, scope, name, project, self._clock(), expires, None, None, dict(limits or {}))
        digest = self._digest(secret)

        def job(connection: Connection) -> None:
            connection.execute(
                insert(api_key).values(
                    id=key.id,
                    scope=scope,
                    digest=digest,
                    name=name,
                    project=project,
                    created=key.created,
                    expires=expires,
                    limits=json.dumps(key.limits) if key.limits else None,
                )
            )
            note_change(connection, "key")
            if also:
                also(connection)

        self._database.write(job)
        with self._lock:
            self._changes += 1
            self._known[key.id] = (key, digest)
        return key, f"pfa_{scope}_{identifier}_{secret}"

    def list(self) -> list[Key]:
        """Every key, also revoked and expired ones, newest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(api_key).order_by(api_key.c.created.desc(), api_key.c.id)).mappings().all()
        return [_key(row) for row in rows]

    def revoke(self, identifier: str, *, also: Callable[[Connection], object] | None = None) -> bool:
        """False when there is no such key. Revoking twice keeps the first time."""
        now = self._clock()

        def job(connection: Connection) -> bool:
            exists = connection.execute(select(api_key.c.id).where(api_key.c.id == identifier)).first() is not None
            connection.execute(
                update(api_key).where(api_key.c.id == identifier, api_key.c.revoked.is_(None)).values(revoked=now)
            )
            if exists:
                note_change(connection, "key", identifier)
                if also:
                    also(connection)
            return exists

        exists = self._database.write(job, essential=True)  # a leaked key must be stopped also while the disk is full
        self._replace(identifier, revoked=now)
        return exists

    def set_limits(
        self, identifier: str, limits: Mapping[str, float], *, also: Callable[[Connection], object] | None = None
    ) -> Key | None:
        """The key with these limits of its own, in place of those that it had; none: the server's. None when there is no
        such key."""
        values = {"limits": json.dumps(dict(limits)) if limits else None}

        def job(connection: Connection) -> Key | None:
            connection.execute(update(api_key).where(api_key.c.id == identifier).values(**values))
            row = connection.execute(select(api_key).where(api_key.c.id == identifier)).mappings().first()
            if row is None:
                return None
            note_change(connection, "key", identifier)
            if also:
                also(connection)
            return _key(row)

        changed = self._database.write(job, essential=True)
        self._replace(identifier, limits=dict(limits))
        return changed

    def changed(self) -> None:
        """Another server has changed a key: the next question reads them again."""
        with self._lock:
            self._changes += 1
            self._loaded = -_RELOAD_S

    def any_valid(self) -> bool:
        """Whether anybody could come in with a key."""
        return any(self._valid(key) for key in self.list())

    def find(self, token: str) -> Key | None:
        """The key of a token, None when it is unknown, revoked or expired."""
        if not is_shaped_like_key(token):
            return None
        _, scope, identifier, secret = token.split("_")
        entry = self._entry(identifier)
        # An unknown id costs the same comparison as a wrong secret, so that time does not tell them apart.
        key, expected = entry if entry is not None else (None, b"\0" * 32)
        same = hmac.compare_digest(self._digest(secret), expected)
        if key is None or not same or key.scope != scope or not self._valid(key):
            return None
        self._note_use(key)
        return key

    def must_load(self, token: str) -> bool:
        """Whether find() would read the database."""
        return is_shaped_like_key(token) and self._is_old()

    def _valid(self, key: Key) -> bool:
        return key.revoked is None and (key.expires is None or self._clock() < key.expires)

    def _entry(self, identifier: str) -> tuple[Key, bytes] | None:
        """A key that is in memory does not wait while another thread reads all keys again; one that is not does."""
        if self._is_old() and self._reading.acquire(blocking=identifier not in self._known):
            try:
                if self._is_old():
                    self._read()
            finally:
                self._reading.release()
        with self._lock:
            return self._known.get(identifier)

    def _is_old(self) -> bool:
        return time.monotonic() - self._loaded >= _RELOAD_S

    def _read(self) -> None:
        while True:
            began, changes = time.monotonic(), self._changes
            with self._database.read() as connection:
                rows = connection.execute(select(api_key)).mappings().all()
            with self._lock:
                if changes == self._changes:
                    self._known = {row["id"]: (_key(row), bytes(row["digest"])) for row in rows}
                    self._loaded = began
                    return

    def _replace(self, identifier: str, **changes: Any) -> None:
        """In the key that is in memory, if it is."""
        with self._lock:
            self._changes += "used" not in changes
            if identifier in self._known:
                key, digest = self._known[identifier]
                self._known[identifier] = (replace(key, **changes), digest)

    def _note_use(self, key: Key) -> None:
        now = self._clock()
        if key.used is not None and now - key.used < _USED_S:
            return
        self._replace(key.id, used=now)
        identifier = key.id

        def job(connection: Connection) -> None:
            connection.execute(update(api_key).where(api_key.c.id == identifier).values(used=now))

        self._database.submit(job)

    def _digest(self, secret: str) -> bytes:
        return hmac.new(self._pepper, secret.encode("utf-8", "replace"), hashlib.sha256).digest()


def is_shaped_like_key(token: str) -> bool:
    parts = token.split("_")
    return len(parts) == 4 and parts[0] == "pfa" and len(parts[2]) == _ID_LENGTH and len(parts[3]) == _SECRET_LENGTH


def _key(row: Any) -> Key:
    return Key(
        row["id"],
        row["scope"],
        row["name"],
        row["project"],
        row["created"],
        row["expires"],
        row["revoked"],
        row["used"],
        _limits(row["limits"]),
    )


def _limits(text: str | None) -> dict[str, float]:
    """Those that this version knows: a newer server may have written others."""
    return {
        name: float(value)
        for name, value in stored_object(text).items()
        if name in LIMITS and isinstance(value, (int, float))
    }


def _random(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))
