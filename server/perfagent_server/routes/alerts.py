"""Alerts: the list, one run's, and what people do with them: acknowledge, mute, resolve."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, select, update
from starlette.responses import Response

from perfagent.wire import SEVERITIES, Alert
from perfagent_server.alerts import tables
from perfagent_server.alerts.tables import alert_of
from perfagent_server.routes.dependencies import ServicesDep, known_run
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import Identity, require
from perfagent_server.security.audit import record
from perfagent_server.services import Services
from perfagent_server.store.tables import alert

__all__ = ["router"]

router = APIRouter()

KnownRun = Annotated[str, Depends(known_run)]
_STATES = ("pending", "firing", "resolved")
_MUTE_S = 3600.0
_LONGEST_MUTE_S = 365 * 86400.0
# Beside the right to send: who changes an alert is shown it, and a job's ingest key must not quiet another run's
# alerts.
_READ = [Depends(require("read"))]


@dataclass
class MuteRequest:
    """seconds: how long; 0 ends it."""

    seconds: Annotated[float | None, Field(ge=0, le=_LONGEST_MUTE_S, allow_inf_nan=False)] = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class AlertList:
    alerts: list[Alert]


@router.get("/alerts", dependencies=[Depends(require("read"))], responses={200: {"model": AlertList}})
def list_alerts(
    services: ServicesDep,
    state: str | None = None,
    severity: str | None = None,
    run: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Alerts, newest first."""
    if state is not None and state not in _STATES:
        raise ApiError(422, "invalid", f"state is {state[:80]!r}; allowed are {', '.join(_STATES)}", "state")
    if severity is not None and severity not in SEVERITIES:
        raise ApiError(
            422, "invalid", f"severity is {severity[:80]!r}; allowed are {', '.join(SEVERITIES)}", "severity"
        )
    return reply({"alerts": _alerts(services, state=state, severity=severity, run=run, limit=limit)})


@router.get("/runs/{run}/alerts", dependencies=[Depends(require("read"))], responses={200: {"model": AlertList}})
def run_alerts(run: KnownRun, services: ServicesDep) -> Response:
    """All alerts of a run, newest first."""
    return reply({"alerts": _alerts(services, run=run, limit=10_000)})


@router.post("/alerts/{alert_id}/ack", dependencies=_READ, responses={200: {"model": Alert}})
def acknowledge(
    alert_id: str, request: Request, services: ServicesDep, identity: Identity = Depends(require("ingest"))  # noqa: B008
) -> Response:  # fmt: skip
    """Somebody has seen it. Its state stays."""
    return _change(services, request, identity, "alert.ack", alert_id, acknowledged=time.time())


@router.post("/alerts/{alert_id}/mute", dependencies=_READ, responses={200: {"model": Alert}})
def mute(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    asked: MuteRequest | None = None,
    seconds: Annotated[float | None, Query(ge=0, le=_LONGEST_MUTE_S, allow_inf_nan=False)] = None,
    identity: Identity = Depends(require("ingest")),  # noqa: B008
) -> Response:
    """No channel is told that this alert fires, or another of the same rule in the same run, for `seconds`, given in
    the body or in the query; for an hour, where they are not given. 0 ends it. What still fires at the end of the mute
    is told then; that an alert is resolved is told at once to those who were told that it fires."""
    given = [value for value in (seconds, asked and asked.seconds) if value is not None]
    if len(given) > 1:
        raise ApiError(422, "invalid", "seconds is given in the query and in the body; once is enough", "seconds")
    lasts_s, now = given[0] if given else _MUTE_S, time.time()
    _known(services, alert_id)
    audit = record(request, identity, "alert.mute", alert_id)

    def job(connection: Connection) -> bool:
        audit(connection)
        return tables.mute(connection, alert_id, now + lasts_s if lasts_s else None, now)

    if services.database.write(job):
        services.outbox.wake()
    return _changed(services, alert_id)


@router.post("/alerts/{alert_id}/resolve", dependencies=_READ, responses={200: {"model": Alert}})
def resolve(
    alert_id: str, request: Request, services: ServicesDep, identity: Identity = Depends(require("ingest"))  # noqa: B008
) -> Response:  # fmt: skip
    """Closes it by hand. Within its cool-down it opens again if its cause is still there, which is told when it
    lasts."""
    found = _known(services, alert_id)
    if found.state != "resolved" and not services.engine.resolve(found.run, alert_id, f"resolved by {identity.who}"):
        # No rule holds it open any more (an older attempt's): the row is all there is.
        return _change(services, request, identity, "alert.resolve", alert_id, state="resolved", resolved=time.time())
    services.database.write(record(request, identity, "alert.resolve", alert_id))
    return reply(_known(services, alert_id))


def _alerts(
    services: Services, *, state: str | None = None, severity: str | None = None, run: str | None = None, limit: int
) -> list[Alert]:
    query = select(alert).order_by(alert.c.since.desc(), alert.c.id).limit(limit)
    for column, wanted in ((alert.c.state, state), (alert.c.severity, severity), (alert.c.run, run)):
        if wanted is not None:
            query = query.where(column == wanted)
    with services.database.read() as connection:
        return [alert_of(row) for row in connection.execute(query).mappings()]


def _known(services: Services, alert_id: str) -> Alert:
    with services.database.read() as connection:
        row = connection.execute(select(alert).where(alert.c.id == alert_id)).mappings().first()
    if row is None:
        raise ApiError(404, "not_found", f"there is no alert {alert_id[:80]!r}; GET /api/v1/alerts lists them")
    return alert_of(row)


def _change(
    services: Services, request: Request, identity: Identity, action: str, alert_id: str, **values: Any
) -> Response:
    _known(services, alert_id)
    audit = record(request, identity, action, alert_id)

    def job(connection: Connection) -> None:
        connection.execute(update(alert).where(alert.c.id == alert_id).values(**values))
        audit(connection)

    services.database.write(job)
    return _changed(services, alert_id)


def _changed(services: Services, alert_id: str) -> Response:
    changed = _known(services, alert_id)
    services.hub.publish_alert(changed)
    return reply(changed)
