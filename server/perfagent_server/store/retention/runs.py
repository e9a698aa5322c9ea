"""Runs that are over age, and those that lose resolution with age."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Connection, func, or_, select

from perfagent_server.store.retention.policy import LIVE_STATES, Scope
from perfagent_server.store.tables import run, run_storage, source

__all__ = ["OldRun", "old_runs", "too_fine_runs"]


class OldRun(NamedTuple):
    """over: when it ended, or was heard of last."""

    id: str
    name: str
    project: str
    over: float


_COLUMNS = (run.c.id, run.c.name, run.c.project, func.coalesce(run.c.ended, run.c.updated))


def _over_before(scope: Scope, before: float) -> tuple[Any, ...]:
    """The run ended, and was heard of last, before a time: by our clock, and by that of its senders, too. When one of the
    two was wrong then, nobody knows which."""
    by_its_clock = (
        select(source.c.id)
        .where(source.c.run == run.c.id, source.c.contact + func.coalesce(source.c.clock_offset_s, 0.0) >= before)
        .exists()
    )
    return func.coalesce(run.c.ended, run.c.updated) < before, run.c.updated < before, ~by_its_clock, scope.holds()


def old_runs(connection: Connection, scope: Scope, before: float, *, only: str | None = None) -> list[OldRun]:
    """only: looks at this run and at no other."""
    its = () if only is None else (run.c.id == only,)
    found = connection.execute(select(*_COLUMNS).where(*_over_before(scope, before), *its).order_by(run.c.updated))
    return [OldRun(*row) for row in found]


def too_fine_runs(
    connection: Connection, scope: Scope, before: float, width: int, *, only: str | None = None
) -> list[OldRun]:
    """Runs that are over for so long, and still have cells of fewer steps than `width`."""
    its = () if only is None else (run.c.id == only,)
    has_finer = or_(
        run_storage.c.run.is_(None), run_storage.c.finest_steps < width, run_storage.c.thinned < run.c.updated
    )
    found = connection.execute(
        select(*_COLUMNS)
        .outerjoin(run_storage, run_storage.c.run == run.c.id)
        .where(*_over_before(scope, before), run.c.state.not_in(LIVE_STATES), has_finer, *its)
        .order_by(run.c.updated)
    )
    return [OldRun(*row) for row in found]
