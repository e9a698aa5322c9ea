"""The alerts that users made themselves: "when `val/loss` is above 3 for 20 steps", and what one would have told of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from threading import BoundedSemaphore
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from sqlalchemy import Connection
from starlette.responses import Response

from perfagent_server.backtest.replay import BacktestAlert
from perfagent_server.backtest.tried import tried
from perfagent_server.engine.own_alerts import CannotChangeError, Known
from perfagent_server.routes.dependencies import Administrator, ProjectAsked, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.rules.own_alert import FormError, OwnAlert, own_alert
from perfagent_server.rules.texts import outlined
from perfagent_server.rules.texts.reader import reader
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.runs.outcomes import unsettle
from perfagent_server.security.audit import listed, record
from perfagent_server.services import Services

__all__ = ["router"]

router = APIRouter()

_trying = BoundedSemaphore(1)  # it takes a core for some seconds: the rules and the pages need the others
_PATIENCE_S = 20.0


@dataclass(kw_only=True)
class AlertForm:
    """metric: a name, or a pattern such as `loss/*`. function: of the values over the duration; rise, fall: fires when it
    has not risen, or fallen, for so long; missing: when no value came for so long. comparison, threshold: for the first
    four. for_steps, for_s: the duration, one of the two. tags: only runs that have all of them. note: ends the message. stop:
    stops the run when it fires, where its script allows that."""

    metric: str
    function: Literal["value", "mean", "min", "max", "rise", "fall", "missing"] = "value"
    comparison: Literal[">", ">=", "<", "<=", ""] = ""
    threshold: float | None = None
    for_steps: int | None = None
    for_s: float | None = None
    severity: Literal["info", "warning", "critical"] = "warning"
    tags: list[str] = field(default_factory=list)
    note: str = ""
    stop: bool = False

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass(kw_only=True)
class NewOwnAlert(AlertForm):
    """name: what its rule is called, `own:NAME`."""

    name: str


@dataclass(kw_only=True)
class OwnAlertToTry(AlertForm):
    """run: the id of a run whose stored samples are judged."""

    run: str
    name: str = "tried"


@dataclass(kw_only=True)
class OwnAlertShown(NewOwnAlert):
    """rule: its id in findings and alerts; title: what it asks, in words; project: empty for all; from_file: it stands in
    rules.toml, and is changed there."""

    project: str
    rule: str
    title: str
    from_file: bool


@dataclass
class OwnAlertList:
    alerts: list[OwnAlertShown]


@dataclass
class WouldHaveFired:
    """since_step: where it began; step: at which it fired; until_step: the last at which it was so; value: of the series
    when it fired, null where there was none."""

    since_step: int
    step: int
    until_step: int
    series: str
    value: float | None
    message: str


@dataclass
class TriedAlert:
    """count: how often it would have fired; series: that match, 20 at most; samples: that were judged; left_out: older ones
    that were not."""

    count: int
    fired: list[WouldHaveFired]
    series: list[str]
    samples: int
    left_out: int


@router.get("/rules/alerts", responses={200: {"model": OwnAlertList}})
def list_own_alerts(services: ServicesDep, identity: Reader, project: ProjectAsked = "") -> Response:
    """The alerts that users made for all projects, and for those that the caller may see. `project`: only for this one."""
    if project:
        check_project(identity, "read", project)
    seen = [project] if project else identity.seen_projects
    return reply({"alerts": [_shown(one) for one in services.rule_settings.own.known(seen)]})


@router.post("/rules/alerts", status_code=201, responses={201: {"model": OwnAlertShown}})
def create_own_alert(
    new: NewOwnAlert, request: Request, services: ServicesDep, identity: Administrator, project: ProjectAsked = ""
) -> Response:
    """A new alert for runs of a project; of all projects without one. Active runs are judged at once. 100 at most."""
    check_project(identity, "admin", project)
    alert = _alert(asdict(new) | {"project": project})
    audit = record(request, identity, "own_alert.create", alert.name, _detail(alert), project=project)
    _put(services, alert, audit, is_new=True)
    return reply(_shown(Known(alert, from_file=False)), 201)


@router.put("/rules/alerts/{name}", responses={200: {"model": OwnAlertShown}})
def change_own_alert(
    name: str, form: AlertForm, request: Request, services: ServicesDep, identity: Administrator,
    project: ProjectAsked = "",
) -> Response:  # fmt: skip
    """Makes or replaces the alert of this name. What it had found is resolved."""
    check_project(identity, "admin", project)
    alert = _alert(asdict(form) | {"name": name, "project": project})
    audit = record(request, identity, "own_alert.change", name, _detail(alert), project=project)
    _put(services, alert, audit, is_new=False)
    return reply(_shown(Known(alert, from_file=False)))


@router.delete("/rules/alerts/{name}", status_code=204, response_class=Response)
def delete_own_alert(
    name: str, request: Request, services: ServicesDep, identity: Administrator, project: ProjectAsked = ""
) -> Response:
    """Deletes an alert that a user made. What it had found is resolved."""
    check_project(identity, "admin", project)
    audit = record(request, identity, "own_alert.delete", name, project=project)

    def job(connection: Connection) -> None:
        if not services.rule_settings.own.drop(connection, project, name):
            where = f"of project {project!r}" if project else "of all projects"
            said = f"there is no alert {name[:80]!r} {where}; GET /api/v1/rules/alerts lists them"
            raise ApiError(404, "not_found", said, "name")
        unsettle(connection, project)
        audit(connection)

    _write(services, job)
    return Response(status_code=204)


@router.post("/rules/alerts/try", responses={200: {"model": TriedAlert}})
def try_own_alert(
    form: OwnAlertToTry, services: ServicesDep, identity: Administrator, project: ProjectAsked = ""
) -> Response:
    """When an alert would have fired in a run, from its stored samples. Nothing is saved."""
    check_project(identity, "admin", project)
    said = asdict(form) | {"project": project}
    run = said.pop("run")
    alert, of_run = _alert(said), services.runs.project_of(run)
    if of_run is None or not identity.sees(of_run):
        raise ApiError(404, "not_found", f"there is no run {run[:128]!r}; GET /api/v1/runs lists them", "run")
    if not _trying.acquire(timeout=_PATIENCE_S):
        raise ApiError(503, "busy", "another alert is tried just now; try again in some seconds")
    try:
        found = tried(alert, services.store, services.database, run)
    finally:
        _trying.release()
    fired = [_fired(one) for one in found.alerts]
    told = {"count": len(fired), "fired": fired, "series": found.series, "samples": found.samples}
    return reply(told | {"left_out": found.left_out})


def _fired(alert: BacktestAlert) -> dict[str, Any]:
    found = alert.fired
    assert found is not None  # replay() says it of each
    return {
        "since_step": alert.onset_step, "step": alert.first_step, "until_step": alert.last_step,
        "series": found.evidence["series"], "value": found.evidence.get("value"), "message": spoken(found).message,
    }  # fmt: skip


def _alert(form: dict[str, Any]) -> OwnAlert:
    try:
        return own_alert(form)
    except FormError as error:
        raise ApiError(422, "invalid", str(error), error.field or None) from error


def _put(services: Services, alert: OwnAlert, audit: Any, *, is_new: bool) -> None:
    def job(connection: Connection) -> None:
        services.rule_settings.own.put(connection, alert, is_new=is_new)
        unsettle(connection, alert.project)
        audit(connection)

    _write(services, job)


def _write(services: Services, job: Any) -> None:
    try:
        services.database.write(job, essential=True)
    except CannotChangeError as error:
        raise ApiError(409, error.code, str(error), "name") from error
    services.rules_changed()


def _shown(known: Known) -> dict[str, Any]:
    alert = known.alert
    title = outlined(alert.id, alert.function, alert.figures(), reader.get())
    durations = {"for_steps": alert.for_steps or None, "for_s": alert.for_s or None}
    return alert.form() | durations | {"rule": alert.id, "title": title, "from_file": known.from_file}


def _detail(alert: OwnAlert) -> str:
    """For the audit log."""
    return listed({name: value for name, value in alert.form().items() if name not in ("name", "project") and value})
