"""What a run is called by its verdict, in one word of `perfagent.wire.OUTCOMES`, for every list, filter and count of runs.

Of a run that goes on, it is the worst of its open alerts. Most alerts are resolved when a run ends, so a run that ended
is called as its verdict says. That word stands in the run's row: the engine settles it once everything that the run
sent was judged. Until then such a run is `unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, case, exists, func, or_, select, true, update

from perfagent.wire import OUTCOMES
from perfagent_server.store.changes import note_change
from perfagent_server.store.tables import SET_ASIDE, alert, rule_state
from perfagent_server.store.tables import run as runs

__all__ = ["ATTENTION", "AT_ONCE", "LEVEL", "settle", "unsettle", "unsettled", "with_outcome"]

_HEALTHY, _UNKNOWN, _INFO, *_ALARMING = range(len(OUTCOMES))
_open = (
    select(
        alert.c.run,
        func.max(case(*((alert.c.severity == name, level) for level, name in enumerate(OUTCOMES)))).label("level"),
        func.count(case((alert.c.severity.in_(("critical", "warning")) & alert.c.acknowledged.is_(None), 1))).label(
            "unseen"
        ),
    )
    .where(alert.c.state == "firing")
    .group_by(alert.c.run)
    .subquery("open_alerts")
)
AT_ONCE = 32
_has_ended = runs.c.ended.is_not(None)

_is_set_aside = exists().where(rule_state.c.run == runs.c.id, rule_state.c.version == SET_ASIDE)


def _is(level: int) -> Any:
    return or_(_open.c.level == level, and_(_has_ended, runs.c.outcome == OUTCOMES[level]))


LEVEL = case(
    *((_is(level), level) for level in reversed(_ALARMING)),
    (or_(_is(_INFO), runs.c.state == "lost"), _INFO),
    (and_(_has_ended, runs.c.outcome == "healthy"), _HEALTHY),
    (and_(runs.c.ended.is_(None), runs.c.step > 0, ~_is_set_aside), _HEALTHY),
    else_=_UNKNOWN,
)
"""The place of a run's outcome in OUTCOMES, in a query of with_outcome()."""
ATTENTION = func.coalesce(_open.c.unseen, 0) > 0
"""Whether it has an open critical or warning alert that nobody acknowledged; there too."""


def with_outcome(query: Select[Any]) -> Select[Any]:
    """The query of runs, which may then name LEVEL and ATTENTION."""
    return query.select_from(runs.outerjoin(_open, _open.c.run == runs.c.id))


def unsettled(connection: Connection, judged_again: Sequence[str]) -> dict[str, str]:
    """Some runs that ended and have no outcome yet, or whose verdict may be another by now: their states, by id."""
    its = or_(runs.c.outcome.is_(None), runs.c.id.in_(judged_again))
    query = select(runs.c.id, runs.c.state).where(_has_ended, its).order_by(runs.c.ended.desc()).limit(AT_ONCE)
    return {row.id: row.state for row in connection.execute(query)}


def settle(connection: Connection, found: Mapping[str, str]) -> list[str]:
    """Writes the outcomes of runs that ended; those that have another one than before."""
    changed = []
    for run, word in found.items():
        its = runs.c.id == run, _has_ended, or_(runs.c.outcome.is_(None), runs.c.outcome != word)
        if connection.execute(update(runs).where(*its).values(outcome=word)).rowcount:
            note_change(connection, "run", run)
            changed.append(run)
    return changed


def unsettle(connection: Connection, project: str) -> None:
    """The rules of a project, or of all (""), have changed: the verdicts of its runs may be others."""
    its = runs.c.project == project if project else true()
    connection.execute(update(runs).where(runs.c.outcome.is_not(None), its).values(outcome=None))
