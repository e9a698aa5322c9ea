"""What routes ask for: the parts of the running server, who asks, and a run that exists and that they may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request
from pydantic import AfterValidator

from perfagent.wire.frame import MAX_NAME_BYTES
from perfagent_server.refusal import RefusalError
from perfagent_server.routes.problems import ApiError
from perfagent_server.security.access import lacking, require, require_everywhere
from perfagent_server.security.rights import Identity, Scope
from perfagent_server.services import Services

__all__ = [
    "AdministeredRun", "Administrator", "AdministratorOfAll", "OperatedRun", "Operator", "ProjectAsked", "ProjectNamed",
    "Reader", "RunAt", "SeenRun", "ServicesDep", "check_project",
]  # fmt: skip


async def _services(request: Request) -> Services:  # async: a plain function would cost a hop to a worker thread
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(_services)]

Reader = Annotated[Identity, Depends(require("read"))]
Operator = Annotated[Identity, Depends(require("operate"))]
Administrator = Annotated[Identity, Depends(require("admin"))]
"""Of one project or more: the route checks of which."""
AdministratorOfAll = Annotated[Identity, Depends(require_everywhere("admin"))]


def _short(project: str) -> str:
    if len(project.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a project has up to {MAX_NAME_BYTES} bytes")
    return project


ProjectAsked = Annotated[str, Query(), AfterValidator(_short)]
"""`?project=` of routes that also take none, which is all projects. As long as a frame's may be."""
ProjectNamed = Annotated[str, Query(min_length=1), AfterValidator(_short)]
"""Of routes that need one."""


@dataclass(frozen=True, slots=True)
class RunAt:
    """A run, and the project that it belongs to."""

    id: str
    project: str


def seen_run(run: str, services: ServicesDep, identity: Reader) -> str:
    """The run's id. A dependency of every route that reads below /runs/{run}: whose project one may not see is not
    there."""
    return _found(services, identity, run).id


def _found(services: Services, identity: Identity, run: str) -> RunAt:
    project = services.runs.project_of(run)
    if project is None or not identity.sees(project):
        raise ApiError(404, "not_found", f"there is no run {run[:128]!r}; GET /api/v1/runs lists them", "run")
    return RunAt(run, project)


def _run_to(scope: Scope) -> Callable[..., RunAt]:
    def run_to(run: str, services: ServicesDep, identity: Identity = Depends(require(scope))) -> RunAt:  # noqa: B008
        found = _found(services, identity, run)
        check_project(identity, scope, found.project)
        return found

    return run_to


SeenRun = Annotated[str, Depends(seen_run)]
OperatedRun = Annotated[RunAt, Depends(_run_to("operate"))]
AdministeredRun = Annotated[RunAt, Depends(_run_to("admin"))]


def check_project(identity: Identity, scope: Scope, project: str) -> None:
    """Raises ApiError for a project that one may not see, and RefusalError where one sees it, but may not do this in it.
    project: empty for all projects."""
    if project and not identity.sees(project):
        raise ApiError(404, "not_found", f"there is no project {project[:80]!r} among those that you see", "project")
    may = identity.rights.may(scope, project) if project else scope in identity.rights.everywhere
    if not may:
        where = f"in project {project!r}" if project else "for all projects; name one of yours with `project`"
        raise RefusalError("forbidden", f"{identity.who} may not do this {where}: {lacking(scope)}")
