"""Which runs stand on a screen of the table of runs, in which order, and how many there are of each kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import re2
from sqlalchemy import JSON, Connection, Select, Text, cast, func, literal, or_, select
from sqlalchemy.exc import DataError
from sqlalchemy.sql.elements import ColumnElement

from perfagent.errors import WireError
from perfagent.wire import OUTCOMES, Finding
from perfagent_server.rules.texts.reader import reader
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.runs.outcomes import ATTENTION, LEVEL, with_outcome
from perfagent_server.store.stored_json import stored_object
from perfagent_server.store.tables import alert
from perfagent_server.store.tables import run as runs

__all__ = [
    "COLUMNS",
    "PARTS",
    "SEVERITIES",
    "TableQuery",
    "counted",
    "filtered",
    "matching",
    "open_alerts",
    "rows_of",
]

PARTS = ("verdict", "latest", "timing", "trend", "config")
SEVERITIES = ("critical", "warning", "info", "healthy", "unknown")
COLUMNS = ("started", "updated", "name", "project", "state", "step", "severity")
"""What the database sorts by; everything else is a metric or a setting."""
_MOST_COLUMNS = 40
_MOST_CONFIGS = 100  # each of up to 256 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class TableQuery:
    """parts: of PARTS. sort: of the columns of a run, `severity` (worst first, then newest), a metric's name, or
    `config:NAME`. severities, states: any of them; empty: all. text: words that must all be in name, project, tag,
    host or an open alert; `/.../` is a regular expression. attention: only runs that need somebody. since: Unix
    seconds; only runs that were heard of since. columns: more metrics, and `config:NAME`. projects: those that the
    viewer may see; None: all. only: runs by their ids; None: any."""

    parts: Sequence[str] = PARTS
    sort: str = "started"
    descending: bool | None = None
    severities: Sequence[str] = ()
    states: Sequence[str] = ()
    project: str | None = None
    name: str | None = None
    tag: str | None = None
    since: float | None = None
    group: str | None = None
    text: str = ""
    attention: bool = False
    columns: Sequence[str] = ()
    limit: int = 100
    offset: int = 0
    projects: frozenset[str] | None = None
    only: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Raises WireError for what there is not."""
        for given, allowed, what in ((self.parts, PARTS, "with"), (self.severities, SEVERITIES, "severity")):
            wrong = [one for one in given if one not in allowed]
            if wrong:
                raise WireError(f"{what} is {wrong[0][:80]!r}; allowed are {', '.join(allowed)}")
        if self.is_pattern:
            options = re2.Options()
            options.log_errors = False
            try:
                re2.compile(self.pattern, options)
            except re2.error as error:
                said = error.args[0].decode() if isinstance(error.args[0], bytes) else error
                raise WireError(f"q is no regular expression: {said}") from None
        if "config" in self.parts and self.limit > _MOST_CONFIGS:
            raise WireError(f"limit is {self.limit}; with configurations it may be up to {_MOST_CONFIGS}")
        if len(self.columns) > _MOST_COLUMNS:
            raise WireError(f"columns may name {_MOST_COLUMNS} metrics and settings, not {len(self.columns)}")

    @property
    def is_pattern(self) -> bool:
        text = self.text.strip()
        return len(text) > 2 and text.startswith("/") and text.endswith("/")

    @property
    def pattern(self) -> str:
        return f"(?i){self.text.strip()[1:-1]}"


def _refuse_pattern(connection: Connection, asked: TableQuery) -> None:
    """PostgreSQL runs the expression itself, and does not know all that RE2 knows. Raises WireError."""
    if not asked.is_pattern or connection.dialect.name != "postgresql":
        return
    try:
        connection.execute(select(literal("").regexp_match(asked.pattern)))
    except DataError as error:
        raise WireError(f"q is no regular expression of PostgreSQL: {str(error.orig).splitlines()[0]}") from None


_OPEN = alert.c.state == "firing"
_changed = (
    select(func.max(func.coalesce(alert.c.resolved, alert.c.fired, alert.c.since)))
    .where(alert.c.run == runs.c.id)
    .scalar_subquery()
)


def _matching(asked: TableQuery, dialect: str) -> list[ColumnElement[bool]]:
    """The conditions of the counts. State, severity and attention are left out: the counts show what those filters offer."""
    found: list[ColumnElement[bool]] = []
    for column, wanted in (
        (runs.c.project, asked.project),
        (runs.c.name, asked.name),
        (runs.c.group_name, asked.group),
    ):
        if wanted is not None:
            found.append(column == wanted)
    if asked.since is not None:
        found.append(runs.c.updated >= asked.since)
    if asked.projects is not None:
        found.append(runs.c.project.in_(asked.projects))
    if asked.only is not None:
        found.append(runs.c.id.in_(asked.only))
    if asked.tag is not None:
        found.append(_has_tag(asked.tag, dialect))
    return [*found, *_texts(asked)]


def _has_tag(tag: str, dialect: str) -> ColumnElement[bool]:
    """Tags are a JSON list in text."""
    if dialect == "postgresql":  # compared as JSON: PostgreSQL makes no text of a NUL or half a surrogate pair
        items = func.json_array_elements(cast(runs.c.tags, JSON)).table_valued("value")
        written = [json.dumps(tag), json.dumps(tag, ensure_ascii=False)]
        return select(items.c.value).where(cast(items.c.value, Text).in_(written)).exists()
    items = func.json_each(runs.c.tags).table_valued("value")
    return select(items.c.value).where(items.c.value == tag).exists()


