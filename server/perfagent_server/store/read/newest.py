"""Finds the newest visible sample of every series of a run.

Last values, bundles and tail say what came last. Where that belongs to steps that a later attempt has started again,
the newest sample before these steps is looked for, all series of a rank together: when 512 ranks have started again, it
is so with every series until its name comes again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from sqlalchemy import Connection, select

from perfagent_server.store.codec.aggregates import Floats, Ints
from perfagent_server.store.codec.blocks import decode_axis, decode_values
from perfagent_server.store.codec.tail_columns import row_of, rows_below_each_other
from perfagent_server.store.codec.wide_blocks import Place, bundles_of_rank, last_of_run
from perfagent_server.store.read.view import CUT_NEVER, tail_by_rank, visible_attempts
from perfagent_server.store.tables import axis, block, last, series

__all__ = ["Newest", "newest_of_run"]

Key = TypeVar("Key")


Newest = tuple[int, int, float, float]
"""Attempt, step, time and value of a sample. No class: `latest` of 512 ranks makes a hundred thousand of them."""


def newest_of_run(connection: Connection, run: str) -> dict[tuple[str, int], Newest]:
    """(name, rank) -> its newest visible sample."""
    attempts = visible_attempts(connection, run)
    best: dict[tuple[str, int], Newest] = {}
    keys: dict[int, tuple[str, int]] = {}
    rows = connection.execute(
        select(series.c.id, series.c.rank, series.c.name, last.c.attempt, last.c.step, last.c.time, last.c.value)
        .outerjoin(last, last.c.series == series.c.id)
        .where(series.c.run == run)
    )
    for series_id, rank, name, attempt, step, time, value in rows:
        keys[series_id] = (name, rank)
        if attempt is not None:
            best[name, rank] = (attempt, step, time, struct.unpack("<d", value)[0])
    for series_id, found in last_of_run(connection, run):
        _keep_newer(best, keys[series_id], found)
    for rank, name, found in _in_tail(connection, run, attempts):
        _keep_newer(best, (name, rank), found)
    tops = dict(attempts)
    cut = {key for key, (attempt, step, _, _) in best.items() if step > tops.get(attempt, CUT_NEVER)}
    of_ranks: dict[int, dict[int, str]] = {}  # rank -> ids and names of its series that are cut
    for series_id, key in keys.items() if cut else ():
        if key in cut:
            del best[key]
            of_ranks.setdefault(key[1], {})[series_id] = key[0]
    for rank, names in of_ranks.items():
        for name, found in _before_the_cut(connection, run, rank, attempts, names).items():
            best[name, rank] = found
    return best


def _before_the_cut(
    connection: Connection, run: str, rank: int, attempts: Sequence[tuple[int, int]], names: Mapping[int, str]
) -> dict[str, Newest]:
    """The newest visible samples of series of one rank, by name. names: those of the series, by id."""
    in_tail: dict[int, list[tuple[str, Newest]]] = {}
    for _, name, newest in _in_tail(connection, run, attempts, rank):
        in_tail.setdefault(newest[0], []).append((name, newest))
    found: dict[str, Newest] = {}
    for attempt, top in reversed(attempts):
        missing = {series_id: name for series_id, name in names.items() if name not in found}
        if not missing:
            break
        mine: dict[str, Newest] = {}
        for series_id, newest in _in_blocks(connection, list(missing), attempt, top):
            _keep_newer(mine, names[series_id], newest)
        for series_id, newest in _in_bundles(connection, Place(run, rank, attempt), set(missing), top):
            _keep_newer(mine, names[series_id], newest)
        for name, newest in in_tail.get(attempt, ()):
            _keep_newer(mine, name, newest)
        found |= {name: newest for name, newest in mine.items() if name in missing.values()}
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
            at = _newest_row(step, time, tops.get(attempt, CUT_NEVER))
            if at is not None:
                newest_step, newest_time = int(step[at]), float(time[at])
                for name, value in zip(names, row_of(groups, at), strict=True):
                    yield of, name, (attempt, newest_step, newest_time, value)


def _in_blocks(connection: Connection, ids: Sequence[int], attempt: int, top: int) -> Iterator[tuple[int, Newest]]:
    """(series, sample) out of each one's newest block that begins before the cut."""
    each = block.alias()
    newest = (
        select(each.c.block)
        .where(each.c.series == series.c.id, each.c.attempt == attempt, each.c.first_step <= top)
        .order_by(each.c.block.desc())
        .limit(1)
        .scalar_subquery()
    )
    rows = connection.execute(
        select(block.c.series, block.c.payload, axis.c.key, axis.c.payload.label("axis"))
        .join_from(series, block, (block.c.series == series.c.id) & (block.c.attempt == attempt))
        .join(axis, axis.c.key == block.c.axis)  # without one, retention took the samples
        .where(series.c.id.in_(ids), block.c.block == newest)
    )
    alike: dict[int, list[tuple[int, bytes, bytes]]] = {}
    for series_id, payload, key, axis_payload in rows:
        alike.setdefault(key, []).append((series_id, payload, axis_payload))
    for members in alike.values():
        step, time = decode_axis(members[0][2])
        at = _newest_row(step, time, top)
        if at is not None:
            values = decode_values([payload for _, payload, _ in members])[:, at].tolist()
            for (series_id, _, _), value in zip(members, values, strict=True):
                yield series_id, (attempt, int(step[at]), float(time[at]), value)


def _in_bundles(connection: Connection, place: Place, wanted: set[int], top: int) -> Iterator[tuple[int, Newest]]:
    for bundle in bundles_of_rank(connection, place, wanted):
        at = _newest_row(bundle.step, bundle.time, top)
        if at is not None:
            for series_id, value in zip(bundle.series.tolist(), bundle.value[:, at].tolist(), strict=True):
                if series_id in wanted:
                    yield series_id, (place.attempt, int(bundle.step[at]), float(bundle.time[at]), value)


def _newest_row(step: Ints, time: Floats, top: int) -> int | None:
    """Of the rows up to the step `top`; the last one of equals."""
    visible = np.flatnonzero(step <= top)
    if not len(visible):
        return None
    return int(visible[np.lexsort((time[visible], step[visible]))[-1]])
