"""Routes for custom panels: charts of several series, or of expressions over series. A project's panels show on all its runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Path, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, delete, select
from starlette.responses import Response

from perfagent_server.routes.dependencies import Operator, ProjectNamed, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.runs.expressions import MOST_CHARACTERS, ExpressionError, parse
from perfagent_server.security.audit import record
from perfagent_server.services import Services
from perfagent_server.store.statements import put
from perfagent_server.store.tables import panel as table
from perfagent_server.timestamps import rfc3339

__all__ = ["panels_of", "router"]

router = APIRouter()

_MOST_PANELS, _MOST_LINES = 50, 8


@dataclass
class PanelForm:
    """lines: of the chart: each a series, or an expression such as `train/loss - val/loss`."""

    title: Annotated[str, Field(min_length=1, max_length=128)]
    lines: Annotated[
        list[Annotated[str, Field(max_length=MOST_CHARACTERS)]], Field(min_length=1, max_length=_MOST_LINES)
    ]

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class PanelLine:
    """names: of the series that it is computed of."""

    expression: str
    names: list[str]
    unit: str


@dataclass
class PanelShown:
    """who: changed it last."""

    id: str
    project: str
    title: str
    lines: list[PanelLine]
    who: str
    created: str


@dataclass
class PanelList:
    panels: list[PanelShown]


PanelId = Annotated[
    str, Path(pattern="^[a-z0-9-]{1,64}$", description="1 to 64 of a-z, 0-9 and -; whoever makes it chooses")
]


@router.get("/panels", responses={200: {"model": PanelList}})
def list_panels(services: ServicesDep, identity: Reader, project: ProjectNamed) -> Response:
    """The panels (charts that users made) of a project, oldest first. The page of a run draws those of whose series the
    run has any.
    """
    check_project(identity, "read", project)
    return reply(PanelList(panels_of(services, project)))


def panels_of(services: Services, project: str) -> list[PanelShown]:
    with services.database.read() as connection:
        rows = connection.execute(select(table).where(table.c.project == project).order_by(table.c.created, table.c.id))
        return [_shown(row) for row in rows.mappings()]


@router.put("/panels/{panel}", responses={200: {"model": PanelShown}})
def put_panel(
    panel: PanelId, form: PanelForm, project: ProjectNamed, request: Request, services: ServicesDep, identity: Operator
) -> Response:
    """Makes or replaces the panel of this id. A project has at most 50."""
    check_project(identity, "operate", project)
    for at, line in enumerate(form.lines):
        try:
            parse(line)
        except ExpressionError as error:
            raise ApiError(422, "invalid", f"lines[{at}] is {line[:80]!r}: {error}", "lines") from error
    audit = record(request, identity, "panel.change", panel, form.title, project=project)
    values: dict[str, Any] = {
        "project": project, "id": panel, "title": form.title, "lines": json.dumps(form.lines), "who": identity.name,
        "created": time.time(),
    }  # fmt: skip

    def job(connection: Connection) -> None:
        its = select(table.c.id, table.c.created).where(table.c.project == project)
        known = {row.id: row.created for row in connection.execute(its)}
        if panel not in known and len(known) >= _MOST_PANELS:
            raise ApiError(
                409, "too_many", f"project {project!r} has {_MOST_PANELS} panels, and no more may be; delete some"
            )
        values["created"] = known.get(panel, values["created"])
        put(connection, table, values)
        audit(connection)

    services.database.write(job)
    return reply(_shown(values))


@router.delete("/panels/{panel}", status_code=204, response_class=Response)
def delete_panel(
    panel: PanelId, project: ProjectNamed, request: Request, services: ServicesDep, identity: Operator
) -> Response:
    """Deletes a panel for all runs of the project. PUT with the same form makes it again."""
    check_project(identity, "operate", project)
    audit = record(request, identity, "panel.delete", panel, project=project)

    def job(connection: Connection) -> None:
        if not connection.execute(delete(table).where(table.c.project == project, table.c.id == panel)).rowcount:
            said = f"project {project!r} has no panel {panel!r}; GET /api/v1/panels?project= lists them"
            raise ApiError(404, "not_found", said, "panel")
        audit(connection)

    services.database.write(job)
    return Response(status_code=204)


def _shown(row: Mapping[Any, Any]) -> PanelShown:
    lines = [parse(line) for line in json.loads(row["lines"])]
    told = [PanelLine(one.text, list(one.names), one.unit) for one in lines]
    return PanelShown(row["id"], row["project"], row["title"], told, row["who"], rfc3339(row["created"]))
