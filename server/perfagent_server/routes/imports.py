"""Routes for imports of old runs (`perfagent import`): begin one, ask how far its runs are, list them, take one back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from fastapi import Path as PathField
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, delete, func, select
from starlette.responses import Response

from perfagent.wire.frame import MAX_NAME_BYTES
from perfagent_server.routes.admission import check_project as check_sender
from perfagent_server.routes.dependencies import Administrator, ProjectAsked, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require
from perfagent_server.security.audit import record
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services
from perfagent_server.store.imports import Imported, imported
from perfagent_server.store.statements import insert_for
from perfagent_server.store.tables import data_import, imported_run
from perfagent_server.store.tables import run as runs
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()

_MOST_ASKED = 1000
_ANSWER_S = 15.0
"""A client waits no longer than twice that; it asks again for the rest."""

Sender = Annotated[Identity, Depends(require("ingest"))]
ImportId = Annotated[str, PathField(pattern=r"^im_[0-9a-f]{12}$")]


@dataclass
class NewImport:
    """project: of its runs, where they have one alone; origin: the machine and its files, for people."""

    project: Annotated[str, Field(max_length=MAX_NAME_BYTES)] = ""
    origin: Annotated[str, Field(max_length=2000)] = ""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class Asked:
    runs: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=_MOST_ASKED)]

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class Here:
    """imported: null for a run that no import began."""

    imported: Imported | None


@dataclass
class Known:
    """By id; runs that are not here are left out."""

    runs: dict[str, Here]


@dataclass
class ImportShown:
    """runs: those that are still here."""

    id: str
    project: str
    origin: str
    who: str
    created: str
    runs: int


@dataclass
class ImportList:
    imports: list[ImportShown]


@dataclass
class TakenBack:
    """left: runs that are still here; ask again."""

    deleted: int
    left: int


@router.put("/imports/{import_id}", status_code=204, response_class=Response)
def begin(import_id: ImportId, new: NewImport, request: Request, services: ServicesDep, identity: Sender) -> Response:
    """Begins an import, or continues one's own. Its id, `im_` and 12 hexadecimal digits, goes with the
    frames of each run, in `import` events."""
    if new.project:
        check_sender(identity, (new.project,))
    who = identity.name or identity.who
    values = {"id": import_id, "project": new.project, "created": time.time(), "who": who, "origin": new.origin}
    audit = record(request, identity, "import.create", import_id, new.origin[:500], project=new.project)

    def job(connection: Connection) -> str:
        its = insert_for(connection.dialect.name)(data_import).values(**values).on_conflict_do_nothing()
        if connection.execute(its).rowcount:
            audit(connection)
        return str(connection.execute(select(data_import.c.who).where(data_import.c.id == import_id)).scalar())

    if (owner := services.database.write(job)) != who:
        raise ApiError(409, "conflict", f"import {import_id} is {owner}'s; take another id", "import_id")
    return Response(status_code=204)


@router.post("/imports/known", responses={200: {"model": Known}})
def known(asked: Asked, services: ServicesDep, identity: Sender) -> Response:
    """How far runs are imported, so that an import continues where it was."""
    with services.database.read() as connection:
        found = imported(connection, asked.runs)
    mine = {run: Here(how) for run, (project, how) in found.items() if identity.project in (None, project)}
    return reply(Known(mine))


@router.get("/imports", responses={200: {"model": ImportList}})
def list_imports(services: ServicesDep, identity: Reader, project: ProjectAsked = "") -> Response:
    """Imports with runs that the caller may see, newest first."""
    if project:
        check_project(identity, "read", project)
    seen = {project} if project else identity.seen_projects
    counted = func.count().label("runs")
    query = (
        select(data_import, counted)
        .join(imported_run, imported_run.c.import_id == data_import.c.id)
        .join(runs, runs.c.id == imported_run.c.run)
        .group_by(*data_import.c)
        .order_by(data_import.c.created.desc())
    )
    if seen is not None:
        query = query.where(runs.c.project.in_(seen))
    with services.database.read() as connection:
        return reply(ImportList([_shown(row) for row in connection.execute(query).mappings()]))


@router.delete("/imports/{import_id}", responses={200: {"model": TakenBack}})
def take_back(import_id: str, request: Request, services: ServicesDep, identity: Administrator) -> Response:
    """Deletes the runs that an import began, and everything that belongs to them, some at each request."""
    with services.database.read() as connection:
        its = select(runs.c.id, runs.c.project).join(imported_run, imported_run.c.run == runs.c.id)
        left = connection.execute(its.where(imported_run.c.import_id == import_id)).all()
        is_there = connection.execute(select(data_import.c.id).where(data_import.c.id == import_id)).first() is not None
    for project in {row.project for row in left}:
        check_project(identity, "admin", project)
    if not left and not is_there:
        raise ApiError(
            404, "not_found", f"there is no import {import_id[:80]!r}; GET /api/v1/imports lists them", "import_id"
        )
    deleted = _delete(services, request, identity, left)
    if deleted == len(left):
        _forget(services, request, identity, import_id)
    return reply(TakenBack(deleted, len(left) - deleted))


def _delete(services: Services, request: Request, identity: Identity, left: Iterable[Any]) -> int:
    """As many as there is time for, and one at least."""
    until, deleted = time.monotonic() + _ANSWER_S, 0
    for row in left:
        services.database.write(record(request, identity, "run.delete", row.id, project=row.project), essential=True)
        services.store.delete(row.id)
        services.forget(row.id)
        deleted += 1
        if time.monotonic() > until:
            break
    return deleted


def _forget(services: Services, request: Request, identity: Identity, import_id: str) -> None:
    audit = record(request, identity, "import.delete", import_id)

    def job(connection: Connection) -> None:
        if connection.execute(delete(data_import).where(data_import.c.id == import_id)).rowcount:
            audit(connection)

    services.database.write(job, essential=True)


def _shown(row: Mapping[Any, Any]) -> ImportShown:
    return ImportShown(row["id"], row["project"], row["origin"], row["who"], rfc3339(row["created"]), row["runs"])
