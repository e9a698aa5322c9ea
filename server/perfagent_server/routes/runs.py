"""Runs: the list, one run, what people may change, deletion, newest values, names and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict
from sqlalchemy import Connection
from starlette.responses import Response

from perfagent.errors import WireError
from perfagent.wire import EVENT_KINDS, STATES, Latest, RunSummary, Spent, is_evaluation_loss, plain
from perfagent.wire.loss_names import loss_of
from perfagent_server.routes.alerts import alerts_of
from perfagent_server.routes.dependencies import (
    AdministeredRun,
    Administrator,
    OperatedRun,
    Operator,
    Reader,
    SeenRun,
    ServicesDep,
)
from perfagent_server.routes.moments import time_of
from perfagent_server.routes.panels import panels_of
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.routes.run_annotations import annotations_of
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.runs.run_filters import TableQuery
from perfagent_server.runs.run_queries import EventRow
from perfagent_server.security.access import require
from perfagent_server.security.audit import record
from perfagent_server.services import Services
from perfagent_server.store.changes import note_change

__all__ = ["router"]

router = APIRouter()

Many = Annotated[list[str] | None, Query(max_length=20)]


@dataclass
class RunPage:
    runs: list[RunSummary]
    next: str | None


@dataclass(kw_only=True)
class RunShown(RunSummary):
    """notes: what people wrote about it; spent: what it has taken; media: whether it has images, audio, tables or
    histograms."""

    notes: str
    media: bool
    spent: Spent


@dataclass
class RunChange:
    """What may be changed; a field that is left out stays. tags and rules_off replace the whole list. rules_off: rules
    that do not judge this run."""

    name: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    rules_off: list[str] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@router.get("/runs", responses={200: {"model": RunPage}})
def list_runs(
    request: Request,
    services: ServicesDep,
    identity: Reader,
    project: str | None = None,
    name: str | None = None,
    state: Many = None,
    tag: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
    with_: Annotated[str | None, Query(alias="with", max_length=80)] = None,
    sort: Annotated[str, Query(max_length=300)] = "started",
    order: Literal["asc", "desc"] | None = None,
    severity: Many = None,
    q: Annotated[str, Query(max_length=200)] = "",
    group: str | None = None,
    attention: bool = False,
    columns: Annotated[str, Query(max_length=4000)] = "",
    since: Annotated[str | None, Query(max_length=40)] = None,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> Response:
    """Runs, newest first. Give `next` back as `cursor` for the following page; it is null on the last one. A page has
    fewer than `limit` runs where their configurations are large.

    `severity` and `state`: one or several. A run's severity is that of its open alerts while it is active, and that of its
    verdict once it has ended: critical, warning, info, healthy, or unknown where nothing was judged. `q`: words that must
    all be in name, project, tag, host or an open alert, and comparisons of settings and newest values (`config.lr = 1e-3`,
    `val/acc > 0.6`), or a regular expression between slashes; `attention`: only runs with an open critical or warning alert
    that nobody acknowledged; `since` (RFC 3339): only runs that sent something since.

    With `with` (any of verdict, latest, timing, trend, config) it is a screen of a table: each run has these parts, `alerts` and
    `needs_attention`; `counts` says how many runs there are by state and severity, and `next` is the `offset` of the
    following page. `sort`: started, updated, name, project, state, step, severity (worst first), a metric's name or
    `config:NAME`; `columns`: more metrics and `config:NAME`, separated by commas."""
    wrong = [one for one in state or () if one not in STATES]
    if wrong:
        raise ApiError(422, "invalid", f"state is {wrong[0][:80]!r}; allowed are {', '.join(STATES)}", "state")
    given = request.query_params
    needless = ["cursor"] if with_ is not None else ["sort", "order", "offset", "columns"]
    if unheard := next((one for one in needless if one in given), None):
        raise ApiError(422, "invalid", _CANNOT[unheard == "cursor"].format(unheard), unheard)
    try:
        asked = TableQuery(
            parts=_listed(with_ or ""), sort=sort, descending=None if order is None else order == "desc",
            severities=severity or (), states=state or (), project=project, name=name, tag=tag, since=time_of(since, "since"),
            group=group, text=q,
            attention=attention, columns=_listed(columns), limit=limit, offset=offset, projects=identity.seen_projects,
        )  # fmt: skip
        asked = services.run_table.narrowed(asked)
        if with_ is not None:
            return reply(services.run_table.screen(asked))
        runs, following = services.runs.page(asked, cursor)
    except WireError as error:
        raise ApiError(422, "invalid", str(error)) from None
    return reply({"runs": runs, "next": following})


_CANNOT = (
    "{} is for a table of runs: give `with` too (with=latest, for one); without it, runs come newest first, and `cursor` pages",
    "{} is for a list without `with`; a table of runs is paged by `offset`",
)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@router.get("/runs/{run}", dependencies=[Depends(require("read"))], responses={200: {"model": RunShown}})
def get_run(
    run: SeenRun, services: ServicesDep, with_: Annotated[str, Query(alias="with", max_length=80)] = ""
) -> Response:
    """One run. `with` (any of names, latest, alerts, marks, annotations, panels) adds the answers of the routes of
    these names. `panels`: of its project; `marks`: for each rule the series on whose charts its alerts are marked, best
    first.
    """
    wrong = [part for part in _listed(with_) if part not in _PARTS]
    if wrong:
        raise ApiError(422, "invalid", f"with is {wrong[0]!r}; allowed are {', '.join(_PARTS)}", "with")
    return _shown(services, services.runs.get(run), {part: _PARTS[part](services, run) for part in _listed(with_)})


@router.patch("/runs/{run}", responses={200: {"model": RunShown}})
def change_run(
    at: OperatedRun, change: RunChange, request: Request, services: ServicesDep, identity: Operator
) -> Response:
    """Changes the name, the tags, the notes or the switched-off rules of a run. The job cannot change them afterwards. Needs
    the role operator in the run's project, or a key with the scope operate; an ingest key is not enough.
    """
    run = at.id
    if change.name is not None and not _can_be_a_name(change.name):
        raise ApiError(422, "invalid", "name must be a printable text of 1 to 256 bytes, not only spaces", "name")
    if change.tags is not None and (len(change.tags) > 100 or any(not 1 <= len(tag) <= 256 for tag in change.tags)):
        raise ApiError(422, "invalid", "tags may be up to 100 texts of 1 to 256 characters", "tags")
    if change.notes is not None and len(change.notes) > 100_000:
        raise ApiError(422, "invalid", "notes may have up to 100000 characters", "notes")
    ours = [*(rule.id for rule in all_rules()), *services.rule_settings.own.ids(at.project)]
    unknown = {*(change.rules_off or ())}.difference(ours)
    if unknown:
        known = ", ".join(ours)
        raise ApiError(422, "invalid", f"there is no rule {min(unknown)[:80]!r}; there are {known}", "rules_off")
    judged_otherwise = change.rules_off is not None or change.tags is not None  # users' own alerts ask for tags
    audit = record(request, identity, "run.change", run, _changed(change), project=at.project)

    def job(connection: Connection) -> None:
        services.runs.change(
            connection,
            run,
            name=change.name,
            tags=change.tags,
            notes=change.notes,
            rules_off=change.rules_off,
        )
        audit(connection)
        note_change(connection, "run", run)
        if judged_otherwise:
            note_change(connection, "rules", run)

    services.database.write(job)
    if judged_otherwise:
        services.engine.reload(run)
    if change.name is not None:
        services.log_rows.forget(run)
    summary = services.runs.get(run)
    if summary is not None:
        services.hub.publish_run(summary)
    return _shown(services, summary)


def _changed(change: RunChange) -> str:
    """For the audit log: what, and for all but notes to what."""
    given = {name: getattr(change, name) for name in ("name", "tags", "rules_off") if getattr(change, name) is not None}
    told = [f"{name}: {value}" for name, value in given.items()]
    return "; ".join([*told, *(["notes"] if change.notes is not None else [])])


def _can_be_a_name(name: str) -> bool:
    """As for a run of POST /log."""
    return 1 <= len(name.encode()) <= 256 and name.isprintable() and not name.isspace()


def _shown(services: Services, summary: RunSummary | None, parts: Mapping[str, Any] = MappingProxyType({})) -> Response:
    if summary is None:
        raise ApiError(404, "not_found", "this run was deleted just now", "run")
    run = summary.run
    told = {"notes": services.runs.notes(run), "media": services.media.any(run), "spent": services.spent_of(run)}
    return reply({**plain(summary), **told, **parts})


@router.delete("/runs/{run}", status_code=204, response_class=Response)
def delete_run(at: AdministeredRun, request: Request, services: ServicesDep, identity: Administrator) -> Response:
    """Deletes a run and everything that belongs to it."""
    run = at.id
    # First of all: should the server end on the way, it is known who has emptied the run.
    services.database.write(record(request, identity, "run.delete", run, project=at.project), essential=True)
    services.store.delete(run)
    services.forget(run)
    return Response(status_code=204)


@router.get(
    "/runs/{run}/latest", dependencies=[Depends(require("read"))], responses={200: {"model": dict[str, Latest]}}
)
def latest(run: SeenRun, services: ServicesDep) -> Response:
    """The newest value of each series of a run, combined over ranks as the catalog of metrics says."""
    return reply(services.store.latest(run))


@dataclass
class Names:
    """loss: the one that is trained on. evaluations: losses of evaluations."""

    names: list[str]
    loss: str | None
    evaluations: list[str]


@router.get("/runs/{run}/names", dependencies=[Depends(require("read"))], responses={200: {"model": Names}})
def names(run: SeenRun, services: ServicesDep) -> Response:
    """The names of all series of a run, sorted."""
    return reply(_names(services, run))


def _names(services: Services, run: str) -> Names:
    found = services.store.names(run)
    return Names(found, loss_of(found), [name for name in found if is_evaluation_loss(name)])


_PARTS: Mapping[str, Callable[[Services, str], Any]] = {
    "names": _names,
    "latest": lambda services, run: services.store.latest(run),
    "alerts": alerts_of,
    "annotations": annotations_of,
    "panels": lambda services, run: panels_of(services, services.runs.project_of(run) or ""),
    "marks": lambda _services, _run: {rule.id: rule.charts for rule in all_rules()},
}


@dataclass
class Events:
    events: list[EventRow]


@router.get("/runs/{run}/events", dependencies=[Depends(require("read"))], responses={200: {"model": Events}})
def events(
    run: SeenRun,
    services: ServicesDep,
    kind: str | None = None,
    rank: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
) -> Response:
    """The newest events of a run: console lines (`kind=log`), states, phases, alerts of the script. Of those, the
    oldest comes first. `before` an event's id: the page before it.
    """
    if kind is not None and kind not in EVENT_KINDS:
        raise ApiError(422, "invalid", f"kind is {kind[:80]!r}; allowed are {', '.join(EVENT_KINDS)}", "kind")
    return reply({"events": services.runs.events(run, kind=kind, rank=rank, limit=limit, before=before)})
