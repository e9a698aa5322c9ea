"""What somebody may do, and in which projects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

__all__ = ["NO_RIGHTS", "ROLES", "SCOPES", "Identity", "Rights", "Role", "Scope", "rights_of_roles", "rights_of_scope"]

Scope = Literal["read", "ingest", "operate", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)

_OF_KEY: dict[str, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "ingest": frozenset({"ingest"}),
    "operate": frozenset({"read", "operate"}),
    "admin": frozenset(SCOPES),
}
_OF_ROLE: dict[str, frozenset[Scope]] = {
    "viewer": frozenset({"read"}),
    "operator": frozenset({"read", "operate"}),
    "admin": frozenset({"read", "operate", "admin"}),
}


@dataclass(frozen=True, slots=True)
class Rights:
    """everywhere: in all projects, and on the server itself; by_project: beyond these, in one project."""

    everywhere: frozenset[Scope] = frozenset()
    by_project: Mapping[str, frozenset[Scope]] = field(default_factory=dict)

    def may(self, scope: Scope, project: str) -> bool:
        return scope in self.everywhere or scope in self.by_project.get(project, ())

    @property
    def scopes(self) -> frozenset[Scope]:
        """Those of any project."""
        return self.everywhere.union(*self.by_project.values())

    def projects(self, scope: Scope) -> frozenset[str] | None:
        """Those in which it may do this; None: in all."""
        if scope in self.everywhere:
            return None
        return frozenset(project for project, scopes in self.by_project.items() if scope in scopes)


NO_RIGHTS = Rights()


def rights_of_scope(scope: str, project: str | None) -> Rights:
    """Those of a key."""
    return Rights(_OF_KEY[scope]) if project is None else Rights(by_project={project: _OF_KEY[scope]})


def rights_of_roles(roles: Iterable[tuple[str | None, str]]) -> Rights:
    """Those of a user: (project, role), None for all projects. Who administers all projects may send samples, too."""
    everywhere: frozenset[Scope] = frozenset()
    by_project: dict[str, frozenset[Scope]] = {}
    for project, role in roles:
        if project is None:
            everywhere |= _OF_KEY["admin"] if role == "admin" else _OF_ROLE[role]
        else:
            by_project[project] = by_project.get(project, frozenset()) | _OF_ROLE[role]
    return Rights(everywhere, by_project)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. who: for the audit log ("user ada", "key 1a2b3c4d", "admin token", "anyone"); name: as people call them, on
    what they do with alerts: the name of the user or the key, "local" on a loopback without keys; project: the only one
    that a key may send to, None for any; user: the id of the user who is logged in; has_key: whether it came with an API
    key; limits: what that key has of its own (limits.py)."""

    who: str
    rights: Rights = NO_RIGHTS
    project: str | None = None
    name: str = ""
    user: str | None = None
    has_key: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def may(self) -> frozenset[Scope]:
        """What it may do in one project or more."""
        return self.rights.scopes

    def sees(self, project: str) -> bool:
        return self.rights.may("read", project)

    @property
    def seen_projects(self) -> frozenset[str] | None:
        """The projects whose runs it may read; None: all."""
        return self.rights.projects("read")
