"""What goes when there is more than a size budget allows: the oldest first at full resolution, then cells of old runs, then
old runs. Never a run that goes on or was heard of within a day, and never one with the tag `keep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, func, select

from perfagent_server.store.retention.policy import LIVE_STATES, is_not_kept
from perfagent_server.store.tables import run, run_storage

__all__ = ["Action", "Candidate", "Step", "candidates", "plan"]

Action = Literal["samples", "rollup16", "rollup256", "run"]
_SILENT_FOR_S = 86_400.0
"""Before that a run may go on: a lost one's agent keeps what it could not send, and a failed one restarts from its
checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A run that is over, and what it has. over: when it ended, or was heard of last. finest_steps: of its finest cells."""

    run: str
    name: str
    project: str
    over: float
    finest_steps: int
    samples_bytes: int
    cells_bytes: int
    rollups_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """action: what the run loses: samples, cells of 16 steps, cells of 256 steps, or all of it. bytes: what that is
    expected to free."""

    action: Action
    run: Candidate
    bytes: int


def candidates(connection: Connection, project: str | None, now: float, *, only: str | None = None) -> list[Candidate]:
    """Of a project, or of all; the oldest first. only: looks at this run and at no other."""
    over = func.coalesce(run.c.ended, run.c.updated)
    sizes = (run_storage.c[f"{name}_bytes"] for name in ("samples", "cells", "rollups", "other"))
    query = (
        select(run.c.id.label("run"), run.c.name, run.c.project, over.label("over"), run_storage.c.finest_steps, *sizes)
        .join(run_storage, run_storage.c.run == run.c.id)
        .where(run.c.state.not_in(LIVE_STATES), run.c.updated < now - _SILENT_FOR_S, is_not_kept())
        .order_by(over, run.c.id)
    )
    if project is not None:
        query = query.where(run.c.project == project)
    if only is not None:
        query = query.where(run.c.id == only)
    return [Candidate(**row) for row in connection.execute(query).mappings()]


def plan(runs: Sequence[Candidate], excess: float) -> list[Step]:
    """The steps that free `excess` bytes, in the order in which they are taken; all that are possible if that is not
    enough."""
    found: list[Step] = []
    freed = dict.fromkeys((one.run for one in runs), 0)
    for action in ("samples", "rollup16", "rollup256", "run"):
        for one in runs:
            if excess <= 0:
                return found
            gain = _gain(action, one, freed[one.run])
            if gain > 0:
                found.append(Step(action, one, gain))
                freed[one.run] += gain
                excess -= gain
    return found


def _gain(action: Action, one: Candidate, freed: int) -> int:
    """Bytes. Sixteen cells become one, and a step that was taken before frees nothing."""
    if action == "samples":
        return one.samples_bytes if one.finest_steps < 16 else 0
    if action == "rollup16":
        return one.cells_bytes * 15 // 16 if one.finest_steps < 256 else 0
    if action == "rollup256":
        return one.rollups_bytes * 15 // 17 if one.finest_steps < 4096 else 0
    return max(one.samples_bytes + one.cells_bytes + one.rollups_bytes + one.other_bytes - freed, 1)
