"""Answers questions about a run: the newest values, a series in so many buckets, ranks side by side, every sample.

Every question is answered from the sample store and the tail together, inside one read transaction (view.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from sqlalchemy import Connection, Select, bindparam, func, select

from perfagent.wire import LOSS, Latest, LogRow, RankMatrix, Series, metric, parts_of, whole_of
from perfagent.wire.loss_names import loss_of
from perfagent_server.database import Database
from perfagent_server.store.codec.aggregates import Cells, Floats, concatenate, reduced
from perfagent_server.store.codec.tail import unpack_whole
from perfagent_server.store.read.newest import newest_of_run
from perfagent_server.store.read.newest_of_runs import asked_alone, newest_of_runs
from perfagent_server.store.read.ranks import latest_over_ranks, over_ranks
from perfagent_server.store.read.sql_samples import SqlSamples
from perfagent_server.store.read.view import (
    View,
    cells_by_rank,
    few_samples,
    in_order,
    open_view,
    open_views,
    stored_parts,
    value_at,
)
from perfagent_server.store.samples import Newest, SampleSnapshot
from perfagent_server.store.sharded_norms import root_of_sums
from perfagent_server.store.shards import EVERY
from perfagent_server.store.statements import Prepared
from perfagent_server.store.stored import FromTail
from perfagent_server.store.tables import series, tail

__all__ = ["Answers", "Snapshots"]

log = logging.getLogger("perfagent.server")

MAX_POINTS = 20_000
_LOOK_BACK = 2048  # steps in which ranks that measure at different periods have one in common: a period is at most 1024

_rows = select(
    tail.c.id, tail.c.run, tail.c.attempt, tail.c.rank, tail.c.source, tail.c.seq, tail.c.received, tail.c.frame
).limit(bindparam("most"))
_newer_rows = _rows.where(tail.c.id > bindparam("after")).order_by(tail.c.id)
_newer = Prepared(_newer_rows)
# shard_of(), as PostgreSQL says it. SQLite has no MD5, and its server holds every shard.
_shard = func.substr(func.md5(tail.c.run), 1, 1)
_newer_of_shards = Prepared(_newer_rows.where(func.strpos(bindparam("shards"), _shard) > 0))
_newer_of_run = Prepared(_newer_rows.where(tail.c.run == bindparam("run")))
_older_of_run = Prepared(
    _rows.where(tail.c.run == bindparam("run"), tail.c.id <= bindparam("until")).order_by(tail.c.id.desc())
)


Snapshots = Callable[[Connection, str], SampleSnapshot]
"""Opens the sample store for one run and one transaction."""


class Answers:
    """The half of SqlStore that reads. snapshot: of where the compacted samples are."""

    def __init__(self, database: Database, snapshot: Snapshots = SqlSamples) -> None:
        self.database, self._snapshot = database, snapshot

    def names(self, run: str) -> list[str]:
        with self.database.read() as connection:
            found = set(connection.execute(select(series.c.name).distinct().where(series.c.run == run)).scalars())
        return sorted(found | {whole for name in found if (whole := whole_of(name))})

    def since(
        self,
        tail_id: int,
        limit: int,
        max_bytes: int | None = None,
        *,
        run: str | None = None,
        shards: frozenset[str] = EVERY,
    ) -> list[FromTail]:
        wanted = {"after": tail_id, "most": limit}
        if run is not None:
            return self._frames(_newer_of_run, {**wanted, "run": run}, max_bytes)
        if shards == EVERY:
            return self._frames(_newer, wanted, max_bytes)
        return self._frames(_newer_of_shards, {**wanted, "shards": "".join(sorted(shards))}, max_bytes)

    def until(self, tail_id: int, limit: int, max_bytes: int, *, run: str) -> list[FromTail]:
        return self._frames(_older_of_run, {"until": tail_id, "most": limit, "run": run}, max_bytes)[::-1]

    def _frames(self, rows_of: Prepared, wanted: dict[str, Any], max_bytes: int | None) -> list[FromTail]:
        found: list[FromTail] = []
        size = 0
        with self.database.read() as connection, closing(rows_of.stream(connection, wanted)) as rows:
            for row in rows:
                frame = row[-1]
                size += len(frame) if isinstance(frame, bytes) else 0
                if found and max_bytes is not None and size > max_bytes:
                    break
                found.append(_from_tail(*row))
        return found

    def newest_id(self) -> int:
        with self.database.read() as connection:
            return connection.execute(select(func.max(tail.c.id))).scalar() or 0

    def latest(self, run: str) -> dict[str, Latest]:
        with self.database.read() as connection:
            best = newest_of_run(connection, self._snapshot(connection, run), run)
        grouped: dict[str, dict[int, Newest]] = {}
        for (name, rank), found in sorted(best.items()):
            grouped.setdefault(name, {})[rank] = found
        combined = {name: latest_over_ranks(name, found) for name, found in grouped.items()}
        for name, of_ranks in grouped.items():
            whole = whole_of(name)
            if whole and whole not in combined:
                newest_whole = self._latest_whole(run, whole, name, of_ranks)
                if newest_whole is not None:
                    combined[whole] = newest_whole
        return combined

    def newest_of_runs(self, wanted: Select[Any], name: str) -> dict[str, float]:
        with self.database.read() as connection:
            values = newest_of_runs(connection, wanted, name)
            alone = list(connection.execute(asked_alone(wanted, name)).scalars())
        for run in alone:
            newest = self.latest(run)
            shown = loss_of(newest) if name == LOSS else name
            if shown in newest:
                values[run] = newest[shown].value
        return values

    def series(
        self,
        run: str,
        name: str,
        *,
        rank: int | Literal["all"] = "all",
        from_step: int | None = None,
        to_step: int | None = None,
        points: int = 1000,
    ) -> Series:
        points = min(max(points, 1), MAX_POINTS)
        with self.database.read() as connection:
            snapshot = self._snapshot(connection, run)
            view = open_view(connection, snapshot, run, name, None if rank == "all" else rank)
            parts = parts_of(name) if rank == "all" and not view.stored.ranks else ""
            if parts:
                view = open_view(connection, snapshot, run, parts, None)
            span = _clamped(view.extent(), from_step, to_step)
            if span is None:
                return _answer(name, rank, 1, True, concatenate([]), np.empty(0), 0)
            first, last_step = span
            if parts:
                width = _width(first, last_step, points)
                cells = _whole(view, first, last_step, width)
                return _answer(name, rank, width, False, cells, cells.mean, first)
            return _of_view(name, rank, view, span, points)

    def newest(
        self, run: str, names: Sequence[str], *, steps: int | None, points: int = MAX_POINTS
    ) -> dict[str, Series]:
        with self.database.read() as connection:
            views = open_views(connection, self._snapshot(connection, run), run, names, None)
            leader = views[names[0]].extent()
            if leader is None:
                return {}
            found = {}
            for name, view in views.items():
                first = None if steps is None else leader[1] - steps + 1
                span = _clamped(view.extent(), first, leader[1])
                if span is not None:
                    found[name] = _of_view(name, "all", view, span, min(points, steps or points))
        return found

    def ranks(
        self, run: str, name: str, *, from_step: int | None = None, to_step: int | None = None, points: int = 200
    ) -> RankMatrix:
        points = min(max(points, 1), MAX_POINTS)
        unit = metric(name).unit
        with self.database.read() as connection:
            view = open_view(connection, self._snapshot(connection, run), run, name, None)
            span = _clamped(view.extent(), from_step, to_step)
            if span is None:
                return RankMatrix(name=name, unit=unit, ranks=[], step=[], mean=[])
            by_rank = cells_by_rank(view, *span, _width(*span, points))
            found = {rank: (cells.step, cells.mean) for rank, cells in by_rank}
        ranks = list(found)
        steps = np.unique(np.concatenate([step for step, _ in found.values()])) if ranks else np.empty(0, np.int64)
        mean = np.full((len(ranks), len(steps)), np.nan)
        for row, (step, means) in enumerate(found.values()):
            mean[row, np.searchsorted(steps, step)] = means
        return RankMatrix(
            name=name, unit=unit, ranks=ranks, step=np.maximum(steps, span[0]).tolist(), mean=mean.tolist()
        )

    def samples(self, run: str, names: Collection[str] | None = None) -> Iterator[LogRow]:
        """See MetricStore. Each series is read in a transaction of its own and decoded block by block outside of it."""
        its = series.c.run == run if names is None else (series.c.run == run) & series.c.name.in_(names)
        with self.database.read() as connection:
            query = select(series.c.name, series.c.rank).where(its).order_by(series.c.name, series.c.rank)
            wanted = connection.execute(query).all()
        for name, rank in wanted:
            with self.database.read() as connection:
                view = open_view(connection, self._snapshot(connection, run), run, name, rank)
                stored = stored_parts(view)
            yield from in_order(view, stored, name, rank)

    def _latest_whole(self, run: str, whole: str, name: str, parts: Mapping[int, Newest]) -> Latest | None:
        """The newest step of which every rank has sent its part."""
        newest_attempt = max(attempt for attempt, _, _, _ in parts.values())
        mine = {rank: part for rank, part in parts.items() if part[0] == newest_attempt}
        steps = {step for _, step, _, _ in mine.values()}
        if len(steps) == 1:
            time = max(time for _, _, time, _ in mine.values())
            return Latest(
                value=_root(value for _, _, _, value in mine.values()), step=steps.pop(), time=time, rank="all"
            )
        newest = self.series(run, whole, from_step=max(0, min(steps) - _LOOK_BACK), points=MAX_POINTS)
        if not newest.step or newest.time is None:
            return None
        step, value = newest.step[-1], newest.mean[-1]
        if newest.nonfinite[-1]:  # cells do not keep which it was, NaN or infinite: the samples do
            with self.database.read() as connection:
                snapshot = self._snapshot(connection, run)
                known = [value_at(open_view(connection, snapshot, run, name, rank), step) for rank in mine]
            root = _root(part for part in known if part is not None)
            value = root if not math.isfinite(root) else math.nan
        return Latest(value=value, step=step, time=newest.time[-1], rank="all")


def _whole(view: View, first: int, last_step: int, width: int) -> Cells:
    """Cells of a value that ranks send parts of: each attempt's own ranks together."""
    cells = []
    for attempt, top in view.attempts:
        ranks = {rank for rank, of in view.stored.ends if of == attempt}
        ranks |= {rank for (rank, of), samples in view.tail.items() if of == attempt and len(samples)}
        mine = replace(view, attempts=[(attempt, top)])
        by_rank = cells_by_rank(mine, first, last_step, width)
        cells.append(root_of_sums((of_rank for _, of_rank in by_rank), len(ranks)))
    return reduced(concatenate(cells), width)


