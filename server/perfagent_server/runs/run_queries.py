"""Reads runs from the tables (lists with filters, one run, its events), and changes what people may change."""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, and_, bindparam, case, func, or_, select, update

from perfagent.errors import WireError
from perfagent.wire import OUTCOMES, RunSummary
from perfagent_server.database import Database
from perfagent_server.rules.causes import reason_words
from perfagent_server.rules.texts.reader import reader
from perfagent_server.runs.outcomes import LEVEL, with_outcome
from perfagent_server.runs.run_filters import TableQuery, filtered
from perfagent_server.store.statements import Prepared
from perfagent_server.store.stored_json import stored_names, stored_object
from perfagent_server.store.tables import event, run, source
from perfagent_server.store.write.descriptions import SET_BY_PEOPLE, set_by_people
from perfagent_server.store.write.lifecycle import JSON_SOURCE
from perfagent_server.timestamps import rfc3339

__all__ = ["PAGE_CHARACTERS", "EventRow", "Runs"]

PAGE_CHARACTERS = 8 * 2**20
"""Of the configurations on one page of runs: a thousand of 256 kB would be 256 MB, several times over on the way."""

_LEVEL = LEVEL.label("level")
_CONTACT = select(func.max(source.c.contact)).where(source.c.run == run.c.id).scalar_subquery()
_HEARD = case((run.c.state == "lost", func.coalesce(_CONTACT, run.c.updated)), else_=run.c.updated).label("heard")
"""When a run was heard of last. What others send of a dead process comes later, and is no word of it."""
_SUMMARY = [*(column for column in run.c if column.name != "notes"), _LEVEL, _HEARD]
_ROW = [column for column in _SUMMARY if column.name not in ("attempt", "config", "meta", "rules_off", "left_out")]
_newest_named = Prepared(
    select(run.c.id, run.c.attempt)
    .where(run.c.project == bindparam("_project"), run.c.name == bindparam("_name"))
    .order_by(run.c.attempt.desc(), run.c.started.desc(), run.c.id.desc())
    .limit(1)
)
_by_id = Prepared(select(run.c.id).where(run.c.id == bindparam("_id")))
_IDS = 500
_ROWS_AT_ONCE = 50  # that PostgreSQL sends: a configuration may have 256 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One event as the API shows it. time: Unix seconds of the sender's clock; data: by kind."""

    id: int
    kind: str
    rank: int
    attempt: int
    step: int | None
    time: float
    data: dict[str, Any]


