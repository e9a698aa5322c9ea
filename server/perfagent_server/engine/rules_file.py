"""Reads `rules.toml`: thresholds of rules, and alerts that users define. `perfagent diagnose` reads it as well, so nothing here
needs a database."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfagent.errors import ConfigError
from perfagent_server.rules.catalogue import Overrides, all_rules, overridden
from perfagent_server.rules.own_alert import OwnAlert, own_alert
from perfagent_server.rules.rule import Rule

__all__ = ["ALL_PROJECTS", "MOST_ALERTS", "RulesFile", "checked", "read_rules_file"]

ALL_PROJECTS = ""
MOST_ALERTS = 100
"""Of one project, and of all projects."""


class RulesFile(dict[str, Overrides]):
    """Project -> rule -> settings; "" is all projects. alerts: that users made."""

    alerts: Sequence[OwnAlert] = ()


def read_rules_file(file: Path) -> RulesFile:
    """A file that is not there sets nothing. Raises ConfigError."""
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        return RulesFile()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no TOML: it is not UTF-8 ({error})") from error
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no TOML: {error}") from error
    projects, alerts = found.pop("projects", {}), found.pop("alerts", [])
    if not isinstance(projects, dict):
        raise ConfigError(f"{file}: `projects` must be tables of rules, such as [projects.NAME.loss_spike]")
    try:
        read = RulesFile({ALL_PROJECTS: checked(found), **{name: checked(rules) for name, rules in projects.items()}})
        read.alerts = alerts_of_file(alerts)
        return read
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def checked(rules: Any) -> Overrides:
    """The settings, if every rule and threshold in them exists."""
    if not isinstance(rules, Mapping):
        raise ConfigError(f"expected tables of rules, such as [loss_spike], not {rules!r:.80}")
    known = {rule.id: rule for rule in all_rules()}
    for name, settings in rules.items():
        if name not in known:
            raise ConfigError(f"there is no rule {name!r:.80}; there are {', '.join(known)}")
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{name} must be a table of settings, not {settings!r:.80}")
        rest = dict(settings)
        for switch in ("enabled", "stop"):
            if not isinstance(rest.pop(switch, True), bool):
                raise ConfigError(f"{name}.{switch} must be true or false, not {settings[switch]!r:.80}")
        _check_profile(known[name], rest.pop("profile", False))
        overridden(known[name], rest)
    return rules


def _check_profile(rule: Rule, switch: Any) -> None:
    if not isinstance(switch, bool):
        raise ConfigError(f"{rule.id}.profile must be true or false, not {switch!r:.80}")
    if switch and not rule.profile_helps:
        helped = ", ".join(one.id for one in all_rules() if one.profile_helps)
        raise ConfigError(
            f"{rule.id}.profile cannot be true: a profile of some steps does not show what this rule is about; it does "
            f"for {helped}"
        )


def alerts_of_file(tables: Any) -> list[OwnAlert]:
    """`[[alerts]]` of rules.toml. Raises ConfigError."""
    if not isinstance(tables, list):
        raise ConfigError("`alerts` must be a list of tables: each begins with [[alerts]]")
    found: dict[tuple[str, str], OwnAlert] = {}
    for number, form in enumerate(tables, 1):
        try:
            alert = own_alert(form)
        except ConfigError as error:
            raise ConfigError(f"alerts, the one with number {number}: {error}") from error
        key = alert.project, alert.name
        if key in found:
            raise ConfigError(f"there are two alerts {alert.name!r}")
        found[key] = alert
        if sum(1 for project, _ in found if project == alert.project) > MOST_ALERTS:
            raise ConfigError(f"there are more than {MOST_ALERTS} alerts of a project")
    return [*found.values()]
