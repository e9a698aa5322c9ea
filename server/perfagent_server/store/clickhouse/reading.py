"""Compacted samples in ClickHouse: what the readers ask of them. See samples.py, and marks.py for which rows count.

First and last steps and the newest values are kept in SQL beside the marks, so that only charts and exports ask ClickHouse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from perfagent_server.store.clickhouse.connection import ClickHouse
from perfagent_server.store.clickhouse.marks import Marks, Rollup, marks_of
from perfagent_server.store.clickhouse.schema import cell, sample
from perfagent_server.store.codec.aggregates import Cells
from perfagent_server.store.codec.blocks import BLOCK_STEPS, CELL_STEPS, Samples
from perfagent_server.store.read.sql_samples import last_values, series_ids
from perfagent_server.store.samples import Newest, Part, StoredSeries
from perfagent_server.store.tables import sample_extent, series

__all__ = ["AGGREGATES", "COUNTS", "LEVELS", "ClickHouseSamples"]

LEVELS = (16, 256, 4096)
COUNTS = "run = {run:String} AND batch > {floor:UInt64} AND batch <= {newest:UInt64} AND NOT has({dead:Array(UInt64)}, batch)"
"""The condition for rows of `sample` that count."""
AGGREGATES = (
    "min(if(isFinite(value), value, inf)), max(if(isFinite(value), value, -inf)), sum(if(isFinite(value), value, 0)), "
    "count(), countIf(NOT isFinite(value)), min(time)"
)
"""Of samples: minimum, maximum and sum of the finite values, count, non-finite count, time of the first."""
_OF_CELLS = (
    "min(reinterpretAsFloat64(low)), max(reinterpretAsFloat64(high)), sum(total), sum(count), sum(nonfinite), min(time)"
)
_CELL = [
    ("rank", "<i4"), ("step", "<i8"), ("min", "<f8"), ("max", "<f8"), ("sum", "<f8"), ("count", "<u8"), ("nonfinite", "<u8"),
    ("time", "<f8"),
]  # fmt: skip
_SAMPLE = [("step", "<i8"), ("time", "<f8"), ("bits", "<u8")]


class ClickHouseSamples:
    """See SampleSnapshot. The marks are read at once, ClickHouse is asked when something is wanted of it."""

    def __init__(self, clickhouse: ClickHouse, connection: Connection, run: str) -> None:
        self._clickhouse, self._connection, self._run = clickhouse, connection, run
        self._marks = marks_of(connection, run)

    def series(self, names: Sequence[str], rank: int | None) -> dict[str, StoredSeries]:
        ids = series_ids(self._connection, self._run, names, rank)
        ends = self._ends(names, rank)
        return {
            name: _Series(self._clickhouse, self._marks, name, list(of.values()), ends.get(name, {}))
            for name, of in ids.items()
        }

    def newest(self) -> Iterator[tuple[str, int, Newest | None]]:
        for _, name, rank, found in last_values(self._connection, self._run):
            yield name, rank, found

    def newest_up_to(self, rank: int, names: Collection[str], attempt: int, top: int) -> Iterator[tuple[str, Newest]]:
        thinned = self._marks.rollups.get(attempt, Rollup()).thinned
        ordered = sorted(names)
        found = self._clickhouse.rows(
            f"SELECT toUInt32(indexOf({{names:Array(String)}}, name) - 1), newest.1, newest.2, newest.5 FROM ("
            f"SELECT toString(name) AS name, max(tuple(step, time, batch, row, bits)) AS newest "
            f"FROM {sample(self._clickhouse)} WHERE {COUNTS} AND rank = {{rank:Int32}} AND attempt = {{attempt:Int64}} "
            "AND step <= {top:Int64} AND step >= {thinned:Int64} AND name IN {names:Array(String)} GROUP BY name)",
            {
                **self._marks.parameters(), "rank": rank, "attempt": attempt, "top": top, "thinned": thinned,
                "names": ordered,
            },
            [("name", "<u4"), *_SAMPLE],
        )  # fmt: skip
        values = np.ascontiguousarray(found["bits"]).view("<f8").tolist()
        for at, step, time, value in zip(
            found["name"].tolist(), found["step"].tolist(), found["time"].tolist(), values, strict=True
        ):
            yield ordered[at], (attempt, step, time, value)

    def _ends(self, names: Sequence[str], rank: int | None) -> dict[str, dict[tuple[int, int], tuple[int, int, int]]]:
        """Name -> (rank, attempt) -> first step, last step and samples."""
        query = (
            select(series.c.name, series.c.rank, sample_extent)
            .join_from(series, sample_extent, sample_extent.c.series == series.c.id)
            .where(series.c.run == self._run, series.c.name.in_(names))
        )
        if rank is not None:
            query = query.where(series.c.rank == rank)
        found: dict[str, dict[tuple[int, int], tuple[int, int, int]]] = {}
        for row in self._connection.execute(query):
            found.setdefault(row.name, {})[row.rank, row.attempt] = (row.first_step, row.last_step, row.samples)
        return found


class _Series:
    """See StoredSeries."""

    def __init__(
        self,
        clickhouse: ClickHouse,
        marks: Marks,
        name: str,
        ranks: Collection[int],
        extents: dict[tuple[int, int], tuple[int, int, int]],
    ) -> None:
        self._clickhouse, self._marks, self._name = clickhouse, marks, name
        self.ranks = ranks
        self.ends = {key: (low, high) for key, (low, high, _) in extents.items()}
        self._samples = {key: samples for key, (_, _, samples) in extents.items()}

    def loose(self) -> dict[tuple[int, int], Samples]:
        return {}

    def count(self, attempt: int, first: int, end: int) -> int:
        mine = {
            key: ends for key, ends in self.ends.items() if key[1] == attempt and ends[0] <= end and ends[1] >= first
        }
        whole = [key for key, (low, high) in mine.items() if low >= first and high <= end]
        if len(whole) == len(mine):
            return sum(self._samples[key] for key in whole)
        found = self._clickhouse.rows(
            f"SELECT count() FROM {sample(self._clickhouse)} WHERE {self._where()}",
            self._parameters(self.ranks, attempt, first, end),
            [("count", "<u8")],
        )
        return int(found["count"][0])

    def parts(self, attempt: int, first: int, end: int) -> Sequence[Part]:
        if end < first or not any(of == attempt for _, of in self.ends):
            return []
        rollup = self._marks.rollups.get(attempt, Rollup())
        found = self._clickhouse.rows(
            f"SELECT step, time, bits FROM {sample(self._clickhouse)} WHERE {self._where()} "
            "AND (step >= {thinned:Int64} OR batch > {rolled:UInt64}) ORDER BY step, time, batch, row",
            self._parameters(self.ranks, attempt, first, end) | {"thinned": rollup.thinned, "rolled": rollup.batch},
            _SAMPLE,
        )
        step, time = np.ascontiguousarray(found["step"]), np.ascontiguousarray(found["time"])
        samples = Samples(step, time, np.ascontiguousarray(found["bits"]).view("<f8"))
        numbers = np.unique(step // BLOCK_STEPS).tolist()
        parts = [Part(number, _piece(samples, number)) for number in numbers]
        lowest = min(low for (_, of), (low, _) in self.ends.items() if of == attempt)
        if max(first, lowest) < rollup.thinned:
            parts.insert(0, Part(max(first, lowest) // BLOCK_STEPS, lambda: None))
        return parts

    def cells(
        self, ranks: Collection[int], attempt: int, first: int, end: int, width: int
    ) -> Iterator[tuple[int, Cells]]:
        rollup = self._marks.rollups.get(attempt, Rollup())
        level = max((level for level in LEVELS if level <= width), default=0)
        low = high = first
        if level:
            low, high = -(-first // level) * level, min((end + 1) // level * level, rollup.step // level * level)
        if low >= high:
            low = high = first
        queries = [  # what has no cells, or not of its edges
            self._of_samples(
                "(step < {low:Int64} OR step >= {high:Int64}) AND (step >= {thinned:Int64} OR batch > {rolled:UInt64})"
            )
        ]
        if low < high:
            queries.append(self._of_cells("level = {level:UInt16} AND step >= {low:Int64} AND step < {high:Int64}"))
            if not rollup.is_whole:  # and what came for these steps after they were summed up
                queries.append(
                    self._of_samples("step >= {low:Int64} AND step < {high:Int64} AND batch > {rolled:UInt64}")
                )
        if first < rollup.thinned:
            queries.append(
                self._of_cells(
                    "level = {cell:UInt16} AND step > {first:Int64} - {cell:UInt16} AND step <= {end:Int64} "
                    "AND step < {thinned:Int64} AND (step < {low:Int64} OR step >= {high:Int64})"
                )
            )
        found = self._clickhouse.rows(
            " UNION ALL ".join(queries),
            self._parameters(ranks, attempt, first, end)
            | {"low": low, "high": high, "level": level, "cell": CELL_STEPS, "width": width, "thinned": rollup.thinned}
            | {"rolled": rollup.batch, "generations": list(rollup.generations)},
            _CELL,
        )
        for rank in np.unique(found["rank"]).tolist():
            yield rank, _cells_of(found[found["rank"] == rank])

    def _of_samples(self, condition: str) -> str:
        return (
            f"SELECT rank, intDiv(step, {{width:Int64}}) * {{width:Int64}} AS start, {AGGREGATES} "
            f"FROM {sample(self._clickhouse)} WHERE {self._where()} AND {condition} GROUP BY rank, start"
        )

    def _of_cells(self, condition: str) -> str:
        return (
            f"SELECT rank, if({{width:Int64}} > level, intDiv(step, {{width:Int64}}) * {{width:Int64}}, step) AS start, "
            f"{_OF_CELLS} FROM {cell(self._clickhouse)} WHERE run = {{run:String}} AND name = {{name:String}} "
            "AND rank IN {ranks:Array(Int32)} AND attempt = {attempt:Int64} "
            f"AND has({{generations:Array(UInt64)}}, generation) AND {condition} GROUP BY rank, start"
        )

    def _where(self) -> str:
        return (
            f"{COUNTS} AND name = {{name:String}} AND rank IN {{ranks:Array(Int32)}} AND attempt = {{attempt:Int64}} "
            "AND step >= {first:Int64} AND step <= {end:Int64}"
        )

    def _parameters(self, ranks: Collection[int], attempt: int, first: int, end: int) -> dict[str, Any]:
        return self._marks.parameters() | {
            "name": self._name, "ranks": sorted(ranks), "attempt": attempt, "first": first, "end": end,
        }  # fmt: skip


def _piece(samples: Samples, number: int) -> Any:
    return lambda: samples.between(number * BLOCK_STEPS, (number + 1) * BLOCK_STEPS - 1)


def _cells_of(rows: Any) -> Cells:
    columns = {name: np.ascontiguousarray(rows[name]) for name in ("step", "min", "max", "sum", "time")}
    counts = {name: rows[name].astype(np.int64) for name in ("count", "nonfinite")}
    # what overflowed in both directions has no sum, as in blocks
    return Cells(
        columns["step"],
        columns["min"],
        columns["max"],
        columns["sum"],
        counts["count"],
        counts["nonfinite"],
        columns["time"],
    )
