"""The inbox: in which of its lists an alert stands, and alerts that are alike as one group.

Alike are those of one rule and severity whose titles differ in numbers and quoted names only: "silent after step 59" and
"silent after step 61" are one group, so a list is no longer than the causes in it, and costs what it shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sqlalchemy import Connection, select

from perfagent.wire import SEVERITIES, Alert
from perfagent_server.alerts.quiet import Quiet
from perfagent_server.rules.texts import titles_of
from perfagent_server.rules.texts.alike import alike
from perfagent_server.rules.texts.reader import reader
from perfagent_server.store.tables import alert
from perfagent_server.store.tables import run as runs
from perfagent_server.timestamps import rfc3339

__all__ = ["VIEWS", "AlertGroup", "Asked", "Inbox", "read_inbox"]

VIEWS = ("open", "acknowledged", "quiet", "resolved")
_MOST = {"firing": 10_000, "resolved": 1_000}
"""So many of each state, the newest."""
_MOST_GROUPS = 200
_WHOLE = 2
"""So many alerts of a group are shown as they are."""
_COLUMNS = (
    alert.c.id, alert.c.run, alert.c.rule, alert.c.severity, alert.c.state, alert.c.title, alert.c.message, alert.c.since,
    alert.c.acknowledged, runs.c.name.label("run_name"), runs.c.project,
)  # fmt: skip
_SEARCHED = ("title", "message", "rule", "run_name", "run", "project")


@dataclass(slots=True)
class AlertGroup:
    """Alerts that are alike. key: names the group; title: what their titles have in common, with "…" for the rest; since: of
    the newest; alerts: the newest of them, none where there are too many to show at once."""

    key: str
    rule: str
    severity: str
    title: str
    count: int
    runs: int
    since: str
    alerts: list[Alert]


@dataclass(slots=True)
class Inbox:
    """counts: how many alerts each list has (of resolved ones the newest 1,000); severities: how many of the open ones; groups:
    of the list that was asked for, worst first, then newest; more: groups that there was no room for."""

    counts: dict[str, int]
    severities: dict[str, int]
    groups: list[AlertGroup]
    more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """view: of VIEWS. severity: "" for any. text: words that must all be in title, message, rule, run or project; in another
    language than English, also in what alerts of the rule are called. key: of one group, whose newest `limit` alerts are
    wanted. projects: that the reader may see; None: all."""

    view: str = "open"
    severity: str = ""
    text: str = ""
    key: str = ""
    limit: int = 50
    projects: frozenset[str] | None = None


def read_inbox(
    connection: Connection, asked: Asked, now: float, whole: Callable[[Sequence[str]], Mapping[str, Alert]]
) -> Inbox:
    """whole: the alerts of these ids, in the reader's language."""
    rows = [row for state in _MOST for row in _rows(connection, state, asked)]
    quiet = Quiet(connection, now).until(row.id for row in rows if row.state == "firing")
    found = [(_view_of(row, quiet), row) for row in rows]
    groups: dict[str, list[Any]] = {}
    for view, row in found:
        if view == asked.view and asked.key in ("", key := _key(row)):
            groups.setdefault(key, []).append(row)
    ordered = sorted(
        groups.items(), key=lambda one: (SEVERITIES.index(one[1][0].severity), one[1][0].since), reverse=True
    )
    kept = dict(ordered[:_MOST_GROUPS])
    shown = {key: some[: asked.limit if asked.key else _WHOLE] for key, some in kept.items()}
    alerts = whole([row.id for some in shown.values() for row in some])
    made = [_group(key, some, [alerts[row.id] for row in shown[key] if row.id in alerts]) for key, some in kept.items()]
    if not asked.key:
        for one in made:
            one.alerts = one.alerts if one.count <= _WHOLE else []
    counts = Counter(view for view, _ in found)
    open_ones = Counter(row.severity for view, row in found if view == "open")
    return Inbox(
        {view: counts[view] for view in VIEWS},
        {one: open_ones[one] for one in SEVERITIES},
        made,
        len(groups) - len(kept),
    )


def _rows(connection: Connection, state: str, asked: Asked) -> list[Any]:
    """Newest first."""
    query = select(*_COLUMNS).join(runs, runs.c.id == alert.c.run).where(alert.c.state == state)
    if asked.severity:
        query = query.where(alert.c.severity == asked.severity)
    if asked.projects is not None:
        query = query.where(runs.c.project.in_(asked.projects))
    rows = connection.execute(query.order_by(alert.c.since.desc(), alert.c.id).limit(_MOST[state])).all()
    words = asked.text.lower().split()
    if not words:
        return list(rows)
    language = reader.get()
    own = {row.rule: "" if language == "en" else titles_of(row.rule, language) for row in rows}
    said = (" ".join((*(getattr(row, name) for name in _SEARCHED), own[row.rule])).lower() for row in rows)
    return [row for row, text in zip(rows, said, strict=True) if all(word in text for word in words)]


def _view_of(row: Any, quiet: Mapping[str, float]) -> str:
    if row.state != "firing":
        return "resolved"
    if row.acknowledged is not None:
        return "acknowledged"
    return "quiet" if row.id in quiet else "open"


def _key(row: Any) -> str:
    said = "\0".join((row.severity, row.rule, alike(row.title or row.message)))
    return blake2b(said.encode(), digest_size=8).hexdigest()


def _group(key: str, some: Sequence[Any], newest: list[Alert]) -> AlertGroup:
    title = next((one.title or one.message for one in newest), "")
    is_one_title = len({row.title or row.message for row in some}) == 1
    return AlertGroup(
        key, some[0].rule, some[0].severity, title if is_one_title else alike(title), len(some),
        len({row.run for row in some}), rfc3339(some[0].since), newest,
    )  # fmt: skip
