"""Alerts: the list, one run's, one with its history, and what people do with them: acknowledge, mute, snooze, resolve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, RowMapping, select
from starlette.responses import Response

from perfagent.wire import SEVERITIES, Alert
from perfagent_server.alerts import acts, history, tables
from perfagent_server.alerts.quiet import UNTIL_UNDONE, Quiet
from perfagent_server.alerts.tables import alert_of
from perfagent_server.routes.dependencies import Operator, Reader, SeenRun, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.security.access import require
from perfagent_server.security.audit import record
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services
from perfagent_server.spending.finding_cost import with_money
from perfagent_server.spending.run_cost import rates_of
from perfagent_server.store.artifacts import StoredProfile
from perfagent_server.store.changes import note_change
from perfagent_server.store.tables import alert
from perfagent_server.store.tables import run as runs
from perfagent_server.timestamps import rfc3339

__all__ = ["alerts_of", "router", "shown_alerts"]

router = APIRouter()

_STATES = ("pending", "firing", "resolved")
_LONGEST_S = 365 * 86400.0
Seconds = Annotated[float | None, Field(ge=0, le=_LONGEST_S, allow_inf_nan=False)]
Act = Callable[[Connection, str, float], object]


@dataclass
class ActRequest:
    """note: what others should know, up to 2,000 characters."""

    note: Annotated[str, Field(max_length=2000)] = ""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class QuietRequest:
    """for_s: how long, up to a year; 0 ends it. note: what others should know."""

    for_s: Seconds = None
    note: Annotated[str, Field(max_length=2000)] = ""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class HistoryRow:
    """event: fired, reopened, worse, resolved, acknowledged, unacknowledged, muted, unmuted, snoozed or unsnoozed; who:
    empty for a rule."""

    time: str
    event: str
    who: str
    note: str


@dataclass
class AlertWithHistory(Alert):
    """history: oldest first; profiles: that were taken because it fired, newest first."""

    history: list[HistoryRow]
    profiles: list[StoredProfile]


@dataclass
class AlertList:
    alerts: list[Alert]


@router.get("/alerts", responses={200: {"model": AlertList}})
def list_alerts(
    services: ServicesDep,
    identity: Reader,
    state: str | None = None,
    severity: str | None = None,
    run: str | None = None,
    rule: str | None = None,
    project: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Alerts, newest first."""
    if state is not None and state not in _STATES:
        raise ApiError(422, "invalid", f"state is {state[:80]!r}; allowed are {', '.join(_STATES)}", "state")
    if severity is not None and severity not in SEVERITIES:
        raise ApiError(
            422, "invalid", f"severity is {severity[:80]!r}; allowed are {', '.join(SEVERITIES)}", "severity"
        )
    its = {
        alert.c.state: state,
        alert.c.severity: severity,
        alert.c.run: run,
        alert.c.rule: rule,
        runs.c.project: project,
    }
    return reply({"alerts": [spoken(one) for one in _alerts(services, its, limit, identity.seen_projects)]})


@router.get("/runs/{run}/alerts", dependencies=[Depends(require("read"))], responses={200: {"model": AlertList}})
def run_alerts(run: SeenRun, services: ServicesDep) -> Response:
    """All alerts of a run, newest first."""
    return reply({"alerts": alerts_of(services, run)})


def alerts_of(services: Services, run: str) -> list[Alert]:
    """In the language of whoever asks."""
    return [spoken(one) for one in _alerts(services, {alert.c.run: run}, 10_000)]


@router.get("/alerts/{alert_id}", responses={200: {"model": AlertWithHistory}})
def one_alert(alert_id: str, services: ServicesDep, identity: Reader) -> Response:
    """An alert and its history. `GET /deliveries?alert=` has what was sent about it."""
    found = spoken(_known(services, identity, alert_id))
    with services.database.read() as connection:
        happened = history.history_of(connection, alert_id)
    shown = {name: getattr(found, name) for name in Alert.__dataclass_fields__}
    return reply({**shown, "history": happened, "profiles": services.profiles.of_alert(found.run, alert_id)})


