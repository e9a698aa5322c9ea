"""Users: people with a name, who log in with a password or at an identity provider, and have a role in some projects or
in all. What is true of a user is read from the database each time, so that every server agrees at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from perfagent_server.database import Database
from perfagent_server.security.rights import Rights, rights_of_roles
from perfagent_server.store.changes import note_change
from perfagent_server.store.tables import account, account_role, session

__all__ = ["Account", "Accounts", "NameTaken", "RoleIn", "folded", "role_rows", "why_no_name"]

Also = Callable[[Connection], object]
RoleIn = tuple[str | None, str]
"""(project, role); None: in all projects."""


class NameTaken(Exception):  # noqa: N818 - the route's word for it
    """There is a user of this name already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """password: its hash; None: the user signs in at the identity provider `issuer`. epoch: a session of an older one is
    over. Times are Unix seconds."""

    id: str
    name: str
    password: str | None
    issuer: str | None
    epoch: int
    created: float
    disabled: float | None
    used: float | None
    roles: tuple[RoleIn, ...]

    @property
    def login(self) -> str:
        """The user's kind of login: "password", "provider" (an identity provider) or "none"."""
        return "provider" if self.issuer is not None else "none" if self.password is None else "password"

    @property
    def rights(self) -> Rights:
        return rights_of_roles(self.roles)


def folded(name: str) -> str:
    """Names differ by more than their case."""
    return name.strip().casefold()


def why_no_name(name: str) -> str | None:
    """Why this may not be the name of a user; None: it may."""
    if not 1 <= len(folded(name)) <= 128 or not name.isprintable() or "/" in name or "\ufffd" in name:
        return f"the name is {name[:80]!r}; 1 to 128 printable characters without a slash are allowed"
    return None


class Accounts:
    """The users of this server. Each change ends or changes the sessions of the user in the same transaction. also: runs in
    it, too (the audit log). Changes are essential writes: a user can be shut out while the disk is full."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    # --- read ---------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Account | None:
        return self._one(account.c.folded == folded(name))

    def by_id(self, ident: str) -> Account | None:
        return self._one(account.c.id == ident)

    def by_subject(self, issuer: str, subject: str) -> Account | None:
        """The user of an identity provider."""
        return self._one((account.c.issuer == issuer) & (account.c.subject == subject))

    def everyone(self) -> list[Account]:
        """All, by name."""
        with self._database.read() as connection:
            rows = connection.execute(select(account).order_by(account.c.folded)).mappings().all()
            roles: dict[str, list[Any]] = {}
            for one in connection.execute(select(account_role).order_by(account_role.c.project)):
                roles.setdefault(one.account, []).append(one)
        return [_account(row, roles.get(row["id"], [])) for row in rows]

    def exist(self) -> bool:
        with self._database.read() as connection:
            return connection.execute(select(account.c.id).limit(1)).first() is not None

    def _one(self, condition: Any) -> Account | None:
        with self._database.read() as connection:
            row = connection.execute(select(account).where(condition)).mappings().first()
            if row is None:
                return None
            its = select(account_role).where(account_role.c.account == row["id"]).order_by(account_role.c.project)
            return _account(row, connection.execute(its).all())

    # --- change -------------------------------------------------------------------------------------------------------

    def add(
        self, name: str, password: str | None, roles: Sequence[RoleIn], *, issuer: str | None = None,
        subject: str | None = None, also: Also | None = None,
    ) -> str:  # fmt: skip
        """The id of a new user. password: its hash. Raises NameTaken."""
        ident = secrets.token_hex(8)
        values = {
            "id": ident, "name": name.strip(), "folded": folded(name), "password": password, "issuer": issuer,
            "subject": subject, "epoch": 0, "created": self._clock(),
        }  # fmt: skip

        def job(connection: Connection) -> None:
            if connection.execute(select(account.c.id).where(account.c.folded == folded(name))).first():
                raise NameTaken(name)
            connection.execute(insert(account).values(**values))
            _write_roles(connection, ident, roles)
            if also:
                also(connection)

        try:
            self._database.write(job)
        except IntegrityError as error:  # another server was faster
            raise NameTaken(name) from error
        return ident

    def change(
        self, ident: str, *, password: str | None = None, roles: Sequence[RoleIn] | None = None,
        disabled: bool | None = None, keep_session: bytes | None = None, also: Also | None = None,
    ) -> bool:  # fmt: skip
        """Changes what is not None; False where there is no such user. A new password (its hash) and disabling end all
        sessions of the user, but for keep_session; roles count for them at once."""

        def job(connection: Connection) -> bool:
            known = connection.execute(select(account.c.epoch).where(account.c.id == ident)).first()
            if known is None:
                return False
            values: dict[str, Any] = {}
            if password is not None:
                values["password"] = password
            if disabled is not None:
                values["disabled"] = self._clock() if disabled else None
            if values:
                # A login that is under way has seen the old epoch: its session is over before it begins.
                connection.execute(update(account).where(account.c.id == ident).values(**values, epoch=known.epoch + 1))
                its = session.c.account == ident
                connection.execute(delete(session).where(its & (session.c.digest != (keep_session or b""))))
                connection.execute(update(session).where(its).values(epoch=known.epoch + 1))
            if roles is not None:
                connection.execute(delete(account_role).where(account_role.c.account == ident))
                _write_roles(connection, ident, roles)
            note_change(connection, "session", ident)
            if also:
                also(connection)
            return True

        return self._database.write(job, essential=True)

    def remove(self, ident: str, *, also: Also | None = None) -> bool:
        """False where there is no such user. What people did stays under their name."""

        def job(connection: Connection) -> bool:
            connection.execute(delete(session).where(session.c.account == ident))
            note_change(connection, "session", ident)
            connection.execute(delete(account_role).where(account_role.c.account == ident))
            gone = connection.execute(delete(account).where(account.c.id == ident)).rowcount == 1
            if gone and also:
                also(connection)
            return gone

        return self._database.write(job, essential=True)


def role_rows(connection: Connection, ident: str) -> list[RoleIn]:
    """The roles of a user, in a transaction that is open already."""
    rows = connection.execute(
        select(account_role.c.project, account_role.c.role).where(account_role.c.account == ident)
    )
    return [(row.project or None, row.role) for row in rows]


def _write_roles(connection: Connection, ident: str, roles: Sequence[RoleIn]) -> None:
    for project, role in dict(roles).items():
        connection.execute(insert(account_role).values(account=ident, project=project or "", role=role))


def _account(row: Mapping[Any, Any], roles: Sequence[Any]) -> Account:
    return Account(
        id=row["id"], name=row["name"], password=row["password"], issuer=row["issuer"], epoch=row["epoch"],
        created=row["created"], disabled=row["disabled"], used=row["used"],
        roles=tuple((one.project or None, one.role) for one in roles),
    )  # fmt: skip
