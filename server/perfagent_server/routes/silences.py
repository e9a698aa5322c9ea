"""Silences: no channel is told about alerts of the runs that they match. With a start in the future, or again every day
or week, they are maintenance windows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection, delete, insert, select
from starlette.responses import Response

from perfagent_server.alerts.quiet import DAY_S, UNTIL_UNDONE, WEEK_S, Silence, release
from perfagent_server.routes.dependencies import Operator, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.rule import USER_ALERT
from perfagent_server.security.audit import record
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services
from perfagent_server.store.tables import silence
from perfagent_server.timestamps import rfc3339, unix_seconds

__all__ = ["router"]

router = APIRouter()

_MATCHERS = ("project", "tag", "run", "rule")
_LONGEST = {"": 365 * DAY_S, "daily": DAY_S, "weekly": WEEK_S}
_MOST = 1000
_KEPT_S = 30 * DAY_S  # those that are over are listed that long
Text = Annotated[str, Field(max_length=256)]


@dataclass
class NewSilence:
    """project, tag, run (id or name), rule: what it matches; what is left out matches any, and one is needed. starts: RFC
    3339, now when left out; for_s or ends: how long. repeats: "daily" or "weekly", in UTC; left out: once."""

    project: Text = ""
    tag: Text = ""
    run: Text = ""
    rule: Text = ""
    starts: str | None = None
    ends: str | None = None
    for_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    repeats: str = ""
    note: Annotated[str, Field(max_length=2000)] = ""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class SilenceShown:
    """active: whether it is on now. who: who made it."""

    id: str
    project: str
    tag: str
    run: str
    rule: str
    starts: str
    ends: str
    repeats: str
    note: str
    who: str
    created: str
    active: bool


@dataclass
class SilenceList:
    silences: list[SilenceShown]


@router.get("/silences", responses={200: {"model": SilenceList}})
def list_silences(services: ServicesDep, identity: Reader) -> Response:
    """Active and coming silences, and those that ended in the last 30 days; newest first. A user of some projects sees
    those of these projects. A silence that cannot be read has no effect: `GET /rules` lists it under `ignored`.
    """
    now = time.time()
    query = select(silence).where((silence.c.repeats != "") | (silence.c.ends > now - _KEPT_S))
    if identity.seen_projects is not None:
        query = query.where(silence.c.project.in_(identity.seen_projects))
    with services.database.read() as connection:
        rows = connection.execute(query.order_by(silence.c.created.desc(), silence.c.id)).mappings()
        return reply({"silences": [_shown(row, now) for row in rows if Silence.read(row) is not None]})


@router.post("/silences", status_code=201, responses={201: {"model": SilenceShown}})
def create_silence(new: NewSilence, request: Request, services: ServicesDep, identity: Operator) -> Response:
    """A new silence. Alerts that fire stay open, and are sent when it ends. An operator of some projects names one of
    them, or a run in it."""
    now = time.time()
    starts, ends = _times(new, now)
    if not any(getattr(new, name) for name in _MATCHERS):
        raise ApiError(422, "invalid", f"a silence names what it matches: one or more of {', '.join(_MATCHERS)}")
    own, seen = services.rule_settings.own, identity.seen_projects
    theirs = own.ids() if seen is None else sorted({one for project in seen for one in own.ids(project)})
    known = [*(one.id for one in all_rules()), USER_ALERT, *theirs]
    if new.rule and new.rule not in known:
        raise ApiError(422, "invalid", f"there is no rule {new.rule[:80]!r}; there are {', '.join(known)}", "rule")
    project = _project(services, identity, new)
    values: dict[str, Any] = {
        "id": "si_" + uuid.uuid4().hex[:20], **{name: getattr(new, name) for name in _MATCHERS}, "project": project,
        "starts": starts, "ends": ends, "repeats": new.repeats, "note": new.note, "who": identity.name, "created": now,
    }  # fmt: skip
    audit = record(request, identity, "silence.create", values["id"], _matched(values), project=project)

    def job(connection: Connection) -> bool:
        count = len(connection.execute(select(silence.c.id)).all())
        if count >= _MOST:
            connection.execute(delete(silence).where(silence.c.repeats == "", silence.c.ends < now))
            if len(connection.execute(select(silence.c.id)).all()) >= _MOST:
                raise ApiError(409, "too_many", f"there are {count:,} silences, and no more may be; delete some")
        connection.execute(insert(silence).values(**values))
        audit(connection)
        return release(connection, now)

    services.database.write(job)
    return reply(_shown(values, now), 201)


@router.delete("/silences/{silence_id}", status_code=204, response_class=Response)
def delete_silence(silence_id: str, request: Request, services: ServicesDep, identity: Operator) -> Response:
    """Ends a silence: what still fires is sent now."""

    def job(connection: Connection) -> None:
        query = select(silence.c.project).where(silence.c.id == silence_id)
        project = connection.execute(query).scalar()
        if project is None or not identity.sees(project):
            said = f"there is no silence {silence_id[:80]!r}; GET /api/v1/silences lists them"
            raise ApiError(404, "not_found", said)
        check_project(identity, "operate", project)
        connection.execute(delete(silence).where(silence.c.id == silence_id))
        record(request, identity, "silence.delete", silence_id, project=project)(connection)
        release(connection, time.time())

    services.database.write(job)
    services.outbox.wake()
    return Response(status_code=204)


def _project(services: Services, identity: Identity, new: NewSilence) -> str:
    """What the silence is limited to: what it names, else, for an operator of some projects, that of the run that it
    names."""
    if new.project or identity.rights.projects("operate") is None:
        check_project(identity, "operate", new.project)
        return new.project
    run = services.runs.find(new.run, identity.seen_projects) if new.run else None
    project = "" if run is None else services.runs.project_of(run) or ""
    check_project(identity, "operate", project)
    return project


def _times(new: NewSilence, now: float) -> tuple[float, float]:
    """Start and end, Unix seconds."""
    if new.repeats not in _LONGEST:
        raise ApiError(422, "invalid", f"repeats is {new.repeats[:40]!r}; allowed are daily and weekly", "repeats")
    if (new.ends is None) == (new.for_s is None):
        raise ApiError(422, "invalid", "a silence has an end: give either ends or for_s", "ends")
    starts = now if new.starts is None else _time(new.starts, "starts")
    ends = starts + new.for_s if new.for_s is not None else _time(new.ends or "", "ends")
    longest = _LONGEST[new.repeats]
    if not starts < ends or ends - starts > longest or starts > UNTIL_UNDONE - longest:
        said = f"a silence ends after it starts, and lasts at most {longest / DAY_S:g} days"
        raise ApiError(422, "invalid", said, "for_s" if new.ends is None else "ends")
    if ends <= now and not new.repeats:
        raise ApiError(422, "invalid", "this silence is over already", "ends")
    return starts, ends


def _time(text: str, name: str) -> float:
    found = unix_seconds(text)
    if found is None:
        said = f"{name} is {text[:40]!r}; give a time as 2026-03-01T12:00:00Z"
        raise ApiError(422, "invalid", said, name)
    return found


def _matched(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {values[name]}" for name in _MATCHERS if values[name])


def _shown(row: Mapping[Any, Any], now: float) -> dict[str, Any]:
    told = {name: row[name] for name in ("id", *_MATCHERS, "repeats", "note", "who")}
    times = {name: rfc3339(row[name]) for name in ("starts", "ends", "created")}
    return {**told, **times, "active": (found := Silence.read(row)) is not None and found.until(now) is not None}