@router.post("/alerts/{alert_id}/ack", responses={200: {"model": Alert}})
def acknowledge(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    identity: Operator,
    asked: ActRequest | None = None,
) -> Response:
    """Acknowledges an alert: somebody has seen it and works on it. It is no longer repeated; its state stays."""
    note = asked.note if asked else ""

    def act(connection: Connection, ident: str, now: float) -> None:
        acts.acknowledge(connection, ident, now, who=identity.name, note=note)

    return _do(services, request, identity, "alert.ack", alert_id, act)


@router.post("/alerts/{alert_id}/unack", responses={200: {"model": Alert}})
def unacknowledge(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    identity: Operator,
    asked: ActRequest | None = None,
) -> Response:
    """Takes an acknowledgement back."""
    note = asked.note if asked else ""

    def act(connection: Connection, ident: str, now: float) -> None:
        acts.unacknowledge(connection, ident, now, who=identity.name, note=note)

    return _do(services, request, identity, "alert.unack", alert_id, act)


@router.post("/alerts/{alert_id}/mute", responses={200: {"model": Alert}})
def mute(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    identity: Operator,
    asked: QuietRequest | None = None,
    for_s: Annotated[Seconds, Query()] = None,
) -> Response:
    """Mutes this rule in this run for `for_s` seconds, given in the body or in the query; without them, until somebody
    ends it (0 ends it). No channel gets alerts of it meanwhile. What still fires at the end is sent then; a resolution is
    sent at once to the channels that got the alert."""
    lasts_s, note = _asked(asked, for_s)

    def act(connection: Connection, ident: str, now: float) -> bool:
        return acts.mute(connection, ident, _until(now, lasts_s), now, who=identity.name, note=note)

    return _do(services, request, identity, "alert.mute", alert_id, act)


@router.post("/alerts/{alert_id}/unmute", responses={200: {"model": Alert}})
def unmute(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    identity: Operator,
    asked: ActRequest | None = None,
) -> Response:
    """Ends a mute: what still fires is sent now."""
    note = asked.note if asked else ""

    def act(connection: Connection, ident: str, now: float) -> bool:
        return acts.mute(connection, ident, None, now, who=identity.name, note=note)

    return _do(services, request, identity, "alert.unmute", alert_id, act)


@router.post("/alerts/{alert_id}/snooze", responses={200: {"model": Alert}})
def snooze(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    identity: Operator,
    asked: QuietRequest | None = None,
    for_s: Annotated[Seconds, Query()] = None,
) -> Response:
    """Snoozes this alert for `for_s` seconds; without them, until it is resolved (0 ends it). No channel gets it
    meanwhile. If it still fires at the end, it is sent again."""
    lasts_s, note = _asked(asked, for_s)

    def act(connection: Connection, ident: str, now: float) -> bool:
        until = _until(now, lasts_s)
        return acts.snooze(connection, ident, until, now, services.link, who=identity.name, note=note)

    return _do(services, request, identity, "alert.snooze", alert_id, act)


@router.post("/alerts/{alert_id}/unsnooze", responses={200: {"model": Alert}})
def unsnooze(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    identity: Operator,
    asked: ActRequest | None = None,
) -> Response:
    """Ends a snooze."""
    note = asked.note if asked else ""

    def act(connection: Connection, ident: str, now: float) -> bool:
        return acts.snooze(connection, ident, None, now, services.link, who=identity.name, note=note)

    return _do(services, request, identity, "alert.unsnooze", alert_id, act)


@router.post("/alerts/{alert_id}/resolve", responses={200: {"model": Alert}})
def resolve(
    alert_id: str,
    request: Request,
    services: ServicesDep,
    identity: Operator,
    asked: ActRequest | None = None,
) -> Response:
    """Closes it by hand. Within its cool-down it opens again if its cause is still there, and is sent again when it
    lasts."""
    found = _operated(services, identity, alert_id)
    why = f"resolved by {identity.name}" + (f": {asked.note}" if asked and asked.note else "")
    if found.state != "resolved" and not services.resolve(found.run, alert_id, why):
        # No rule holds it open any more (an older attempt's): the row is all there is.
        def act(connection: Connection, ident: str, now: float) -> None:
            tables.resolve_by_hand(connection, ident, now, services.link, why)
            services.note_resolved(connection, found.run, alert_id, why)

        answer = _do(services, request, identity, "alert.resolve", alert_id, act)
        services.engine.resolve(found.run, alert_id, why)  # where it began to judge the run meanwhile
        return answer
    services.database.write(_audit(request, identity, "alert.resolve", found))
    return reply(spoken(_known(services, identity, alert_id)))


