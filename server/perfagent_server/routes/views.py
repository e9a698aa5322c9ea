"""Routes for saved views: the query string of a page under a name. Everybody who can see the project can use them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, delete, func, select
from starlette.responses import Response

from perfagent_server.routes.dependencies import Operator, ProjectAsked, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.audit import record
from perfagent_server.store.statements import put
from perfagent_server.store.tables import saved_view as table
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()

_MOST = 200  # of a project, and of all projects
_LONGEST_NAME = 64


@dataclass(kw_only=True)
class View:
    """page: where it is opened. query: of the page's address, without the question mark. replace: also where there is a view
    of this name."""

    page: Literal["runs", "compare"]
    query: Annotated[str, Field(max_length=2048)]
    replace: bool = False

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass(kw_only=True)
class ViewShown:
    """project: empty for all. address: of the page, without the host."""

    name: str
    page: str
    query: str
    project: str
    who: str
    changed: str
    address: str


@dataclass
class ViewList:
    views: list[ViewShown]


@router.get("/views", responses={200: {"model": ViewList}})
def list_views(services: ServicesDep, identity: Reader, project: ProjectAsked = "") -> Response:
    """Saved views of all projects and of those that the caller may see, by name. `project`: only of this one."""
    if project:
        check_project(identity, "read", project)
    seen = {project} if project else identity.seen_projects
    query = select(table).order_by(table.c.name, table.c.project)
    if seen is not None:
        query = query.where(table.c.project.in_({"", *seen}))
    with services.database.read() as connection:
        return reply({"views": [_shown(row) for row in connection.execute(query).mappings()]})


@router.put("/views/{name}", responses={200: {"model": ViewShown}})
def save_view(
    name: str, view: View, request: Request, services: ServicesDep, identity: Operator, project: ProjectAsked = ""
) -> Response:
    """Saves a view for a project; without one, for all projects. 409 if there is a view of this name and `replace` is
    not true.
    """
    check_project(identity, "operate", project)
    if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable() or name != name.strip() or "/" in name:
        said = f"name is {name[:80]!r}; give up to {_LONGEST_NAME} letters without a slash, not with a space at an end"
        raise ApiError(422, "invalid", said, "name")
    query = view.query.removeprefix("?")
    if not query.isprintable():
        raise ApiError(422, "invalid", "query holds characters that no address has; give it as in the address", "query")
    row = {
        "project": project, "name": name, "page": view.page, "query": query, "who": identity.name, "changed": time.time(),
    }  # fmt: skip
    audit = record(request, identity, "view.save", name, f"/{view.page}?{query}", project=project)

    def job(connection: Connection) -> None:
        held = select(func.count()).select_from(table).where(table.c.project == project)
        if connection.execute(held.where(table.c.name == name)).scalar_one():
            if not view.replace:
                raise ApiError(409, "conflict", f"there is a view {name!r} already; `replace` replaces it", "name")
        elif connection.execute(held).scalar_one() >= _MOST:
            raise ApiError(409, "too_many", f"there are {_MOST} views, and no more may be; delete some")
        put(connection, table, row)
        audit(connection)

    services.database.write(job)
    return reply(_shown(row))


@router.delete("/views/{name}", status_code=204, response_class=Response)
def delete_view(
    name: str, request: Request, services: ServicesDep, identity: Operator, project: ProjectAsked = ""
) -> Response:
    """Deletes a view of a project; without one, of all projects."""
    check_project(identity, "operate", project)
    audit = record(request, identity, "view.delete", name, project=project)

    def job(connection: Connection) -> None:
        if not connection.execute(delete(table).where(table.c.project == project, table.c.name == name)).rowcount:
            where = f"of project {project!r}" if project else "of all projects"
            raise ApiError(
                404, "not_found", f"there is no view {name[:80]!r} {where}; GET /api/v1/views lists them", "name"
            )
        audit(connection)

    services.database.write(job)
    return Response(status_code=204)


def _shown(row: Mapping[Any, Any]) -> dict[str, Any]:
    told = {name: row[name] for name in ("name", "page", "query", "project", "who")}
    address = f"/{row['page']}" + (f"?{row['query']}" if row["query"] else "")
    return {**told, "changed": rfc3339(row["changed"]), "address": address}
