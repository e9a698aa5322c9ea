"""Runs: the list, one run, what people may change, deletion, newest values, names and events."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict
from sqlalchemy import Connection
from starlette.responses import Response

from perfagent.wire import EVENT_KINDS, STATES, Latest, RunSummary, Spent, plain
from perfagent_server.routes.dependencies import ServicesDep, known_run
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.runs.run_queries import EventRow
from perfagent_server.security.access import Identity, require
from perfagent_server.security.audit import record
from perfagent_server.services import Services

__all__ = ["router"]

router = APIRouter()

# Where a route also wants to know who asks, the scope stands twice: dependencies of the decorator come first, and
# nobody may learn from a 404 which runs exist. It is one function, so it is asked once.
KnownRun = Annotated[str, Depends(known_run)]


@dataclass
class RunPage:
    runs: list[RunSummary]
    next: str | None


@dataclass(kw_only=True)
class RunShown(RunSummary):
    """notes: what people wrote about it; spent: what it has taken."""

    notes: str
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


@router.get("/runs", dependencies=[Depends(require("read"))], responses={200: {"model": RunPage}})
def list_runs(
    services: ServicesDep,
    project: str | None = None,
    name: str | None = None,
    state: str | None = None,
    tag: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> Response:
    """Runs, newest first. Give `next` back as `cursor` for the following page; it is null on the last one. A page has
    fewer than `limit` runs where their configurations are large."""
    if state is not None and state not in STATES:
        raise ApiError(422, "invalid", f"state is {state[:80]!r}; allowed are {', '.join(STATES)}", "state")
    runs, following = services.runs.page(project=project, name=name, state=state, tag=tag, limit=limit, cursor=cursor)
    return reply({"runs": runs, "next": following})


@router.get("/runs/{run}", dependencies=[Depends(require("read"))], responses={200: {"model": RunShown}})
def get_run(run: KnownRun, services: ServicesDep) -> Response:
    """One run."""
    return _shown(services, services.runs.get(run))


@router.patch(
    "/runs/{run}",
    dependencies=[Depends(require("read")), Depends(require("ingest"))],
    responses={200: {"model": RunShown}},
)
def change_run(
    run: KnownRun, change: RunChange, request: Request, services: ServicesDep,
    identity: Identity = Depends(require("ingest")),  # noqa: B008
) -> Response:  # fmt: skip
    """Name, tags, notes and switched-off rules of a run. Needs the rights to read and to send, because it answers with
    the run: on loopback everybody has them, elsewhere an administrator; a job's ingest key neither reads nor changes
    other runs."""
    if change.name is not None and not _can_be_a_name(change.name):
        raise ApiError(422, "invalid", "name must be a printable text of 1 to 256 bytes, not only spaces", "name")
    if change.tags is not None and (len(change.tags) > 100 or any(not 1 <= len(tag) <= 256 for tag in change.tags)):
        raise ApiError(422, "invalid", "tags may be up to 100 texts of 1 to 256 characters", "tags")
    if change.notes is not None and len(change.notes) > 100_000:
        raise ApiError(422, "invalid", "notes may have up to 100000 characters", "notes")
    unknown = {*(change.rules_off or ())} - {rule.id for rule in all_rules()}
    if unknown:
        known = ", ".join(rule.id for rule in all_rules())
        raise ApiError(422, "invalid", f"there is no rule {min(unknown)[:80]!r}; there are {known}", "rules_off")
    audit = record(request, identity, "run.change", run)

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

    services.database.write(job)
    if change.rules_off is not None:
        services.engine.reload(run)
    if change.name is not None:
        services.log_rows.forget(run)
    summary = services.runs.get(run)
    if summary is not None:
        services.hub.publish_run(summary)
    return _shown(services, summary)


def _can_be_a_name(name: str) -> bool:
    """As for a run of POST /log."""
    return 1 <= len(name.encode()) <= 256 and name.isprintable() and not name.isspace()


def _shown(services: Services, summary: RunSummary | None) -> Response:
    if summary is None:
        raise ApiError(404, "not_found", "this run was deleted just now", "run")
    return reply({**plain(summary), "notes": services.runs.notes(summary.run), "spent": services.spent_of(summary.run)})


@router.delete("/runs/{run}", dependencies=[Depends(require("admin"))], status_code=204, response_class=Response)
def delete_run(
    run: KnownRun, request: Request, services: ServicesDep,
    identity: Identity = Depends(require("admin")),  # noqa: B008
) -> Response:  # fmt: skip
    """Removes a run with everything that belongs to it."""
    # First of all: should the server end on the way, it is known who has emptied the run.
    services.database.write(record(request, identity, "run.delete", run), essential=True)
    services.store.empty(run)
    services.database.write(partial(services.store.delete, run=run), essential=True)
    services.forget(run)
    return Response(status_code=204)


@router.get(
    "/runs/{run}/latest", dependencies=[Depends(require("read"))], responses={200: {"model": dict[str, Latest]}}
)
def latest(run: KnownRun, services: ServicesDep) -> Response:
    """The newest value of every name, ranks put together as the catalogue says."""
    return reply(services.store.latest(run))


@dataclass
class Names:
    names: list[str]


@router.get("/runs/{run}/names", dependencies=[Depends(require("read"))], responses={200: {"model": Names}})
def names(run: KnownRun, services: ServicesDep) -> Response:
    """Every name that the run has sent, sorted."""
    return reply({"names": services.store.names(run)})


@dataclass
class Events:
    events: list[EventRow]


@router.get("/runs/{run}/events", dependencies=[Depends(require("read"))], responses={200: {"model": Events}})
def events(
    run: KnownRun,
    services: ServicesDep,
    kind: str | None = None,
    rank: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
) -> Response:
    """The newest events, oldest of them first: console lines (kind=log), states, phases, alerts of the script. `before`
    an event's id pages back."""
    if kind is not None and kind not in EVENT_KINDS:
        raise ApiError(422, "invalid", f"kind is {kind[:80]!r}; allowed are {', '.join(EVENT_KINDS)}", "kind")
    return reply({"events": services.runs.events(run, kind=kind, rank=rank, limit=limit, before=before)})
