"""Routes for annotations: texts of users at a step of a run, which its charts mark."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, delete, func, insert, select
from starlette.responses import Response

from perfagent_server.routes.dependencies import OperatedRun, Operator, SeenRun, ServicesDep
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require
from perfagent_server.security.audit import record
from perfagent_server.services import Services
from perfagent_server.store.tables import annotation as table
from perfagent_server.timestamps import rfc3339

__all__ = ["annotations_of", "router"]

router = APIRouter()

_MOST = 200
"""Of a run."""


@dataclass
class NewAnnotation:
    step: Annotated[int, Field(ge=0, le=2**53)]
    text: Annotated[str, Field(min_length=1, max_length=500)]

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class AnnotationShown:
    id: str
    step: int
    text: str
    who: str
    created: str


@dataclass
class AnnotationList:
    annotations: list[AnnotationShown]


@router.get(
    "/runs/{run}/annotations", dependencies=[Depends(require("read"))], responses={200: {"model": AnnotationList}}
)
def list_annotations(run: SeenRun, services: ServicesDep) -> Response:
    """The notes that people wrote at steps of a run, in the order of steps."""
    return reply(AnnotationList(annotations_of(services, run)))


def annotations_of(services: Services, run: str) -> list[AnnotationShown]:
    with services.database.read() as connection:
        rows = connection.execute(select(table).where(table.c.run == run).order_by(table.c.step, table.c.created))
        return [_shown(row) for row in rows.mappings()]


@router.post("/runs/{run}/annotations", status_code=201, responses={201: {"model": AnnotationShown}})
def annotate(
    at: OperatedRun, new: NewAnnotation, request: Request, services: ServicesDep, identity: Operator
) -> Response:
    """Writes a note at a step. A run has at most 200."""
    if not new.text.strip():
        raise ApiError(422, "invalid", "text has only spaces", "text")
    values: dict[str, Any] = {
        "id": "an_" + uuid.uuid4().hex[:20], "run": at.id, "step": new.step, "text": new.text.strip(), "who": identity.name,
        "created": time.time(),
    }  # fmt: skip
    audit = record(request, identity, "annotation.create", at.id, f"step {new.step}", project=at.project)

    def job(connection: Connection) -> None:
        if (connection.execute(select(func.count()).where(table.c.run == at.id)).scalar() or 0) >= _MOST:
            raise ApiError(409, "too_many", f"this run has {_MOST} annotations, and no more may be; delete some")
        connection.execute(insert(table).values(**values))
        audit(connection)

    services.database.write(job)
    return reply(_shown(values), 201)


@router.delete("/runs/{run}/annotations/{annotation}", status_code=204, response_class=Response)
def delete_annotation(
    at: OperatedRun, annotation: str, request: Request, services: ServicesDep, identity: Operator
) -> Response:
    """Deletes a note at a step."""
    audit = record(request, identity, "annotation.delete", at.id, annotation[:80], project=at.project)

    def job(connection: Connection) -> None:
        if not connection.execute(delete(table).where(table.c.run == at.id, table.c.id == annotation)).rowcount:
            said = f"this run has no annotation {annotation[:80]!r}; GET .../annotations lists them"
            raise ApiError(404, "not_found", said, "annotation")
        audit(connection)

    services.database.write(job)
    return Response(status_code=204)


def _shown(row: Mapping[Any, Any]) -> AnnotationShown:
    return AnnotationShown(row["id"], row["step"], row["text"], row["who"], rfc3339(row["created"]))