def _texts(asked: TableQuery) -> list[ColumnElement[bool]]:
    searched = (runs.c.name, runs.c.id, runs.c.project, runs.c.tags, runs.c.host)
    said = (alert.c.title, alert.c.rule)

    def anywhere(matches: Callable[[Any], ColumnElement[bool]]) -> ColumnElement[bool]:
        told = select(alert.c.id).where(alert.c.run == runs.c.id, _OPEN, or_(*map(matches, said)))
        return or_(*map(matches, searched), told.exists())

    if asked.is_pattern:
        return [anywhere(lambda column: column.regexp_match(asked.pattern))]
    return [anywhere(partial(_contains, word=word)) for word in asked.text.split()]


def _contains(column: Any, word: str) -> ColumnElement[bool]:
    return column.icontains(word, autoescape=True)  # type: ignore[no-any-return]


def filtered(connection: Connection, asked: TableQuery) -> list[ColumnElement[bool]]:
    """The conditions of a query of with_outcome(). Raises WireError for an expression that the database does not know."""
    _refuse_pattern(connection, asked)
    found = _matching(asked, connection.dialect.name)
    if asked.states:
        found.append(runs.c.state.in_(asked.states))
    if asked.severities:
        found.append(LEVEL.in_([OUTCOMES.index(one) for one in asked.severities]))
    if asked.attention:
        found.append(ATTENTION)
    return found


def counted(connection: Connection, asked: TableQuery) -> dict[str, Any]:
    columns = runs.c.state, LEVEL.label("level"), ATTENTION.label("attention")
    inner = with_outcome(select(*columns)).where(*_matching(asked, connection.dialect.name)).subquery()
    grouped = select(inner.c.state, inner.c.level, inner.c.attention, func.count()).group_by(*inner.c)
    states: dict[str, int] = {}
    severities = dict.fromkeys(SEVERITIES, 0)
    total = attention = 0
    for state, level, needs, count in connection.execute(grouped):
        states[state] = states.get(state, 0) + count
        severities[OUTCOMES[level]] += count
        total += count
        attention += count if needs else 0
    return {"all": total, "attention": attention, "states": states, "severities": severities}


def matching(connection: Connection, asked: TableQuery, *columns: Any) -> Select[Any]:
    """A query of the runs that match: of their ids, and of these columns."""
    return with_outcome(select(runs.c.id, *columns)).where(*filtered(connection, asked))


def rows_of(connection: Connection, asked: TableQuery, ids: Sequence[str] | None = None) -> Sequence[Any]:
    """The runs of the screen, in its order. ids: of them, where something sorts them that the database does not know."""
    columns = (
        runs.c.config, runs.c.updated, runs.c.state, runs.c.attempts, runs.c.ended, LEVEL.label("level"),
        ATTENTION.label("attention"), _changed.label("changed"),
    )  # fmt: skip
    query = matching(connection, asked, *columns)
    if ids is None:
        return connection.execute(query.order_by(*_order(asked)).limit(asked.limit).offset(asked.offset)).all()
    found = {row.id: row for row in connection.execute(query.where(runs.c.id.in_(ids)))}
    return [found[run] for run in ids if run in found]


def _order(asked: TableQuery) -> list[Any]:
    newest = runs.c.started.desc(), runs.c.id.desc()
    if asked.sort == "severity":
        return [LEVEL.asc() if asked.descending is False else LEVEL.desc(), *newest]
    column = runs.c[asked.sort]
    descending = asked.descending if asked.descending is not None else asked.sort in ("started", "updated", "step")
    return [column.desc() if descending else column.asc(), *newest]


def open_alerts(connection: Connection, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of these runs' open alerts: how many by severity, and the worst."""
    columns = (
        alert.c.id,
        alert.c.run,
        alert.c.severity,
        alert.c.title,
        alert.c.rule,
        alert.c.acknowledged,
        alert.c.since,
    )
    rows = connection.execute(select(*columns).where(_OPEN, alert.c.run.in_(ids)).order_by(alert.c.since.desc())).all()
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row.acknowledged is not None, -OUTCOMES.index(row.severity))):
        held = found.setdefault(
            row.run,
            {
                "firing": {},
                "worst": row.id,
                "title": row.title,
                "rule": row.rule,
                "acknowledged": row.acknowledged is not None,
            },
        )
        held["firing"][row.severity] = held["firing"].get(row.severity, 0) + 1
    if reader.get() != "en":
        _speak(connection, found)
    return found


def _speak(connection: Connection, found: dict[str, dict[str, Any]]) -> None:
    """Says the titles in the reader's language."""
    columns = (
        alert.c.run,
        alert.c.rule,
        alert.c.severity,
        alert.c.title,
        alert.c.message,
        alert.c.cause,
        alert.c.evidence,
    )
    query = select(*columns).where(alert.c.id.in_([held["worst"] for held in found.values()]))
    for row in connection.execute(query).mappings():
        told = {**row, "evidence": stored_object(row["evidence"])}
        run = told.pop("run")
        found[run]["title"] = spoken(Finding(**told)).title
