"""The inbox of alerts, grouped by what is alike, and acknowledging several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, select
from starlette.responses import Response

from perfagent.wire import SEVERITIES, Alert
from perfagent_server.alerts import acts
from perfagent_server.alerts.inbox import VIEWS, Asked, Inbox, read_inbox
from perfagent_server.alerts.quiet import Quiet
from perfagent_server.routes.alerts import shown_alerts
from perfagent_server.routes.dependencies import Operator, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.security.audit import record
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services
from perfagent_server.store.changes import note_change
from perfagent_server.store.tables import alert
from perfagent_server.store.tables import run as runs

__all__ = ["router"]

router = APIRouter()

_MOST_AT_ONCE = 10_000
_OF_A_JOB = 50
"""Alerts written in one transaction: senders wait for no longer one."""
_Ids = Annotated[list[str], Field(max_length=_MOST_AT_ONCE)]


@dataclass
class SeveralRequest:
    """alerts: ids; runs: ids of runs, for all their alerts that are neither acknowledged nor kept quiet. note: what others
    should know."""

    alerts: _Ids = field(default_factory=list)
    runs: _Ids = field(default_factory=list)
    note: Annotated[str, Field(max_length=2000)] = ""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class Several:
    """alerts: the ids of those that changed."""

    alerts: list[str]


@router.get("/alerts/inbox", responses={200: {"model": Inbox}})
def inbox(
    services: ServicesDep,
    identity: Reader,
    view: str = "open",
    severity: str = "",
    q: str = "",
    key: str = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> Response:
    """Alerts in groups: of one rule and severity, with titles that differ only in numbers and quoted names. `view`:
    open, acknowledged, quiet or resolved; `q`: words that must all be in an alert; `key`: only this group, with its
    newest `limit` alerts.
    """
    for name, given, allowed in (("view", view, VIEWS), ("severity", severity, ("", *SEVERITIES))):
        if given not in allowed:
            raise ApiError(422, "invalid", f"{name} is {given[:80]!r}; allowed are {', '.join(allowed)}", name)
    asked = Asked(view=view, severity=severity, text=q, key=key, limit=limit, projects=identity.seen_projects)
    with services.database.read() as connection:

        def whole(ids: Sequence[str]) -> dict[str, Alert]:
            rows = connection.execute(select(alert).where(alert.c.id.in_(ids))).mappings().all()
            return {one.id: spoken(one) for one in shown_alerts(connection, rows)}

        return reply(read_inbox(connection, asked, time.time(), whole))


@router.post("/alerts/ack", responses={200: {"model": Several}})
def acknowledge(asked: SeveralRequest, request: Request, services: ServicesDep, identity: Operator) -> Response:
    """Acknowledges alerts: somebody has seen them and works on them. Those that are acknowledged already stay as they
    are.
    """

    def act(connection: Connection, ident: str, now: float) -> None:
        acts.acknowledge(connection, ident, now, who=identity.name, note=asked.note)

    return _do(asked, lambda row: row.acknowledged is None, "alert.ack", act, request, services, identity)


@router.post("/alerts/unack", responses={200: {"model": Several}})
def unacknowledge(asked: SeveralRequest, request: Request, services: ServicesDep, identity: Operator) -> Response:
    """Takes acknowledgements back."""

    def act(connection: Connection, ident: str, now: float) -> None:
        acts.unacknowledge(connection, ident, now, who=identity.name, note=asked.note)

    return _do(asked, lambda row: row.acknowledged is not None, "alert.unack", act, request, services, identity)


def _do(
    asked: SeveralRequest, which: Callable[[Any], bool], action: str, act: Callable[[Connection, str, float], None],
    request: Request, services: Services, identity: Identity,
) -> Response:  # fmt: skip
    """None where one of them may not be changed by who asks; else in jobs, so that senders wait for none of them long."""
    found = [row for row in _named(asked, services, identity) if row.state == "firing" and which(row)]
    for project in {row.project for row in found}:
        check_project(identity, "operate", project)
    changed: set[str] = set()
    for begin in range(0, len(found), _OF_A_JOB):
        some = found[begin : begin + _OF_A_JOB]

        def job(connection: Connection, some: Sequence[Any] = some) -> None:
            ids = alert.c.id.in_([row.id for row in some])
            still = {
                row.id for row in connection.execute(select(alert.c.id, alert.c.acknowledged).where(ids)) if which(row)
            }
            for row in (row for row in some if row.id in still):
                record(request, identity, action, row.id, f"{row.rule} of run {row.run}", project=row.project)(
                    connection
                )
                note_change(connection, "alert", row.id)
                act(connection, row.id, time.time())
            note_change(connection, "delivery")
            changed.update(still)

        services.database.write(job)
        _publish(services, [row.id for row in some])
    return reply(Several(alerts=[row.id for row in found if row.id in changed]))


def _named(asked: SeveralRequest, services: Services, identity: Identity) -> list[Any]:
    """Raises ApiError for an alert that the caller does not see."""
    columns = alert.c.id, alert.c.run, alert.c.rule, alert.c.state, alert.c.acknowledged, runs.c.project
    query = select(*columns).join(runs, runs.c.id == alert.c.run)
    with services.database.read() as connection:
        rows = connection.execute(query.where(alert.c.id.in_(asked.alerts) | alert.c.run.in_(asked.runs))).all()
        quiet = Quiet(connection, time.time()).until(row.id for row in rows if row.id not in asked.alerts)
    seen = [row for row in rows if identity.sees(row.project) and row.id not in quiet]
    unknown = {*asked.alerts}.difference(row.id for row in seen)
    if unknown:
        message = f"there is no alert {min(unknown)[:80]!r}; GET /api/v1/alerts lists them"
        raise ApiError(404, "not_found", message, "alerts")
    return seen


def _publish(services: Services, changed: Sequence[str]) -> None:
    with services.database.read() as connection:
        rows = connection.execute(select(alert).where(alert.c.id.in_(changed))).mappings().all()
        for one in shown_alerts(connection, rows):
            services.hub.publish_alert(one)
