"""The audit log, for administrators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from perfagent_server.routes.dependencies import Administrator, ServicesDep
from perfagent_server.routes.moments import time_of
from perfagent_server.routes.reply import reply
from perfagent_server.security.audit import AuditQuery, read
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()

Text = Annotated[str | None, Query(max_length=256)]


@dataclass
class AuditRow:
    """who: "user NAME", "key ID", "admin token" or "anyone"; origin: their address; thing: the id or name of what it was
    done to; project: whose that is, empty for what is the server's."""

    id: int
    time: str
    who: str
    origin: str
    action: str
    thing: str
    project: str
    detail: str


@dataclass
class AuditPage:
    """next: give it as `before` for the following page; null on the last one."""

    entries: list[AuditRow]
    next: int | None


@router.get("/audit", responses={200: {"model": AuditPage}})
def list_audit(
    services: ServicesDep,
    identity: Administrator,
    who: Text = None,
    action: Text = None,
    thing: Text = None,
    project: Text = None,
    since: Text = None,
    until: Text = None,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The audit log, newest first: logins, and every change by a person or a key. `since` and `until`: RFC 3339. An
    administrator of some projects sees what was done in these.
    """
    asked = AuditQuery(
        projects=identity.rights.projects("admin"), who=who, action=action, thing=thing, project=project,
        since=time_of(since, "since"), until=time_of(until, "until"), before=before, limit=limit + 1,
    )  # fmt: skip
    rows = read(services.database, asked)
    following = rows[limit - 1]["id"] if len(rows) > limit else None
    return reply({"entries": [_shown(row) for row in rows[:limit]], "next": following})


def _shown(row: Any) -> dict[str, Any]:
    names = ("id", "who", "origin", "action", "thing", "project", "detail")
    return {**{name: row[name] for name in names}, "time": rfc3339(row["time"])}
