"""Which roles the values of a claim give: `ml-admins=admin`, `team-a=operator:project-a`, `*=viewer`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from perfagent.errors import ConfigError
from perfagent_server.security.accounts import RoleIn
from perfagent_server.security.rights import ROLES

__all__ = ["parse_mapping", "roles_given", "values_of_claim"]

Mapped = tuple[str, str, str | None]
"""(value of the claim, role, project); "*": every value, and none; None: all projects."""


def parse_mapping(lines: Sequence[str]) -> list[Mapped]:
    """Raises ConfigError."""
    return [_parse(line) for line in lines]


def _parse(line: str) -> Mapped:
    value, separator, given = line.rpartition("=")
    role, _, project = given.partition(":")
    if not separator or not value.strip() or role.strip() not in ROLES:
        raise ConfigError(
            f"oidc_roles has {line!r}; give VALUE=ROLE or VALUE=ROLE:PROJECT, separated by commas, "
            f"with a role of {', '.join(ROLES)}"
        )
    return value.strip(), role.strip(), project.strip() or None


def roles_given(mapping: Sequence[Mapped], values: Collection[str]) -> list[RoleIn]:
    """For each project, and for all projects, the highest role that one of the values gives."""
    found: dict[str | None, int] = {}
    for value, role, project in mapping:
        if value == "*" or value in values:
            found[project] = max(found.get(project, 0), ROLES.index(role))
    return [(project, ROLES[level]) for project, level in found.items()]


def values_of_claim(claims: Mapping[str, Any], claim: str) -> set[str] | None:
    """The texts of a claim, which is a text or a list; a dot leads into an object, as in `realm_access.roles`. None where
    there is no such claim."""
    found: Any = claims.get(claim)
    if found is None and "." in claim:
        found = claims
        for part in claim.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    if found is None:
        return None
    if isinstance(found, str):
        return {found}
    return {one for one in found if isinstance(one, str)} if isinstance(found, list) else set()
