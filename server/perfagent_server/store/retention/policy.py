"""How long what is kept: the settings of the server, and over them what people set for all projects or for one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, select

from perfagent_server.store.statements import put
from perfagent_server.store.stored_json import stored_object
from perfagent_server.store.tables import retention_setting, run

__all__ = [
    "ALL_PROJECTS",
    "DAY_S",
    "FOREVER",
    "KEEP_TAG",
    "LIVE_STATES",
    "PROJECT_FIELDS",
    "Policies",
    "RetentionPolicy",
    "Scope",
    "drop_policy",
    "is_not_kept",
    "set_policy",
    "stored_policies",
]

DAY_S = 86_400.0
ALL_PROJECTS = ""
FOREVER = "forever"
KEEP_TAG = "keep"
"""A run with this tag stays whole, however old it is and however little room there is."""


LIVE_STATES = ("starting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How long is kept. None: for ever.

    samples_days: full resolution, from then on cells of 16 steps; rollup16_days: those cells, from then on 256 steps;
    rollup256_days: those, from then on 4096 steps. Both count from the end of a run, or from its last contact. runs_days:
    runs, from the same moment; events_days: console lines, stacks and other events; profiles_days: profiles with their
    traces; media_days: images, audio, tables and histograms; alerts_days: alerts that are over, after the run was heard of
    last; audit_days: the audit log. max_bytes: of the whole database; of a project where it is set for one.
    """

    samples_days: float | None = None
    rollup16_days: float | None = None
    rollup256_days: float | None = None
    runs_days: float | None = None
    events_days: float | None = None
    profiles_days: float | None = None
    media_days: float | None = None
    alerts_days: float | None = None
    audit_days: float | None = None
    max_bytes: float | None = None
    pause_s: float = 3600.0
    full_pause_s: float = 30.0  # between two rounds while the disk is full


PROJECT_FIELDS = (
    "samples_days",
    "rollup16_days",
    "rollup256_days",
    "runs_days",
    "events_days",
    "profiles_days",
    "media_days",
    "alerts_days",
    "max_bytes",
)
"""What may be set for a project."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The runs of one project, or of all projects but some."""

    project: str | None
    others: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        if self.project is not None:
            return f"project {self.project}"
        return "all other projects" if self.others else "all projects"

    def holds(self) -> ColumnElement[bool]:
        """Of a row of `run` that may lose something."""
        mine = run.c.project.not_in(self.others) if self.project is None else run.c.project == self.project
        return and_(mine, is_not_kept())


def is_not_kept() -> ColumnElement[bool]:
    """Of a row of `run`: it does not have KEEP_TAG. `tags` is a JSON list, in which a quote inside of a tag has a backslash
    before it."""
    return ~func.lower(run.c.tags).contains(f'"{KEEP_TAG}"', autoescape=True)


class Policies:
    """base: of the settings. overrides: what was set over it, by project, ALL_PROJECTS being the default of all."""

    def __init__(self, base: RetentionPolicy, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        self.stored = dict(overrides)
        self.default = _over(base, overrides.get(ALL_PROJECTS, {}))
        self._overrides = {project: one for project, one in overrides.items() if project != ALL_PROJECTS}

    def of(self, project: str) -> RetentionPolicy:
        """max_bytes: that of the project only."""
        return _over(replace(self.default, max_bytes=None), self._overrides.get(project, {}))

    def scopes(self, field: str) -> list[tuple[Scope, float]]:
        """Each group of projects for which `field` is limited, and its value."""
        own = sorted(project for project, one in self._overrides.items() if one.get(field) is not None)
        found = [(Scope(project), getattr(self.of(project), field)) for project in own]
        if field != "max_bytes":
            found.append((Scope(None, tuple(own)), getattr(self.default, field)))
        return [(scope, value) for scope, value in found if value is not None]


def _over(policy: RetentionPolicy, override: Mapping[str, Any]) -> RetentionPolicy:
    given = {name: override[name] for name in PROJECT_FIELDS if override.get(name) is not None}
    changed: dict[str, Any] = {name: None if value == FOREVER else float(value) for name, value in given.items()}
    return replace(policy, **changed)


def stored_policies(connection: Connection) -> dict[str, dict[str, Any]]:
    """By project: a number, FOREVER, or None for what is not set. What cannot be read is kept for ever: nothing is
    deleted for a doubt."""
    rows = connection.execute(select(retention_setting).order_by(retention_setting.c.project)).all()
    return {row.project: _readable(row.settings) for row in rows}


def _readable(text: str) -> dict[str, Any]:
    found = stored_object(text)
    if not found and text != "{}":
        return dict.fromkeys(PROJECT_FIELDS, FOREVER)
    return {name: value if _is_setting(value) else FOREVER for name, value in found.items() if name in PROJECT_FIELDS}


def _is_setting(value: Any) -> bool:
    if value is None or value == FOREVER:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def set_policy(connection: Connection, project: str, settings: Mapping[str, Any]) -> None:
    """Replaces what was set for a project, or for ALL_PROJECTS."""
    given = {name: settings[name] for name in PROJECT_FIELDS if settings.get(name) is not None}
    put(connection, retention_setting, {"project": project, "settings": json.dumps(given)})


def drop_policy(connection: Connection, project: str) -> bool:
    """Whether there was one."""
    its = retention_setting.c.project == project
    return bool(connection.execute(delete(retention_setting).where(its)).rowcount)
