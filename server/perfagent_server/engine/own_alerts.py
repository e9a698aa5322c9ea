"""The alerts that users made themselves: of `rules.toml` and of the table, by project.

Of two of one name the project's own counts, and not that of all projects; of one project's that of the file, which no
API changes. Call load() behind each change.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, delete, select

from perfagent.errors import ConfigError
from perfagent_server.database import Database
from perfagent_server.engine.rules_file import MOST_ALERTS
from perfagent_server.rules.own_alert import OwnAlert, own_alert
from perfagent_server.store.changes import note_change
from perfagent_server.store.statements import put
from perfagent_server.store.tables import own_alert as table

__all__ = ["CannotChangeError", "Known", "OwnAlerts"]


class CannotChangeError(Exception):
    """code: of an answer, "conflict" or "too_many"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Known(NamedTuple):
    """An alert that there is. from_file: it stands in rules.toml."""

    alert: OwnAlert
    from_file: bool


@dataclass(frozen=True, slots=True)
class _Unreadable:
    project: str
    name: str
    why: str


class OwnAlerts:
    def __init__(self, database: Database, of_file: Sequence[OwnAlert]) -> None:
        self._database = database
        self._of_file = {(one.project, one.name): one for one in of_file}
        self._of_table: dict[tuple[str, str], OwnAlert] = {}
        self._judging: dict[str, list[OwnAlert]] = {}  # project -> those of its runs
        self.unreadable: list[_Unreadable] = []

    def load(self) -> None:
        with self._database.read() as connection:
            rows = connection.execute(select(table).order_by(table.c.project, table.c.name)).all()
        found, unreadable = {}, []
        for row in rows:
            try:
                found[row.project, row.name] = own_alert(json.loads(row.form))
            except (ConfigError, ValueError, RecursionError) as error:
                unreadable.append(_Unreadable(row.project, row.name, f"the alert {row.name} cannot be read: {error}"))
        self._of_table, self.unreadable = found, unreadable
        self._judging = {}  # a new one: who is still reading the old table fills the old one

    def known(self, projects: Container[str] | None) -> list[Known]:
        """Those of all projects, and of these; None: of each."""
        mine = [
            Known(one, from_file)
            for one, from_file in self._all()
            if not one.project or projects is None or one.project in projects
        ]
        return sorted(mine, key=lambda one: (one.alert.project, one.alert.name))

    def ids(self, project: str | None = None) -> list[str]:
        """Of the rules; project: only those that may judge runs of this one."""
        found = {one.id for one, _ in self._all() if project is None or one.project in ("", project)}
        return sorted(found)

    def of_run(self, project: str, tags: Iterable[str]) -> list[OwnAlert]:
        """Those that judge a run of this project with these tags, by name."""
        known, carried = self._judging, set(tags)
        if project not in known:
            by_name = {one.name: one for one, _ in self.known([project])}  # the project's own come last
            known[project] = sorted(by_name.values(), key=lambda one: one.name)
        return [one for one in known[project] if carried.issuperset(one.tags)]

    def put(self, connection: Connection, alert: OwnAlert, *, is_new: bool) -> None:
        """In the caller's transaction. Raises CannotChangeError."""
        self._check_changeable(alert.project, alert.name)
        names = set(connection.execute(select(table.c.name).where(table.c.project == alert.project)).scalars())
        if is_new and alert.name in names:
            raise CannotChangeError("conflict", f"there is an alert {alert.name!r} already; PUT changes it")
        if alert.name not in names and len(names) >= MOST_ALERTS:
            where = f"project {alert.project!r} has" if alert.project else "all projects have"
            raise CannotChangeError("too_many", f"{where} {MOST_ALERTS} alerts, and no more may be; delete some")
        put(connection, table, {"project": alert.project, "name": alert.name, "form": json.dumps(alert.form())})
        note_change(connection, "rules")

    def drop(self, connection: Connection, project: str, name: str) -> bool:
        """Whether there was one. In the caller's transaction. Raises CannotChangeError."""
        self._check_changeable(project, name)
        note_change(connection, "rules")
        its = (table.c.project == project) & (table.c.name == name)
        return bool(connection.execute(delete(table).where(its)).rowcount)

    def _check_changeable(self, project: str, name: str) -> None:
        if (project, name) in self._of_file:
            raise CannotChangeError(
                "conflict", f"the alert {name!r} stands in rules.toml: change it there, and restart"
            )

    def _all(self) -> list[tuple[OwnAlert, bool]]:
        of_table = [(one, False) for key, one in self._of_table.items() if key not in self._of_file]
        return [*((one, True) for one in self._of_file.values()), *of_table]
