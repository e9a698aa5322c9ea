"""The rules of this server: what they mean, their thresholds, and other thresholds for a project."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from sqlalchemy import Connection
from starlette.responses import Response

from perfagent.errors import ConfigError
from perfagent_server.alerts import quiet
from perfagent_server.engine.rule_settings import Ignored
from perfagent_server.routes.dependencies import Administrator, ProjectAsked, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.rules.catalogue import all_rules, describe
from perfagent_server.runs.outcomes import unsettle
from perfagent_server.security.audit import listed, record
from perfagent_server.services import Services

__all__ = ["router"]

router = APIRouter()


@dataclass
class RuleShown:
    """reads: the series, events and clock that it is judged on; charts: the series on whose charts its alert is marked,
    the first that a run has; profile: its alerts have the run profiled; profile_helps: that may be switched on;
    stop: its alerts stop the run; thresholds, defaults, units, life: by name; words: name, meaning, when it fires and
    remedies by cause ("" is the usual one), in English and Chinese."""

    rule: str
    enabled: bool
    profile: bool
    stop: bool
    profile_helps: bool
    name: str
    description: str
    severities: list[str]
    question: str
    reads: list[str]
    charts: list[str]
    thresholds: dict[str, Any]
    defaults: dict[str, Any]
    units: dict[str, str]
    life: dict[str, Any]
    words: dict[str, Any]


@dataclass
class IgnoredSetting:
    """A stored setting of a rule or a threshold that this version does not have, or with a value that is none. project:
    empty for all; setting: empty for all of the rule's."""

    project: str
    rule: str
    setting: str
    why: str


@dataclass
class RuleList:
    rules: list[RuleShown]
    ignored: list[IgnoredSetting]


@dataclass
class RuleChange:
    """thresholds: those that are not the rule's own; all others are. enabled: false switches the rule off. profile: true
    has the run profiled when an alert of the rule fires, stop: true stops it, where its script allows that; left out,
    what rules.toml says counts."""

    enabled: bool = True
    profile: bool | None = None
    stop: bool | None = None
    thresholds: dict[str, float] = field(default_factory=dict)

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@router.get("/rules", responses={200: {"model": RuleList}})
def list_rules(services: ServicesDep, identity: Reader, project: ProjectAsked = "") -> Response:
    """Every rule, in the order of verdicts. `project`: with the thresholds of this project. `ignored`: stored settings
    that have no effect, and silences that cannot be read.
    """
    if project:
        check_project(identity, "read", project)
    rules = services.rule_settings.rules_of(project)
    with services.database.read() as connection:
        silences = quiet.unreadable_silences(connection)
    why = "its start or its end is no time; delete it with DELETE /api/v1/silences/{id}"
    ignored = [*services.rule_settings.ignored(project), *(Ignored("", "", f"silence {one}", why) for one in silences)]
    return reply({"rules": [describe(one) for one in rules], "ignored": [asdict(one) for one in ignored]})


@router.put("/rules/{rule}", responses={200: {"model": RuleShown}})
def change_rule(
    rule: str, change: RuleChange, request: Request, services: ServicesDep, identity: Administrator,
    project: ProjectAsked = "",
) -> Response:  # fmt: skip
    """Sets a rule for a project; without one, for all projects. It takes effect with the next sample, and overrides
    rules.toml.
    """
    check_project(identity, "admin", project)
    _known(rule)
    settings: dict[str, Any] = {**change.thresholds, "enabled": change.enabled}
    settings |= {name: value for name in ("profile", "stop") if (value := getattr(change, name)) is not None}
    try:
        services.rule_settings.check(rule, settings)
    except ConfigError as error:
        field = "profile" if str(error).startswith(f"{rule}.profile ") else "thresholds"
        raise ApiError(422, "invalid", str(error), field) from error
    audit = record(request, identity, "rule.change", rule, listed(settings), project=project)

    def job(connection: Connection) -> None:
        services.rule_settings.put(connection, project, rule, settings)
        unsettle(connection, project)
        audit(connection)

    services.database.write(job, essential=True)
    services.rules_changed()
    return _shown(services, rule, project)


@router.delete("/rules/{rule}", responses={200: {"model": RuleShown}})
def reset_rule(
    rule: str, request: Request, services: ServicesDep, identity: Administrator,
    project: ProjectAsked = "",
) -> Response:  # fmt: skip
    """Removes what PUT set for this project, or for all: rules.toml and the rule's own thresholds count again."""
    check_project(identity, "admin", project)
    _known(rule)
    audit = record(request, identity, "rule.reset", rule, project=project)

    def job(connection: Connection) -> None:
        services.rule_settings.drop(connection, project, rule)
        unsettle(connection, project)
        audit(connection)

    services.database.write(job, essential=True)
    services.rules_changed()
    return _shown(services, rule, project)


def _known(rule: str) -> None:
    known = [one.id for one in all_rules()]
    if rule not in known:
        raise ApiError(404, "not_found", f"there is no rule {rule[:80]!r}; there are {', '.join(known)}", "rule")


def _shown(services: Services, rule: str, project: str) -> Response:
    found = services.rule_settings.rules_of(project)
    return reply(next(describe(one) for one in found if one.rule.id == rule))
