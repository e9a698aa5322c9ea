"""How long what is kept, by project, and what would go now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection
from starlette.responses import Response

from perfagent_server.routes.dependencies import Administrator, ProjectAsked, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require_everywhere
from perfagent_server.security.audit import listed, record
from perfagent_server.store.retention import (
    PROJECT_FIELDS,
    Policies,
    Preview,
    drop_policy,
    set_policy,
    stored_policies,
)
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()

FieldsAsked = Annotated[Sequence[str], Query()]
Limit = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)] | Literal["forever"] | None
_SHOWN_STEPS = 1000


@dataclass
class NewPolicy:
    """Days, and bytes; "forever" keeps everything; what is left out is that of all projects, or of the server's settings.
    PUT replaces what was set for the project as a whole; PATCH keeps what is left out."""

    samples_days: Limit = None
    rollup16_days: Limit = None
    rollup256_days: Limit = None
    runs_days: Limit = None
    events_days: Limit = None
    profiles_days: Limit = None
    media_days: Limit = None
    alerts_days: Limit = None
    max_bytes: Limit = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class PolicyShown:
    """project: empty for the default of all projects. set: what was set by API; in_force: with what it inherits, null being
    for ever."""

    project: str
    set: dict[str, float | str]
    in_force: dict[str, float | None]


@dataclass
class PolicyList:
    policies: list[PolicyShown]


@dataclass
class GoingRun:
    """over: when it ended, or last sent something."""

    run: str
    name: str
    project: str
    over: str


@dataclass
class GoingByAge:
    """what: a counter of retention; projects: of whom; count: blocks, runs, events and so on."""

    what: str
    projects: str
    count: int


@dataclass
class GoingStep:
    """action: what the run would lose: samples, rollup16 (cells of 16 steps), rollup256 or run (all of it); bytes: what that
    is expected to free."""

    action: str
    run: str
    name: str
    project: str
    bytes: int


@dataclass
class ExceededBudget:
    """project: null for the whole database. steps: the first 1000."""

    project: str | None
    max_bytes: float
    used_bytes: int
    steps: list[GoingStep]


@dataclass
class Going:
    """refused: why nothing goes at all now, such as a clock that jumped; empty if something may go."""

    refused: str
    aged: list[GoingByAge]
    runs: list[GoingRun]
    budgets: list[ExceededBudget]


@router.get("/retention", responses={200: {"model": PolicyList}})
def list_policies(services: ServicesDep, identity: Reader) -> Response:
    """The retention of all projects, and of each project with its own that the caller may see."""
    with services.database.read() as connection:
        stored = stored_policies(connection)
    policies = Policies(services.retention.policy, stored)
    seen = {"", *(project for project in stored if identity.sees(project))}
    return reply({"policies": [_shown(policies, stored, project) for project in sorted(seen)]})


@router.get("/retention/preview", dependencies=[Depends(require_everywhere("read"))], responses={200: {"model": Going}})
def show_what_would_go(services: ServicesDep) -> Response:
    """What would be deleted now, by age and by size budgets. Changes nothing."""
    return reply(_going(services.retention.preview()))


@router.put("/retention", responses={200: {"model": PolicyShown}})
def change_policy(
    asked: NewPolicy, request: Request, services: ServicesDep, identity: Administrator, project: ProjectAsked = "",
) -> Response:  # fmt: skip
    """Sets how long the data of a project is kept; without one, that of all projects without their own. What the body
    leaves out is reset (PATCH keeps it).
    """
    return _changed(asked, request, services, identity, project, keep_others=False)


@router.patch("/retention", responses={200: {"model": PolicyShown}})
def change_part_of_policy(
    asked: NewPolicy, request: Request, services: ServicesDep, identity: Administrator, project: ProjectAsked = "",
) -> Response:  # fmt: skip
    """Sets a part of it. What the body leaves out stays as it was."""
    return _changed(asked, request, services, identity, project, keep_others=True)


@router.delete("/retention", status_code=204, response_class=Response)
def remove_policy(
    request: Request, services: ServicesDep, identity: Administrator, project: ProjectAsked = "", field: FieldsAsked = (),
) -> Response:  # fmt: skip
    """Resets the retention of a project; without one, of all projects. `field`: only these, such as `max_bytes`."""
    check_project(identity, "admin", project)
    fields = set(field)
    if unknown := sorted(fields - set(PROJECT_FIELDS)):
        said = f"{unknown[0][:80]!r} is none of {', '.join(PROJECT_FIELDS)}"
        raise ApiError(422, "invalid", said, "field")
    audit = record(request, identity, "retention.remove", project, ", ".join(sorted(fields)), project=project)

    def job(connection: Connection) -> bool:
        before = stored_policies(connection).get(project, {})
        left = {name: value for name, value in before.items() if fields and name not in fields}
        if len(left) == len(before):
            return False
        if left:
            set_policy(connection, project, left)
        else:
            drop_policy(connection, project)
        audit(connection)
        return True

    if not services.database.write(job, essential=True):
        what = " and ".join(filter(None, [project[:80] or "all projects", ", ".join(sorted(fields))]))
        raise ApiError(404, "not_found", f"nothing is set for {what}; GET /api/v1/retention lists what is", "project")
    return Response(status_code=204)


def _changed(
    asked: NewPolicy, request: Request, services: ServicesDep, identity: Administrator, project: str, *, keep_others: bool
) -> Response:  # fmt: skip
    check_project(identity, "admin", project)
    given = {name: value for name, value in asdict(asked).items() if value is not None}
    if not given:
        said = f"one of {', '.join(PROJECT_FIELDS)} is needed; DELETE takes back what was set"
        raise ApiError(422, "invalid", said, "samples_days")
    audit = record(request, identity, "retention.change", project, listed(given), project=project)

    def job(connection: Connection) -> dict[str, dict[str, Any]]:
        before = stored_policies(connection)
        kept = before.get(project, {}) if keep_others else {}
        set_policy(connection, project, {**kept, **given})
        audit(connection)
        return {**before, project: {**kept, **given}}

    stored = services.database.write(job, essential=True)
    return reply(_shown(Policies(services.retention.policy, stored), stored, project))


def _shown(policies: Policies, stored: dict[str, dict[str, Any]], project: str) -> PolicyShown:
    policy = policies.of(project) if project else policies.default
    return PolicyShown(
        project=project,
        set=stored.get(project, {}),
        in_force={name: getattr(policy, name) for name in PROJECT_FIELDS},
    )


def _going(found: Preview) -> Going:
    return Going(
        refused=found.refused,
        aged=[GoingByAge(*one) for one in found.aged],
        runs=[GoingRun(one.id, one.name, one.project, rfc3339(one.over)) for one in found.runs],
        budgets=[
            ExceededBudget(
                project=excess.project,
                max_bytes=excess.limit,
                used_bytes=excess.used,
                steps=[
                    GoingStep(step.action, step.run.run, step.run.name, step.run.project, step.bytes)
                    for step in excess.steps[:_SHOWN_STEPS]
                ],
            )
            for excess in found.budgets
        ],
    )
