"""Finds the newest visible sample of every series of a run.

Sample store and tail say what came last. Where that belongs to steps that a later attempt has started again,
the newest sample before these steps is looked for, all series of a rank together: when 512 ranks have started again, it
is so with every series until its name comes again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from sqlalchemy import Connection

from perfagent_server.store.codec.tail_columns import row_of, rows_below_each_other
from perfagent_server.store.read.sql_samples import newest_row
from perfagent_server.store.read.view import CUT_NEVER, tail_by_rank, visible_attempts
from perfagent_server.store.samples import Newest, SampleSnapshot

__all__ = ["newest_of_run"]

Key = TypeVar("Key")


def newest_of_run(connection: Connection, snapshot: SampleSnapshot, run: str) -> dict[tuple[str, int], Newest]:
    """(name, rank) -> its newest visible sample."""
    attempts = visible_attempts(connection, run)
    best: dict[tuple[str, int], Newest] = {}
    for name, rank, stored in snapshot.newest():
        if stored is not None:
            _keep_newer(best, (name, rank), stored)
    for rank, name, found in _in_tail(connection, run, attempts):
        _keep_newer(best, (name, rank), found)
    tops = dict(attempts)
    of_ranks: dict[int, set[str]] = {}  # rank -> names of its series that are cut
    for name, rank in [key for key, (attempt, step, _, _) in best.items() if step > tops.get(attempt, CUT_NEVER)]:
        del best[name, rank]
        of_ranks.setdefault(rank, set()).add(name)
    for rank, names in of_ranks.items():
        for name, found in _before_the_cut(connection, snapshot, run, rank, attempts, names).items():
            best[name, rank] = found
    return best


def _before_the_cut(
    connection: Connection,
    snapshot: SampleSnapshot,
    run: str,
    rank: int,
    attempts: Sequence[tuple[int, int]],
    names: Collection[str],
) -> dict[str, Newest]:
    """The newest visible samples of series of one rank, by name."""
    in_tail: dict[int, list[tuple[str, Newest]]] = {}
    for _, name, newest in _in_tail(connection, run, attempts, rank):
        in_tail.setdefault(newest[0], []).append((name, newest))
    found: dict[str, Newest] = {}
    for attempt, top in reversed(attempts):
        missing = {name for name in names if name not in found}
        if not missing:
            break
        mine: dict[str, Newest] = {}
        for name, newest in snapshot.newest_up_to(rank, missing, attempt, top):
            _keep_newer(mine, name, newest)
        for name, newest in in_tail.get(attempt, ()):
            _keep_newer(mine, name, newest)
        found |= {name: newest for name, newest in mine.items() if name in missing}
    return found


def _keep_newer(best: dict[Key, Newest], key: Key, found: Newest) -> None:
    held = best.get(key)
    if held is None or found[:3] >= held[:3]:
        best[key] = found


def _in_tail(
    connection: Connection, run: str, attempts: Sequence[tuple[int, int]], rank: int | None = None
) -> Iterator[tuple[int, str, Newest]]:
    """(rank, name, sample): the newest visible row of each kind of groups in the tail."""
    tops = dict(attempts)
    for of, kinds in tail_by_rank(connection, run, rank):
        for (attempt, names), groups in kinds.items():
            step, time = rows_below_each_other(groups)
            at = newest_row(step, time, tops.get(attempt, CUT_NEVER))
            if at is not None:
                newest_step, newest_time = int(step[at]), float(time[at])
                for name, value in zip(names, row_of(groups, at), strict=True):
                    yield of, name, (attempt, newest_step, newest_time, value)
