"""The rules of each project: their own thresholds, then `rules.toml` of the data folder, then what was set by API.

One function of project and run (`plan_of`) gives the rules that judge, to the engine, the verdict and the API alike.

The file is read at the start, and refused with what is wrong in it. The table is read leniently: what it says of a rule or
a threshold that this version does not have, or a value that is none, is left out, logged once, and shown as ignored.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, select

from perfagent.errors import ConfigError
from perfagent_server.database import Database
from perfagent_server.engine.own_alerts import OwnAlerts
from perfagent_server.engine.rules_file import ALL_PROJECTS, checked, read_rules_file
from perfagent_server.rules.catalogue import Configured, Overrides, all_rules, rules_for, with_overrides
from perfagent_server.rules.plan import Plan
from perfagent_server.store.changes import note_change
from perfagent_server.store.statements import put
from perfagent_server.store.tables import rule_setting

__all__ = ["RULES_FILE", "Ignored", "RuleSettings"]

log = logging.getLogger("perfagent.server")

RULES_FILE = "rules.toml"
_MOST_PLANS = 1000  # that are kept; another project's is made when it is asked for


@dataclass(frozen=True, slots=True)
class Ignored:
    """A stored setting that does not count. setting: empty for all of the rule's; project: empty for all projects."""

    project: str
    rule: str
    setting: str
    why: str


class RuleSettings:
    """file: rules.toml. Raises ConfigError when it is not what it should be. own: the alerts that users made."""

    def __init__(self, database: Database, file: Path) -> None:
        self._database = database
        self._of_file = read_rules_file(file)
        self.own = OwnAlerts(database, self._of_file.alerts)
        self._lock = threading.Lock()
        self._of_api: dict[str, dict[str, dict[str, Any]]] = {}  # project -> rule -> settings
        self._plans: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Plan] = {}
        self._ignored: list[Ignored] = []
        self._load()

    def plan_of(self, project: str, off: Sequence[str] = (), tags: Sequence[str] = ()) -> Plan:
        """The rules that judge a run of this project, users' own alerts last. off: those that are switched off for the
        run."""
        with self._lock:
            own = [one for one in self.own.of_run(project, tags) if one.id not in off]
            key = project, tuple(sorted(off)), tuple(one.id for one in own)
            if key not in self._plans:
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                self._plans[key] = Plan([*rules_for(*self._overrides(project), off=off), *own])
            return self._plans[key]

    def rules_of(self, project: str) -> list[Configured]:
        """Every rule as it is set for this project."""
        with self._lock:
            overrides = self._overrides(project)
        return [with_overrides(rule, overrides) for rule in all_rules()]

    def ignored(self, project: str) -> list[Ignored]:
        """What is stored for this project, or for all, and does not count."""
        own = [Ignored(one.project, one.name, "", one.why) for one in self.own.unreadable]
        return [one for one in (*self._ignored, *own) if one.project in (ALL_PROJECTS, project)]

    def takes_profile(self, project: str, rule: str) -> bool:
        """Whether an alert of this rule has a run of this project profiled."""
        return self._is_on(project, rule, "profile")

    def stops(self, project: str, rule: str) -> bool:
        """Whether an alert of this rule, or a user's own, stops a run of this project."""
        own = (one.alert.stop for one in self.own.known([project]) if one.alert.id == rule)
        return self._is_on(project, rule, "stop") or any(own)

    def _is_on(self, project: str, rule: str, switch: str) -> bool:
        with self._lock:
            given = [one.get(rule, {}).get(switch) for one in self._overrides(project)]
        return bool(next((is_on for is_on in reversed(given) if is_on is not None), False))

    def check(self, rule: str, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError for a rule or a setting that there is not."""
        checked({rule: settings})

    def put(self, connection: Connection, project: str, rule: str, settings: Mapping[str, Any]) -> None:
        """Sets a rule for a project, or for all (""), in the caller's transaction; call changed() behind it."""
        self.check(rule, settings)
        put(connection, rule_setting, {"project": project, "rule": rule, "settings": json.dumps(dict(settings))})
        note_change(connection, "rules")

    def drop(self, connection: Connection, project: str, rule: str) -> bool:
        """Takes back what was set by API; whether there was anything. Call changed() behind it."""
        its = (rule_setting.c.project == project) & (rule_setting.c.rule == rule)
        note_change(connection, "rules")
        return bool(connection.execute(delete(rule_setting).where(its)).rowcount)

    def changed(self) -> None:
        """Reads the table anew; plans are made anew when they are asked for."""
        self._load()

    def _load(self) -> None:
        with self._database.read() as connection:
            rows = connection.execute(select(rule_setting)).all()
        found: dict[str, dict[str, dict[str, Any]]] = {}
        ignored: list[Ignored] = []
        for row in rows:
            settings, reasons = _readable(row.rule, row.settings)
            found.setdefault(row.project, {})[row.rule] = settings
            ignored += [Ignored(row.project, row.rule, setting, why) for setting, why in reasons.items()]
        self.own.load()
        with self._lock:
            new = [one for one in ignored if one not in self._ignored]
            self._of_api, self._ignored = found, ignored
            self._plans.clear()
        for one in new:
            whose = f"project {one.project!r}" if one.project else "all projects"
            log.warning("a stored setting of %s is ignored: %s", whose, one.why)

    def _overrides(self, project: str) -> list[Overrides]:
        """From the weakest to the strongest."""
        return [
            self._of_file.get(ALL_PROJECTS, {}),
            self._of_api.get(ALL_PROJECTS, {}),
            self._of_file.get(project, {}) if project else {},
            self._of_api.get(project, {}) if project else {},
        ]


def _readable(rule: str, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The stored settings of a rule that count, and why each of the others does not."""
    try:
        settings = json.loads(text)
        checked({rule: settings if not isinstance(settings, dict) else {}})
    except ConfigError as error:
        return {}, {"": str(error)}
    except (ValueError, RecursionError) as error:
        return {}, {"": f"{rule}: this is no JSON ({error})"[:200]}
    counts: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for name, value in settings.items():
        try:
            checked({rule: {name: value}})
            counts[name] = value
        except ConfigError as error:
            ignored[name] = str(error)
    return counts, ignored