def _asked(asked: QuietRequest | None, for_s: float | None) -> tuple[float | None, str]:
    """Seconds and note."""
    given = [value for value in (for_s, asked.for_s if asked else None) if value is not None]
    if len(given) > 1:
        raise ApiError(422, "invalid", "for_s is given in the query and in the body; once is enough", "for_s")
    return given[0] if given else None, asked.note if asked else ""


def _until(now: float, lasts_s: float | None) -> float | None:
    if lasts_s is None:
        return UNTIL_UNDONE
    return now + lasts_s if lasts_s else None


def _alerts(
    services: Services, its: dict[Any, str | None], limit: int, projects: frozenset[str] | None = None
) -> list[Alert]:
    """Those whose columns have these values; None is any. projects: of their runs; None: any."""
    query = select(alert).order_by(alert.c.since.desc(), alert.c.id).limit(limit)
    if its.get(runs.c.project) is not None or projects is not None:
        query = query.join(runs, runs.c.id == alert.c.run)
    if projects is not None:
        query = query.where(runs.c.project.in_(projects))
    for column, wanted in its.items():
        if wanted is not None:
            query = query.where(column == wanted)
    with services.database.read() as connection:
        return shown_alerts(connection, connection.execute(query).mappings().all())


def shown_alerts(connection: Connection, rows: Sequence[RowMapping]) -> list[Alert]:
    """With the names of their runs, the silences that keep those quiet that fire, and what each costs."""
    firing = [row["id"] for row in rows if row["state"] == "firing"]
    silenced = Quiet(connection, time.time()).silenced_until(firing) if firing else {}
    rates = rates_of(connection, (row["run"] for row in rows))
    named = select(runs.c.id, runs.c.name, runs.c.project).where(runs.c.id.in_({row["run"] for row in rows}))
    its = {row.id: (row.name, row.project) for row in connection.execute(named)}
    found = [with_money(alert_of(row, *its.get(row["run"], ("", ""))), rates.get(row["run"])) for row in rows]
    for one in found:
        one.silenced_until = rfc3339(silenced.get(one.id))
    return found


def _known(services: Services, identity: Identity, alert_id: str) -> Alert:
    """An alert of a run that one may see. Raises ApiError for any other."""
    with services.database.read() as connection:
        rows = connection.execute(select(alert).where(alert.c.id == alert_id)).mappings().all()
        found = shown_alerts(connection, rows)
    if not found or not identity.sees(found[0].project):
        raise ApiError(404, "not_found", f"there is no alert {alert_id[:80]!r}; GET /api/v1/alerts lists them")
    return found[0]


def _operated(services: Services, identity: Identity, alert_id: str) -> Alert:
    """An alert on which one may act."""
    found = _known(services, identity, alert_id)
    check_project(identity, "operate", found.project)
    return found


def _audit(request: Request, identity: Identity, action: str, about: Alert) -> Callable[[Connection], None]:
    return record(request, identity, action, about.id, f"{about.rule} of run {about.run}", project=about.project)


def _do(services: Services, request: Request, identity: Identity, action: str, alert_id: str, act: Act) -> Response:
    """Carries out what somebody does with an alert, with its row in the audit log, and answers with the alert."""
    audit = _audit(request, identity, action, _operated(services, identity, alert_id))

    def job(connection: Connection) -> object:
        audit(connection)
        note_change(connection, "alert", alert_id)
        note_change(connection, "delivery")
        return act(connection, alert_id, time.time())

    if services.database.write(job):
        services.outbox.wake()
    changed = _known(services, identity, alert_id)
    services.hub.publish_alert(changed)
    return reply(spoken(changed))
