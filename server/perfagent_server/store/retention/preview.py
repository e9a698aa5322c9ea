"""What a pass of retention would do now. Nothing is changed but the known sizes of runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from perfagent_server.store.retention.budget import Step, candidates, plan
from perfagent_server.store.retention.expiry import EXPIRIES
from perfagent_server.store.retention.policy import DAY_S, Policies, Scope
from perfagent_server.store.retention.resolution import old_blocks, old_bundles
from perfagent_server.store.retention.runs import OldRun, old_runs, too_fine_runs
from perfagent_server.store.retention.sizes import total_bytes

__all__ = ["ROLLUPS", "Excess", "Preview", "excesses", "preview"]

ROLLUPS = (("rollup16_days", 256), ("rollup256_days", 4096))
"""The ages of cells, and the width that they get then."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A size budget that is exceeded. project: None for the whole database; steps: what would free as much."""

    project: str | None
    limit: float
    used: int
    steps: list[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """refused: why nothing would go at all; empty if something may. aged: (what, projects, how many); runs: that would be
    deleted for their age; budgets: those that are exceeded."""

    refused: str
    aged: list[tuple[str, str, int]]
    runs: list[OldRun]
    budgets: list[Excess]


def preview(connection: Connection, policies: Policies, now: float, used: int, refused: str) -> Preview:
    runs = [
        one
        for scope, days in policies.scopes("runs_days")
        for one in old_runs(connection, scope, now - days * DAY_S)
    ]  # fmt: skip
    return Preview(
        refused=refused,
        aged=[one for one in _aged(connection, policies, now) if one[2]],
        runs=runs,
        budgets=excesses(connection, policies, now, used),
    )


def _aged(connection: Connection, policies: Policies, now: float) -> Iterator[tuple[str, str, int]]:
    for scope, days in policies.scopes("samples_days"):
        before = now - days * DAY_S
        blocks = old_blocks(scope, before, float("-inf")).order_by(None).subquery()
        bundles = old_bundles(scope, before).subquery()
        count = sum(
            int(connection.execute(select(func.count()).select_from(found)).scalar_one()) for found in (blocks, bundles)
        )
        yield "blocks_thinned", scope.words, count
    for field, width in ROLLUPS:
        for scope, days in policies.scopes(field):
            yield (
                f"runs_rolled_up_{width}",
                scope.words,
                len(too_fine_runs(connection, scope, now - days * DAY_S, width)),
            )
    for expiry in EXPIRIES:
        scopes = policies.scopes(expiry.age) if expiry.of_project else global_scope(policies, expiry.age)
        for scope, days in scopes:
            yield expiry.counter, scope.words, expiry.count(connection, now - days * DAY_S, scope)


def global_scope(policies: Policies, field: str) -> list[tuple[Scope, float]]:
    """For what belongs to no project."""
    days = getattr(policies.default, field)
    return [] if days is None else [(Scope(None), days)]


def excesses(connection: Connection, policies: Policies, now: float, used: int) -> list[Excess]:
    """used: bytes of the whole database. Projects come first: what they give up frees the database, too."""
    budgets = [
        (scope.project, limit, total_bytes(connection, scope.project)) for scope, limit in policies.scopes("max_bytes")
    ]
    if policies.default.max_bytes is not None:
        budgets.append((None, policies.default.max_bytes, used))
    return [
        Excess(project, limit, size, plan(candidates(connection, project, now), size - limit))
        for project, limit, size in budgets
        if size > limit
    ]