class Runs:
    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, asked: TableQuery, cursor: str | None = None) -> tuple[list[RunSummary], str | None]:
        """Runs that match, newest first, and the cursor of the next page: of `limit` runs, or of fewer where they have a
        lot to say. Raises WireError for a cursor that is not one of ours."""
        with self._database.read() as connection:
            query = with_outcome(select(*_SUMMARY)).where(*filtered(connection, asked))
            if cursor is not None:
                started, identifier = _parse_cursor(cursor)
                query = query.where(or_(run.c.started < started, and_(run.c.started == started, run.c.id < identifier)))
            query = query.order_by(run.c.started.desc(), run.c.id.desc()).limit(asked.limit + 1)
            rows: list[Mapping[Any, Any]] = []
            size = 0
            with connection.execute(query, execution_options={"yield_per": _ROWS_AT_ONCE}) as found:
                for row in found.mappings():
                    size += sum(len(row[name]) for name in ("config", "meta", "tags", "rules_off"))
                    if len(rows) == asked.limit or (rows and size > PAGE_CHARACTERS):
                        return [_summary(row, brief=True) for row in rows], _cursor(rows[-1])
                    rows.append(row)
        return [_summary(row, brief=True) for row in rows], None

    def get(self, identifier: str) -> RunSummary | None:
        with self._database.read() as connection:
            query = with_outcome(select(*_SUMMARY)).where(run.c.id == identifier)
            row = connection.execute(query).mappings().first()
        return None if row is None else _summary(row)

    def notes(self, identifier: str) -> str:
        """What people wrote about a run."""
        with self._database.read() as connection:
            return str(connection.execute(select(run.c.notes).where(run.c.id == identifier)).scalar() or "")

    def project_of(self, identifier: str) -> str | None:
        """The project of a run; None where there is no such run."""
        with self._database.read() as connection:
            found = connection.execute(select(run.c.project).where(run.c.id == identifier)).scalar()
        return None if found is None else str(found)

    def projects_of(self, identifiers: Sequence[str]) -> dict[str, str]:
        """By run, of those that exist."""
        return {row["id"]: row["project"] for row in self._of_ids(select(run.c.id, run.c.project), identifiers)}

    def exists(self, identifier: str) -> bool:
        with self._database.read() as connection:
            return connection.execute(select(run.c.id).where(run.c.id == identifier)).first() is not None

    def existing(self, identifiers: Iterable[str]) -> set[str]:
        """Those of these ids that are runs."""
        with self._database.read() as connection:
            rows = _by_id.each(connection, [{"_id": identifier} for identifier in identifiers])
        return {row[0] for row in rows if row is not None}

    def projects(self) -> set[str]:
        """Every project that has a run."""
        with self._database.read() as connection:
            return set(connection.execute(select(run.c.project).distinct()).scalars())

    def summaries(self, identifiers: Sequence[str]) -> list[RunSummary]:
        """The runs of these ids that exist."""
        return [_summary(row, brief=True) for row in self._of_ids(with_outcome(select(*_SUMMARY)), identifiers)]

    def rows(self, identifiers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What a list of runs shows of these, by id: RunSummary without `run` and without what may be long
        (configuration, meta, rules). A third of the time of summaries()."""
        return {row["id"]: _row(row) for row in self._of_ids(with_outcome(select(*_ROW)), identifiers)}

    def _of_ids(self, query: Select[Any], identifiers: Sequence[str]) -> Iterator[Mapping[Any, Any]]:
        """The rows of the runs of these ids that exist; so many at a time as a statement may name."""
        with self._database.read() as connection:
            for begin in range(0, len(identifiers), _IDS):
                some = identifiers[begin : begin + _IDS]
                yield from connection.execute(query.where(run.c.id.in_(some))).mappings().all()

    def newest_named(self, names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Mapping[str, Any]]:
        """By (project, name), as far as there is one: id and attempt of the run that was begun last. Not the one with the
        latest rows: they may hold any time."""
        wanted = list(names)
        with self._database.read() as connection:
            found = _newest_named.each(connection, [{"_project": project, "_name": name} for project, name in wanted])
        return {
            name: {"id": row[0], "attempt": row[1]} for name, row in zip(wanted, found, strict=True) if row is not None
        }

    def find(self, text: str, projects: frozenset[str] | None = None) -> str | None:
        """The id of the run of this id, else of this name, in one of these projects."""
        project = self.project_of(text)
        if project is not None and (projects is None or project in projects):
            return text
        return self.named(text, projects)

    def named(self, name: str, projects: frozenset[str] | None = None) -> str | None:
        """id of the run of a name that was begun last, in one of these projects; None: in any."""
        query = select(run.c.id).where(run.c.name == name).order_by(run.c.started.desc(), run.c.id.desc()).limit(1)
        if projects is not None:
            query = query.where(run.c.project.in_(projects))
        with self._database.read() as connection:
            found = connection.execute(query).scalar()
        return None if found is None else str(found)

    def step_of_rank(self, identifier: str, attempt: int, rank: int) -> int:
        """The last completed step of one rank of an attempt, 0 when it has sent none."""
        query = select(func.max(source.c.step)).where(
            source.c.run == identifier, source.c.attempt == attempt, source.c.rank == rank
        )
        with self._database.read() as connection:
            return int(connection.execute(query).scalar() or 0)

    def awaits_rank(self, identifier: str, attempt: int, rank: int) -> bool:
        """Whether a run of programs without an agent goes on, and this rank was not heard yet."""
        sources = select(source.c.id, source.c.rank).where(source.c.run == identifier, source.c.attempt == attempt)
        with self._database.read() as connection:
            state = connection.execute(select(run.c.state).where(run.c.id == identifier)).scalar()
            heard = connection.execute(sources).all()
        others = all(row.id.startswith(JSON_SOURCE) and row.rank != rank for row in heard)
        return others and state in ("starting", "running")

    def events(
        self,
        identifier: str,
        *,
        kind: str | None = None,
        rank: int | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> list[EventRow]:
        """The newest events of a run, oldest of them first. before: only those with a smaller id, for paging back."""
        query = select(event).where(event.c.run == identifier).order_by(event.c.id.desc()).limit(limit)
        if kind is not None:
            query = query.where(event.c.kind == kind)
        if rank is not None:
            query = query.where(event.c.rank == rank)
        if before is not None:
            query = query.where(event.c.id < before)
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            EventRow(
                id=row["id"], kind=row["kind"], rank=row["rank"], attempt=row["attempt"], step=row["step"], time=row["time"],
                data=msgspec.msgpack.decode(row["data"]),
            )
            for row in reversed(rows)
        ]  # fmt: skip

    @staticmethod
    def change(
        connection: Connection,
        identifier: str,
        *,
        name: str | None,
        tags: list[str] | None,
        notes: str | None,
        rules_off: list[str] | None,
    ) -> None:
        """Changes what people may change; what is None stays."""
        values: dict[str, Any] = {}
        if name is not None:
            values["name"] = name
        if tags is not None:
            values["tags"] = json.dumps(tags)
        if values:  # the job must not undo it: what else it says of its run comes for hours
            meta = connection.execute(select(run.c.meta).where(run.c.id == identifier)).scalar()
            values["meta"] = set_by_people(meta or "{}", list(values))
        if notes is not None:
            values["notes"] = notes
        if rules_off is not None:
            values["rules_off"] = json.dumps(rules_off)
        if values:
            connection.execute(update(run).where(run.c.id == identifier).values(**values))


_LONG = ("packages", "environment")


def _summary(row: Mapping[Any, Any], *, brief: bool = False) -> RunSummary:
    """brief: without what is long and read of one run at a time."""
    meta = stored_object(row["meta"])
    meta.pop(SET_BY_PEOPLE, None)
    if brief:
        meta = {name: value for name, value in meta.items() if name not in _LONG}
    return RunSummary(
        run=row["id"], project=row["project"], name=row["name"], state=row["state"], step=row["step"],
        started=rfc3339(row["started"]), updated=rfc3339(row["heard"]), ended=rfc3339(row["ended"]),
        reason=reason_words(row["reason"], reader.get()),
        world_size=row["world_size"], attempts=row["attempts"], tags=stored_names(row["tags"]), group=row["group_name"],
        host=row["host"], config=stored_object(row["config"]), meta=meta, rules_off=stored_names(row["rules_off"]),
        left_out=stored_object(row["left_out"]), severity=OUTCOMES[row["level"]],
    )  # fmt: skip


def _row(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        "project": row["project"], "name": row["name"], "state": row["state"], "step": row["step"],
        "started": rfc3339(row["started"]), "updated": rfc3339(row["heard"]), "ended": rfc3339(row["ended"]),
        "reason": reason_words(row["reason"], reader.get()), "world_size": row["world_size"], "attempts": row["attempts"],
        "tags": stored_names(row["tags"]), "group": row["group_name"], "host": row["host"],
        "severity": OUTCOMES[row["level"]],
    }  # fmt: skip


def _cursor(row: Mapping[Any, Any]) -> str:
    return base64.urlsafe_b64encode(struct.pack("<d", row["started"]) + row["id"].encode()).decode()


def _parse_cursor(cursor: str) -> tuple[float, str]:
    try:
        raw = base64.urlsafe_b64decode(cursor.encode("ascii"))
        (started,) = struct.unpack_from("<d", raw)
        return started, raw[8:].decode()
    except (ValueError, binascii.Error, struct.error):
        raise WireError(
            f"cursor {cursor[:80]!r} is not one that this server gave; leave it out to begin with the newest run"
        ) from None