def _of_view(name: str, rank: int | Literal["all"], view: View, span: tuple[int, int], points: int) -> Series:
    """The series of a view between two steps: its samples where they are few, else in buckets."""
    single = few_samples(view, *span, points)
    if single is not None:
        return _answer(name, rank, 1, True, single, single.mean, span[0])
    width = _width(*span, points)
    by_rank = cells_by_rank(view, *span, width)
    cells, mean = over_ranks(name, (cells for _, cells in by_rank))
    return replace(_answer(name, rank, width, False, cells, mean, span[0]), ranks=len(view.holders))


def _root(parts: Iterable[float]) -> float:
    total = sum(parts)
    return math.sqrt(total) if total >= 0 else math.nan


def _clamped(extent: tuple[int, int] | None, first: int | None, last_step: int | None) -> tuple[int, int] | None:
    if extent is None:
        return None
    low = extent[0] if first is None else max(first, extent[0])
    high = extent[1] if last_step is None else min(last_step, extent[1])
    return (low, high) if low <= high else None


def _width(first: int, last_step: int, points: int) -> int:
    """Steps per bucket: the smallest power of two with which the range has at most `points` buckets."""
    width = 1
    while last_step // width - first // width + 1 > points:
        width *= 2
    return width


def _answer(name: str, rank: int | str, width: int, exact: bool, cells: Cells, mean: Floats, first: int) -> Series:
    empty = cells.count == cells.nonfinite
    return Series(
        name=name,
        rank=rank,
        unit=metric(name).unit,
        exact=exact,
        step=np.maximum(cells.step, first).tolist(),
        min=np.where(empty, np.nan, cells.min).tolist(),
        max=np.where(empty, np.nan, cells.max).tolist(),
        mean=mean.tolist(),
        count=cells.count.tolist(),
        nonfinite=cells.nonfinite.tolist(),
        time=cells.time.tolist(),
        bucket_steps=width,
    )


def _from_tail(
    id_: int, run: str, attempt: int, rank: int, source: str, seq: int, received: float, frame: bytes
) -> FromTail:
    """A row that cannot be read is an empty frame of no attempt: what reads the tail must get past it. SQLite keeps a text in
    a column of numbers."""
    try:
        return FromTail(id_, run, int(attempt), int(rank), source, int(seq), float(received), *unpack_whole(frame))
    except Exception:  # noqa: BLE001 - bytes that nobody wrote may raise anything in msgpack and zstd
        _say_unreadable(id_)
        return FromTail(id_, run, -1, 0, source, 0, 0.0, [], [])


@lru_cache(maxsize=1000)
def _say_unreadable(id_: int) -> None:
    """Once: it is met again until it goes with its run."""
    log.error("row %d of the tail cannot be read, and is passed over", id_)
