"""How the earlier attempts of a run ended: what its verdict adds once the run was started again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, and_, func, select

from perfagent_server.rules.rule import USER_ALERT
from perfagent_server.rules.texts import Language, sentence
from perfagent_server.store.tables import alert, source
from perfagent_server.store.tables import attempt as attempts

__all__ = ["earlier_attempts"]

_MOST_SAID = 3  # the newest ones
_WORST_FIRST = ("oom", "failed", "killed", "preempted", "lost", "finished")


def earlier_attempts(connection: Connection, run: str, language: Language) -> str:
    """A sentence on all attempts but the newest; empty where there was one only."""
    newest = select(attempts.c.attempt, attempts.c.started, func.count().over().label("attempts"))
    newest = newest.where(attempts.c.run == run).order_by(attempts.c.attempt.desc()).limit(_MOST_SAID + 1)
    rows = connection.execute(newest).all()[::-1]  # a job may have been started thousands of times
    if len(rows) < 2:
        return ""
    more = rows[0].attempts - len(rows)
    said = [
        _said(connection, run, more + number, row.attempt, row.started, following.started, language)
        for number, (row, following) in enumerate(pairwise(rows), start=1)
    ]
    told = [one for one in said if one]
    before = [sentence("attempts_before", language, count=more)] if more > 0 else []
    return sentence("earlier_attempts", language, attempts=[*before, *told]) if told else ""


def _said(
    connection: Connection, run: str, number: int, attempt: int, began: float, until: float, language: Language
) -> str:
    columns = source.c.state, func.max(source.c.step).label("step")
    its = and_(source.c.run == run, source.c.attempt == attempt)
    ends = connection.execute(select(*columns).where(its).group_by(source.c.state)).all()
    states = {row.state for row in ends}
    worst = next((state for state in _WORST_FIRST if state in states), "")
    step = max((row.step for row in ends), default=0)
    if not step and worst in ("lost", ""):
        return ""  # a process that never trained, nor said why it ended: as a launcher before its script
    how, rules = worst or "ended", _alerts(connection, run, began, until)
    return sentence("attempt", language, number=number, how=how, step=step, rules=rules)


def _alerts(connection: Connection, run: str, began: float, until: float) -> list[str]:
    """The first rules that fired in it. What a script said is no cause of its end."""
    its = and_(alert.c.run == run, alert.c.fired >= began, alert.c.fired < until)
    caused = and_(its, alert.c.severity != "info", alert.c.rule != USER_ALERT)
    found: Sequence[Any] = (
        connection.execute(select(alert.c.rule).where(caused).order_by(alert.c.fired)).scalars().all()
    )
    return list(dict.fromkeys(found))[:_MOST_SAID]
