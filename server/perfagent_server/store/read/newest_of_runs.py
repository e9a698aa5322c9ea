"""The newest value of one series in each of many runs, to sort a table by: as many statements for a thousand runs as for
one. Of runs that were started again, whose newest steps may be cut from view, `latest` knows it exactly."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from sqlalchemy import Connection, Select, func, select

from perfagent.wire import LOSS, parts_of
from perfagent.wire.loss_names import loss_of
from perfagent_server.store.codec.blocks import decode_axis
from perfagent_server.store.codec.tail import readable_groups
from perfagent_server.store.codec.wide_blocks import value_in_bundle
from perfagent_server.store.read.ranks import latest_over_ranks
from perfagent_server.store.read.sql_samples import newest_row
from perfagent_server.store.samples import Newest
from perfagent_server.store.tables import attempt, bundle, last, series, tail
from perfagent_server.store.tables import run as run_table

__all__ = ["asked_alone", "newest_of_runs"]

_ROWS_AT_ONCE = 100  # a frame may have megabytes


def asked_alone(wanted: Select[Any], name: str) -> Select[Any]:
    """Those of these runs that newest_of_runs() leaves out: with several attempts, or whose ranks send parts of it."""
    again = select(attempt.c.run).group_by(attempt.c.run).having(func.count() > 1)
    in_parts = select(series.c.run).where(series.c.name == parts_of(name)) if parts_of(name) else None
    runs = again if in_parts is None else again.union(in_parts)
    return select(run_table.c.id).where(run_table.c.id.in_(wanted), run_table.c.id.in_(runs))


def newest_of_runs(connection: Connection, wanted: Select[Any], name: str) -> dict[str, float]:
    """Run -> its newest value of this series, of those of these runs that have one. `loss`: whatever a run calls it."""
    wanted = select(run_table.c.id).where(run_table.c.id.in_(wanted), run_table.c.id.not_in(asked_alone(wanted, name)))
    best: dict[str, dict[str, dict[int, Newest]]] = {}
    for found in (_in_last, _in_bundles, _in_tail):
        for run, its, rank, newest in found(connection, wanted, name):
            ranks = best.setdefault(run, {}).setdefault(its, {})
            if rank not in ranks or newest[:3] >= ranks[rank][:3]:
                ranks[rank] = newest
    values = {}
    for run, names in best.items():
        shown = loss_of(names) if name == LOSS else name
        if shown is not None:
            values[run] = latest_over_ranks(shown, names[shown]).value
    return values


_Found = Iterator[tuple[str, str, int, Newest]]


def _is_named(name: str) -> Any:
    return series.c.name.icontains(LOSS) if name == LOSS else series.c.name == name


def _in_last(connection: Connection, wanted: Select[Any], name: str) -> _Found:
    columns = (series.c.run, series.c.name, series.c.rank, last.c.attempt, last.c.step, last.c.time, last.c.value)
    query = select(*columns).join_from(series, last, last.c.series == series.c.id)
    for run, its, rank, *newest, value in connection.execute(query.where(series.c.run.in_(wanted), _is_named(name))):
        yield run, its, rank, (*newest, struct.unpack("<d", value)[0])


def _in_bundles(connection: Connection, wanted: Select[Any], name: str) -> _Found:
    columns = (series.c.run, series.c.name, series.c.rank, series.c.id, bundle.c.attempt)
    of_rank = (bundle.c.run == series.c.run) & (bundle.c.rank == series.c.rank)
    holds = (bundle.c.low <= series.c.id) & (bundle.c.high >= series.c.id)
    query = select(*columns, bundle.c.members, bundle.c.axis, bundle.c.newest).join_from(
        series, bundle, of_rank & holds
    )
    query = query.where(series.c.run.in_(wanted), _is_named(name))
    rows = connection.execute(query, execution_options={"yield_per": _ROWS_AT_ONCE})
    for run, its, rank, series_id, of, members, axis, newest in rows:
        value = value_in_bundle(members, newest, series_id)
        if value is not None:
            step, time = decode_axis(axis)
            yield run, its, rank, (of, int(step[-1]), float(time[-1]), value)


def _in_tail(connection: Connection, wanted: Select[Any], name: str) -> _Found:
    query = select(tail.c.run, tail.c.rank, tail.c.attempt, tail.c.frame)
    query = query.where(tail.c.run.in_(wanted), tail.c.samples > 0).order_by(tail.c.id)
    rows = connection.execute(query, execution_options={"yield_per": _ROWS_AT_ONCE})
    for run, rank, of, frame in rows:
        for group in readable_groups(frame):
            mine = [at for at, its in enumerate(group.names) if (LOSS in its.lower() if name == LOSS else its == name)]
            if mine:
                step, time = np.asarray(group.step_list()), np.asarray(group.time_list())
                at = newest_row(step, time, int(step.max()))
                assert at is not None
                for place, column in zip(mine, group.numbers(mine), strict=True):
                    yield run, group.names[place], rank, (of, int(step[at]), float(time[at]), column[at])
