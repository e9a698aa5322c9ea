"""The metric store on SQL: frames into ledger and tail, answers out of blocks, rollups and tail together.

A frame is stored whole, as one row, in the transaction that writes it to the ledger; that is all the work before the ack. The
compactor (compaction.py) turns tail rows into blocks later. Every question is therefore answered from both, inside one read
transaction, and no sample is missed or counted twice while the compactor works.

Steps of an attempt that a later attempt has started again are cut from view here, in every answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np
from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from perfagent.wire import Event, Frame, Group, Latest, LogRow, RankMatrix, Series, metric, parts_of, whole_of
from perfagent_server import lifecycle
from perfagent_server.database import Database
from perfagent_server.ingest.limits import MAX_NAMES_PER_RUN, MAX_STEP, name_problem
from perfagent_server.store import artifacts
from perfagent_server.store.blocks import BLOCK_STEPS, CELL_STEPS, Samples, decode_block, merged
from perfagent_server.store.interface import Receipt, Rejected, Stored
from perfagent_server.store.parts import root_of_sums
from perfagent_server.store.prepared import Prepared
from perfagent_server.store.rollups import (
    CHUNK_CELLS,
    LEVELS,
    Cells,
    Floats,
    Ints,
    concatenate,
    decode_cells,
    of_samples,
    reduced,
)
from perfagent_server.store.tables import attempt as attempt_table
from perfagent_server.store.tables import axis, block, cursor, event, last, ledger, rollup, series, source, tail
from perfagent_server.store.tables import run as run_table

__all__ = [
    "ROLL_BLOCKS",
    "SqlStore",
    "TailGroup",
    "insert_for",
    "judged_until",
    "newest",
    "pack_tail",
    "rolled_until",
    "unpack_tail",
]

# Blocks are rolled up in groups of so many, once a later group has begun: a rollup row is then rewritten once in 16 blocks.
ROLL_BLOCKS = 16
MAX_POINTS = 20_000
_LOOK_BACK = 2048  # steps in which ranks that measure at different periods have one in common: a period is at most 1024
_KNOWN_RANKS = 8192  # (run, rank) pairs whose series ids stay in memory
_CUT_NEVER = MAX_STEP

# Rows with this name are written at the end of an optimizer step. A process that never sends it is believed by whatever it
# logs, except for what samplers write while a step is still going on.
_STEP_MARK = "step_time_s"
_SAMPLED = ("gpu/", "node_gpu", "host/", "process/", "agent/", "cuda/")


class TailGroup(msgspec.Struct):
    """A group as it lies in the tail: the checks of wire.Group were made when it came."""

    step: bytes
    time: bytes
    monotonic: bytes
    values: dict[str, bytes]

    @property
    def rows(self) -> int:
        return len(self.step) // 8


_encoder = msgspec.msgpack.Encoder()
_whole_decoder = msgspec.msgpack.Decoder(tuple[list[Group], list[Event]])
_group_decoder = msgspec.msgpack.Decoder(tuple[list[TailGroup], msgspec.Raw])


def pack_tail(groups: Sequence[Group], events: Sequence[Event]) -> bytes:
    """What a tail row holds of a frame. As it came: packing it takes as much time as writing less of it saves."""
    return _encoder.encode((groups, events))


def unpack_tail(frame: bytes) -> list[TailGroup]:
    return _group_decoder.decode(frame)[0]


_judged = Prepared(select(cursor.c.tail_id).where(cursor.c.name == bindparam("name")))
_claim_frame = Prepared(
    lambda dialect: insert_for(dialect)(ledger).on_conflict_do_nothing().returning(ledger.c.seq), ("source", "seq")
)
_keep_frame = Prepared(
    insert(tail).returning(tail.c.id), ("run", "attempt", "rank", "source", "seq", "samples", "received", "frame")
)
_keep_event = Prepared(insert(event), ("run", "attempt", "rank", "source", "kind", "step", "time", "data"))


def insert_for(dialect: str) -> Any:
    """The INSERT of a dialect: the one that knows ON CONFLICT."""
    return postgresql.insert if dialect == "postgresql" else sqlite.insert


def insert_into(connection: Connection, table: Any) -> Any:
    """An INSERT that knows ON CONFLICT, in the connection's dialect."""
    return insert_for(connection.dialect.name)(table)


def rolled_until(last_block: int) -> int:
    """First step that is not in the rollup rows of a series whose newest block is `last_block`."""
    return last_block // ROLL_BLOCKS * ROLL_BLOCKS * BLOCK_STEPS


def newest(group: TailGroup) -> tuple[int, float, int]:
    """Step, time and row of the newest sample of a group."""
    steps = np.frombuffer(group.step, "<i8")
    times = np.frombuffer(group.time, "<f8")
    row = len(steps) - 1
    if row and (np.diff(steps) <= 0).any():
        row = int(np.lexsort((times, steps))[-1])
    return int(steps[row]), float(times[row]), row


@dataclass(slots=True)
class _View:
    """What one question sees. attempts: (attempt, last visible step), oldest first; tail: samples by (rank, attempt)."""

    ranks: dict[int, int]  # series id -> rank
    attempts: list[tuple[int, int]]
    tail: dict[tuple[int, int], Samples]
    ends: dict[tuple[int, int], tuple[int, int, int]] = field(
        default_factory=dict
    )  # (series, attempt) -> first step, last step, last block

    def extent(self) -> tuple[int, int] | None:
        """First and last visible step."""
        top = dict(self.attempts)
        spans = [(low, min(high, top[attempt])) for (_, attempt), (low, high, _) in self.ends.items() if low <= top[attempt]]
        for (_, attempt), samples in self.tail.items():
            steps = samples.step[samples.step <= top.get(attempt, -1)]
            if len(steps):
                spans.append((int(steps.min()), int(steps.max())))
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None


class SqlStore:
    """MetricStore on the tables of tables.py."""

    def __init__(self, database: Database, *, max_names: int = MAX_NAMES_PER_RUN) -> None:
        self.database = database
        self._max_names = max_names
        # Names and series ids; filled inside transactions, so forgotten whenever one is undone. Only the writer thread looks.
        self._known: dict[tuple[str, int], dict[str, int]] = {}
        database.on_rollback.append(self._known.clear)

    # --- storing -----------------------------------------------------------------------------------------------------------

    def append(self, connection: Connection, frames: Sequence[Frame], now: float) -> list[Receipt]:
        """See MetricStore. What is rejected is taken out of the frames themselves, so that the readers behind the ack see
        what was stored."""
        sources = lifecycle.load_sources(connection, {frame.source for frame in frames})
        fresh = self._fresh(connection, frames, sources)
        rejected: dict[int, list[Rejected]] = {}
        seen = []
        for at in fresh:
            frame = frames[at]
            problems: list[Rejected] = []
            first, done = _measure(frame, self._names(connection, frame.run, frame.rank), problems)
            seen.append(lifecycle.Seen(frame, done, first))
            rejected[at] = problems
        lifecycle.record(connection, seen, sources, now)
        for at in fresh:
            self._admit_names(connection, frames[at], rejected[at])
            artifacts.take(connection, frames[at], now)
        ids = self._write_tail(connection, [frames[at] for at in fresh], now)
        return [
            Receipt(frame.samples, 0, rejected[at], ids.get((frame.source, frame.seq)))
            if at in rejected
            else Receipt(0, frame.samples)
            for at, frame in enumerate(frames)
        ]

    def _fresh(self, connection: Connection, frames: Sequence[Frame], sources: dict[str, dict[str, Any]]) -> list[int]:
        """Positions of the frames that are not here yet; they are in the ledger from now on."""
        claims: dict[tuple[str, int], int] = {}
        for at, frame in enumerate(frames):
            row = sources.get(frame.source)
            if row is None or frame.seq > row["seq_floor"]:
                claims.setdefault((frame.source, frame.seq), at)
        if not claims:
            return []
        won = _claim_frame.each(connection, [{"source": source_id, "seq": seq} for source_id, seq in claims])
        return sorted(at for at, row in zip(claims.values(), won, strict=True) if row is not None)

    def _names(self, connection: Connection, run: str, rank: int) -> dict[str, int]:
        """Names and ids of a rank's series."""
        known = self._known.get((run, rank))
        if known is None:
            if len(self._known) >= _KNOWN_RANKS:
                self._known.clear()
            rows = connection.execute(select(series.c.name, series.c.id).where(series.c.run == run, series.c.rank == rank))
            known = self._known[run, rank] = {row.name: row.id for row in rows}
        return known

    def _admit_names(self, connection: Connection, frame: Frame, rejected: list[Rejected]) -> None:
        """Creates the series of names that are new, and takes out of the frame what may not become one."""
        known = self._names(connection, frame.run, frame.rank)
        new = {
            name: None
            for group in frame.groups
            if not group.values.keys() <= known.keys()
            for name in group.values
            if name not in known
        }
        if not new:
            return
        refused: dict[str, str] = {}
        of_run: set[str] | None = None
        for name in new:
            problem = name_problem(name)
            if problem is None:
                if of_run is None:
                    of_run = set(connection.execute(select(series.c.name).distinct().where(series.c.run == frame.run)).scalars())
                if name not in of_run and len(of_run) >= self._max_names:
                    problem = f"the run has {self._max_names} names already, which is the limit"
                else:
                    of_run.add(name)
            if problem is not None:
                refused[name] = problem
        admitted = [name for name in new if name not in refused]
        if admitted:
            rows = [{"run": frame.run, "rank": frame.rank, "name": name} for name in admitted]
            connection.execute(insert_into(connection, series).on_conflict_do_nothing(), rows)
            del self._known[frame.run, frame.rank]
            self._names(connection, frame.run, frame.rank)
        if refused:
            counts = dict.fromkeys(refused, 0)
            for group in frame.groups:
                for name in refused.keys() & group.values.keys():
                    del group.values[name]
                    counts[name] += group.rows
            frame.groups = [group for group in frame.groups if group.values]
            rejected.extend(
                Rejected(name[:300].encode(errors="replace").decode(), refused[name], count) for name, count in counts.items()
            )

    def _write_tail(self, connection: Connection, frames: Sequence[Frame], now: float) -> dict[tuple[str, int], int]:
        """Tail ids by (source, seq). A frame that only said "I am here" has nothing to keep and no row."""
        events = [artifacts.lasting(frame.events) for frame in frames]
        rows: list[dict[str, Any]] = [
            {
                "run": frame.run,
                "attempt": frame.attempt,
                "rank": frame.rank,
                "source": frame.source,
                "seq": frame.seq,
                "samples": frame.samples,
                "received": now,
                "frame": pack_tail(frame.groups, lasting),
            }
            for frame, lasting in zip(frames, events, strict=True)
            if frame.groups or lasting
        ]
        if not rows:
            return {}
        ids = {(row["source"], row["seq"]): found[0] for row, found in zip(rows, _keep_frame.each(connection, rows), strict=True)}
        happened = [
            {
                "run": frame.run,
                "attempt": frame.attempt,
                "rank": frame.rank,
                "source": frame.source,
                "kind": item.kind[:16],
                "step": item.step,
                "time": item.time if math.isfinite(item.time) else now,
                "data": _encoder.encode(item.data),
            }
            for frame, lasting in zip(frames, events, strict=True)
            for item in lasting
        ]
        if happened:
            _keep_event.many(connection, happened)
        return ids

    def delete(self, connection: Connection, run: str) -> None:
        """See MetricStore. The foreign keys take everything else of the run along."""
        connection.execute(delete(ledger).where(ledger.c.source.in_(select(source.c.id).where(source.c.run == run))))
        connection.execute(delete(run_table).where(run_table.c.id == run))
        for key in [key for key in self._known if key[0] == run]:
            del self._known[key]

    # --- reading -----------------------------------------------------------------------------------------------------------

    def names(self, run: str) -> list[str]:
        with self.database.read() as connection:
            found = set(connection.execute(select(series.c.name).distinct().where(series.c.run == run)).scalars())
        return sorted(found | {whole for name in found if (whole := whole_of(name))})

    def since(self, tail_id: int, limit: int) -> list[Stored]:
        statement = select(tail).where(tail.c.id > tail_id).order_by(tail.c.id).limit(limit)
        with self.database.read() as connection:
            rows = connection.execute(statement).all()
        found = []
        for row in rows:
            groups, events = _whole_decoder.decode(row.frame)
            found.append(Stored(row.id, row.run, row.attempt, row.rank, row.source, row.seq, row.received, groups, events))
        return found

    def latest(self, run: str) -> dict[str, Latest]:
        with self.database.read() as connection:
            attempts = _attempts(connection, run)
            top = dict(attempts)
            best: dict[tuple[str, int], tuple[int, int, float, float]] = {}  # (name, rank) -> attempt, step, time, value
            rows = connection.execute(
                select(series.c.rank, series.c.name, last.c.attempt, last.c.step, last.c.time, last.c.value)
                .join(last, last.c.series == series.c.id)
                .where(series.c.run == run)
            )
            for row in rows:
                best[row.name, row.rank] = (row.attempt, row.step, row.time, float(np.frombuffer(row.value, "<f8")[0]))
            for (rank, _), (attempt, step, time, at, group) in _newest_in_tail(connection, run).items():
                for name, column in group.values.items():
                    held = best.get((name, rank))
                    if held is None or (attempt, step, time) >= held[:3]:
                        width = len(column) // group.rows
                        value = float(np.frombuffer(column, f"<f{width}", 1, at * width)[0])
                        best[name, rank] = (attempt, step, time, value)
            for (name, rank), (attempt, step, _, _) in list(best.items()):
                if step > top.get(attempt, _CUT_NEVER):  # the newest sample belongs to what a later attempt has started again
                    visible = self._last_visible(connection, run, name, rank)
                    if visible is None:
                        del best[name, rank]
                    else:
                        best[name, rank] = visible
        grouped: dict[str, dict[int, tuple[int, int, float, float]]] = {}
        for (name, rank), found in sorted(best.items()):
            grouped.setdefault(name, {})[rank] = found
        combined = {name: _latest_over_ranks(name, found) for name, found in grouped.items()}
        for name, of_ranks in grouped.items():
            whole = whole_of(name)
            if whole and whole not in combined:
                newest_whole = self._latest_whole(run, whole, of_ranks)
                if newest_whole is not None:
                    combined[whole] = newest_whole
        return combined

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
            view = self._view(connection, run, name, None if rank == "all" else rank)
            parts = parts_of(name) if rank == "all" and not view.ranks else ""
            if parts:
                view = self._view(connection, run, parts, None)
            span = _clamped(view.extent(), from_step, to_step)
            if span is None:
                return _answer(name, rank, 1, True, concatenate([]), np.empty(0), 0)
            first, last_step = span
            if parts:
                width = _width(first, last_step, points)
                cells = self._whole(connection, view, first, last_step, width)
                return _answer(name, rank, width, False, cells, cells.mean, first)
            single = self._few(connection, view, first, last_step, points)
            if single is not None:
                return _answer(name, rank, 1, True, single, single.mean, first)
            width = _width(first, last_step, points)
            by_rank = self._cells(connection, view, first, last_step, width)
        cells, mean = _over_ranks(name, list(by_rank.values()))
        return _answer(name, rank, width, False, cells, mean, first)

    def ranks(
        self, run: str, name: str, *, from_step: int | None = None, to_step: int | None = None, points: int = 200
    ) -> RankMatrix:
        points = min(max(points, 1), MAX_POINTS)
        unit = metric(name).unit
        with self.database.read() as connection:
            view = self._view(connection, run, name, None)
            span = _clamped(view.extent(), from_step, to_step)
            if span is None:
                return RankMatrix(name=name, unit=unit, ranks=[], step=[], mean=[])
            by_rank = self._cells(connection, view, *span, _width(*span, points))
        ranks = sorted(by_rank)
        steps = np.unique(np.concatenate([by_rank[rank].step for rank in ranks])) if ranks else np.empty(0, np.int64)
        mean = np.full((len(ranks), len(steps)), np.nan)
        for row, rank in enumerate(ranks):
            cells = by_rank[rank]
            mean[row, np.searchsorted(steps, cells.step)] = cells.mean
        return RankMatrix(name=name, unit=unit, ranks=ranks, step=np.maximum(steps, span[0]).tolist(), mean=mean.tolist())

    def samples(self, run: str) -> Iterator[LogRow]:
        """See MetricStore. Each series is read in a transaction of its own and decoded block by block outside of it."""
        with self.database.read() as connection:
            wanted = connection.execute(
                select(series.c.name, series.c.rank).where(series.c.run == run).order_by(series.c.name, series.c.rank)
            ).all()
        for name, rank in wanted:
            with self.database.read() as connection:
                view = self._view(connection, run, name, rank)
                stored = {
                    attempt: self._payloads(connection, list(view.ranks), attempt, 0, top) for attempt, top in view.attempts
                }
            yield from _in_order(view, stored, name, rank)

    # --- how a question is answered ----------------------------------------------------------------------------------------

    def _view(self, connection: Connection, run: str, name: str, rank: int | None) -> _View:
        wanted = select(series.c.id, series.c.rank).where(series.c.run == run, series.c.name == name)
        if rank is not None:
            wanted = wanted.where(series.c.rank == rank)
        ranks = {row.id: row.rank for row in connection.execute(wanted)}
        view = _View(ranks, _attempts(connection, run), _tail_samples(connection, run, name, rank) if ranks else {})
        if ranks:
            view.ends = _ends(connection, run, list(ranks))
        return view

    def _cells(self, connection: Connection, view: _View, first: int, last_step: int, width: int) -> dict[int, Cells]:
        """Cells `width` steps wide by rank, over the visible samples of the steps first..last_step."""
        parts: dict[int, list[Cells]] = {}
        for attempt, top in view.attempts:
            end = min(last_step, top)
            if end < first:
                continue
            # Series whose newest blocks lie in the same group of blocks have been rolled up to the same step.
            together: dict[int, list[int]] = {}
            for (series_id, of), (low, high, last_block) in view.ends.items():
                if of == attempt and low <= end and high >= first:
                    together.setdefault(rolled_until(last_block), []).append(series_id)
            for rolled, ids in together.items():
                for series_id, cells in self._stored(connection, ids, attempt, first, end, width, rolled):
                    parts.setdefault(view.ranks[series_id], []).append(cells)
            for (rank, of), samples in view.tail.items():
                if of == attempt:
                    cells = of_samples(samples.step, samples.time, samples.value).between(first, end)
                    if len(cells):
                        parts.setdefault(rank, []).append(cells)
        return {
            rank: reduced(concatenate(cells), width) for rank, cells in sorted(parts.items()) if any(len(part) for part in cells)
        }

    def _whole(self, connection: Connection, view: _View, first: int, last_step: int, width: int) -> Cells:
        """Cells of a value that ranks send parts of: each attempt's own ranks together."""
        cells = []
        for attempt, top in view.attempts:
            ranks = {view.ranks[series_id] for series_id, of in view.ends if of == attempt}
            ranks |= {rank for (rank, of), samples in view.tail.items() if of == attempt and len(samples)}
            mine = replace(view, attempts=[(attempt, top)])
            cells.append(root_of_sums(list(self._cells(connection, mine, first, last_step, width).values()), len(ranks)))
        return reduced(concatenate(cells), width)

    def _latest_whole(self, run: str, whole: str, parts: dict[int, tuple[int, int, float, float]]) -> Latest | None:
        """The newest step of which every rank has sent its part."""
        newest_attempt = max(attempt for attempt, _, _, _ in parts.values())
        mine = [part for part in parts.values() if part[0] == newest_attempt]
        steps = {step for _, step, _, _ in mine}
        if len(steps) == 1:
            total = sum(value for _, _, _, value in mine)
            time = max(time for _, _, time, _ in mine)
            return Latest(value=math.sqrt(total) if total >= 0 else math.nan, step=steps.pop(), time=time, rank="all")
        newest = self.series(run, whole, from_step=max(0, min(steps) - _LOOK_BACK), points=MAX_POINTS)
        if not newest.step or newest.time is None:
            return None
        value = newest.mean[-1] if newest.nonfinite[-1] == 0 else math.nan
        return Latest(value=value, step=newest.step[-1], time=newest.time[-1], rank="all")

    def _stored(
        self, connection: Connection, ids: list[int], attempt: int, first: int, end: int, width: int, rolled: int
    ) -> Iterator[tuple[int, Cells]]:
        """(series, cells) of one attempt's rollups and blocks, every cell inside one span of `width` steps."""
        level = max((level for level in LEVELS if level <= width), default=0)
        if level:
            unit = max(level, BLOCK_STEPS)  # rollups answer for whole blocks only
            low, high = -(-first // unit) * unit, min((end + 1) // unit * unit, rolled)
            if low < high:
                yield from self._rollups(connection, ids, attempt, low, high - 1, level)
                if first < low:
                    yield from self._blocks(connection, ids, attempt, first, low - 1, width)
                if high <= end:
                    yield from self._blocks(connection, ids, attempt, high, end, width)
                return
        yield from self._blocks(connection, ids, attempt, first, end, width)

    def _rollups(
        self, connection: Connection, ids: list[int], attempt: int, first: int, end: int, level: int
    ) -> Iterator[tuple[int, Cells]]:
        span = level * CHUNK_CELLS
        rows = connection.execute(
            select(rollup.c.series, rollup.c.chunk, rollup.c.cells).where(
                rollup.c.series.in_(ids),
                rollup.c.attempt == attempt,
                rollup.c.level == level,
                rollup.c.chunk.between(first // span, end // span),
            )
        )
        for row in rows:
            yield row.series, decode_cells(row.cells, row.chunk * span, level).between(first, end, level)

    def _blocks(
        self, connection: Connection, ids: list[int], attempt: int, first: int, end: int, width: int
    ) -> Iterator[tuple[int, Cells]]:
        if width < CELL_STEPS:
            for row in self._payloads(connection, ids, attempt, first, end):
                yield row.series, _visible(row, first, end)
            return
        columns = [block.c.series, block.c.block, block.c.first_step, block.c.last_step]
        summary = width >= BLOCK_STEPS
        columns += (
            [block.c.min, block.c.max, block.c.sum, block.c.samples, block.c.nonfinite, block.c.first_time]
            if summary
            else [block.c.cells]
        )
        rows = connection.execute(select(*columns).where(*_between(ids, attempt, first, end))).all()
        edges = sorted({row.block for row in rows if row.first_step < first or row.last_step > end})
        whole = [row for row in rows if row.first_step >= first and row.last_step <= end]
        if summary and whole:
            yield from _summaries(whole)
        elif not summary:
            for row in whole:
                yield row.series, decode_cells(row.cells, row.block * BLOCK_STEPS, CELL_STEPS)
        if edges:
            inside = {(row.series, row.block) for row in whole}
            for row in connection.execute(
                _payload_columns().where(*_between(ids, attempt, first, end), block.c.block.in_(edges))
            ):
                if (row.series, row.block) not in inside:
                    yield row.series, _visible(row, first, end)

    def _payloads(self, connection: Connection, ids: list[int], attempt: int, first: int, end: int) -> Sequence[Row[Any]]:
        if not ids or end < first:
            return []
        return connection.execute(_payload_columns().where(*_between(ids, attempt, first, end)).order_by(block.c.block)).all()

    def _few(self, connection: Connection, view: _View, first: int, last_step: int, points: int) -> Cells | None:
        """The samples themselves, if one rank has sent them all and they are at most `points`."""
        holders = {view.ranks[series_id] for series_id, _ in view.ends} | {rank for rank, _ in view.tail}
        if len(holders) != 1:
            return None
        known = sum(len(samples) for samples in view.tail.values()) if last_step - first >= points else 0
        if known > points and _count_tail(view, first, last_step) > points:
            return None
        for attempt, top in view.attempts:
            where = _between(list(view.ranks), attempt, first, min(last_step, top))
            whole = [block.c.first_step >= first, block.c.last_step <= min(last_step, top)]
            known = connection.execute(select(func.coalesce(func.sum(block.c.samples), 0)).where(*where, *whole)).scalar_one()
            if known > points:
                return None
        parts: list[Samples] = []
        for attempt, top in view.attempts:
            end = min(last_step, top)
            for row in self._payloads(connection, list(view.ranks), attempt, first, end):
                if row.payload is None:
                    return None  # retention took the samples; what is left of them are cells
                parts.append(decode_block(row.axis, row.payload).between(first, end))
            for (_, of), samples in view.tail.items():
                if of == attempt:
                    parts.append(merged([samples]).between(first, end))
        found = merged(parts)
        if len(found) > points:
            return None
        return of_samples(found.step, found.time, found.value)

    def _last_visible(self, connection: Connection, run: str, name: str, rank: int) -> tuple[int, int, float, float] | None:
        view = self._view(connection, run, name, rank)
        for attempt, top in reversed(view.attempts):
            parts = [merged([samples]).between(0, top) for (_, of), samples in view.tail.items() if of == attempt]
            row = connection.execute(
                _payload_columns()
                .where(*_between(list(view.ranks), attempt, 0, top), block.c.first_step <= top)
                .order_by(block.c.block.desc())
                .limit(1)
            ).first()
            if row is not None and row.payload is not None:
                parts.append(decode_block(row.axis, row.payload).between(0, top))
            parts = [part for part in parts if len(part)]
            if parts:
                found = merged(parts)
                return attempt, int(found.step[-1]), float(found.time[-1]), float(found.value[-1])
        return None


# --- pieces of questions -----------------------------------------------------------------------------------------------------


def _measure(frame: Frame, known: dict[str, int], rejected: list[Rejected]) -> tuple[int | None, int | None]:
    """First step of a frame and the last one that it shows to be completed. Rows whose step is no step are taken out."""
    first: int | None = None
    marked: int | None = None
    logged: int | None = None
    marks = _STEP_MARK in known or any(_STEP_MARK in group.values for group in frame.groups)
    for at, group in enumerate(frame.groups):
        steps = group.steps()
        if not steps:
            continue
        low, high = min(steps), max(steps)
        if low < 0 or high > MAX_STEP:
            frame.groups[at] = group = _without_bad_steps(group, rejected)  # noqa: PLW2901 - the cleaned one from here on
            steps = group.steps()
            if not steps:
                continue
            low, high = min(steps), max(steps)
        first = low if first is None else min(first, low)
        if marks:
            if _STEP_MARK in group.values:
                marked = high if marked is None else max(marked, high)
        elif any(not name.startswith(_SAMPLED) for name in group.values):
            logged = high if logged is None else max(logged, high)
    frame.groups = [group for group in frame.groups if group.step and group.values]
    return first, marked if marks else logged


def _without_bad_steps(group: Group, rejected: list[Rejected]) -> Group:
    steps = np.frombuffer(group.step, "<i8")
    keep = (steps >= 0) & (steps <= MAX_STEP)
    count = int((~keep).sum())
    rejected.extend(Rejected(name[:300], f"a step must be from 0 to {MAX_STEP}", count) for name in group.values)

    def kept(column: bytes) -> bytes:
        return bytes(np.frombuffer(column, f"V{len(column) // len(steps)}")[keep].tobytes())

    return Group(
        kept(group.step), kept(group.time), kept(group.monotonic), {name: kept(column) for name, column in group.values.items()}
    )


def _attempts(connection: Connection, run: str) -> list[tuple[int, int]]:
    """(attempt, its last visible step), oldest first: a later attempt cuts every older one at its first step."""
    rows = connection.execute(
        select(attempt_table.c.attempt, attempt_table.c.start_step)
        .where(attempt_table.c.run == run)
        .order_by(attempt_table.c.attempt.desc())
    )
    top = _CUT_NEVER
    found = []
    for row in rows:
        found.append((row.attempt, top))
        top = min(top, row.start_step - 1)
    return found[::-1]


def _ends(connection: Connection, run: str, ids: list[int]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(series, attempt) -> first step, last step and last block of what is in blocks. Two look-ups each, however many blocks."""
    mine = (block.c.series == series.c.id) & (block.c.attempt == attempt_table.c.attempt)
    oldest = select(block.c.first_step).where(mine).order_by(block.c.block).limit(1).scalar_subquery()
    highest = select(block.c.last_step).where(mine).order_by(block.c.block.desc()).limit(1).scalar_subquery()
    rows = connection.execute(
        select(series.c.id, attempt_table.c.attempt, oldest.label("low"), highest.label("high"))
        .join_from(series, attempt_table, attempt_table.c.run == series.c.run)
        .where(series.c.run == run, series.c.id.in_(ids))
    )
    return {(row.id, row.attempt): (row.low, row.high, row.high // BLOCK_STEPS) for row in rows if row.low is not None}


def _tail_samples(connection: Connection, run: str, name: str, rank: int | None) -> dict[tuple[int, int], Samples]:
    """(rank, attempt) -> samples of one name that are still in the tail, in the order in which they came."""
    statement = select(tail.c.attempt, tail.c.rank, tail.c.received, tail.c.frame).where(tail.c.run == run, tail.c.samples > 0)
    if rank is not None:
        statement = statement.where(tail.c.rank == rank)
    found: dict[tuple[int, int], list[tuple[TailGroup, bytes, float]]] = {}
    for row in connection.execute(statement.order_by(tail.c.id)):
        for group in unpack_tail(row.frame):
            column = group.values.get(name)
            if column is not None:
                found.setdefault((row.rank, row.attempt), []).append((group, column, row.received))
    return {key: _joined(pieces) for key, pieces in found.items()}


def _joined(pieces: list[tuple[TailGroup, bytes, float]]) -> Samples:
    step = np.frombuffer(b"".join(group.step for group, _, _ in pieces), "<i8")
    time = np.frombuffer(b"".join(group.time for group, _, _ in pieces), "<f8")
    if not np.isfinite(time).all():
        time = np.where(
            np.isfinite(time), time, np.repeat([received for _, _, received in pieces], [group.rows for group, _, _ in pieces])
        )
    widths = {len(column) // group.rows for group, column, _ in pieces}
    if len(widths) == 1:
        value = np.frombuffer(b"".join(column for _, column, _ in pieces), f"<f{widths.pop()}").astype("<f8", copy=False)
    else:
        value = np.concatenate(
            [np.frombuffer(column, f"<f{len(column) // group.rows}").astype("<f8") for group, column, _ in pieces]
        )
    return Samples(step, time, value)


def _newest_in_tail(
    connection: Connection, run: str
) -> dict[tuple[int, tuple[str, ...]], tuple[int, int, float, int, TailGroup]]:
    """(rank, names of a group) -> attempt, step, time, row and the group that holds the newest row of that kind."""
    best: dict[tuple[int, tuple[str, ...]], tuple[int, int, float, int, TailGroup]] = {}
    statement = (
        select(tail.c.attempt, tail.c.rank, tail.c.received, tail.c.frame)
        .where(tail.c.run == run, tail.c.samples > 0)
        .order_by(tail.c.id)
    )
    for row in connection.execute(statement):
        for group in unpack_tail(row.frame):
            step, time, at = newest(group)
            time = time if math.isfinite(time) else row.received
            key = (row.rank, tuple(group.values))
            held = best.get(key)
            if held is None or (row.attempt, step, time) >= held[:3]:
                best[key] = (row.attempt, step, time, at, group)
    return best


def _latest_over_ranks(name: str, found: dict[int, tuple[int, int, float, float]]) -> Latest:
    newest_attempt = max(attempt for attempt, _, _, _ in found.values())
    found = {rank: item for rank, item in found.items() if item[0] == newest_attempt}
    if len(found) == 1:
        rank, (_, step, time, value) = next(iter(found.items()))
        return Latest(value=value, step=step, time=time, rank=rank)
    values = np.array([value for _, _, _, value in found.values()])
    with np.errstate(all="ignore"):  # a NaN on any rank is the answer: this is what the run's figure must show
        combined = {"mean": values.mean(), "sum": values.sum(), "max": values.max(), "min": values.min()}
    value = float(combined[metric(name).over_ranks])
    return Latest(
        value=value,
        step=max(step for _, step, _, _ in found.values()),
        time=max(time for _, _, time, _ in found.values()),
        rank="all",
    )


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


def _between(ids: list[int], attempt: int, first: int, end: int) -> list[Any]:
    return [block.c.series.in_(ids), block.c.attempt == attempt, block.c.block.between(first // BLOCK_STEPS, end // BLOCK_STEPS)]


def _payload_columns() -> Any:
    columns = (block.c.series, block.c.block, block.c.payload, block.c.cells, axis.c.payload.label("axis"))
    return select(*columns).outerjoin(axis, axis.c.key == block.c.axis)


def _visible(row: Row[Any], first: int, end: int) -> Cells:
    """The samples of a block between two steps; its cells, as near as they go, where retention took the samples."""
    if row.payload is not None:
        samples = decode_block(row.axis, row.payload).between(first, end)
        return of_samples(samples.step, samples.time, samples.value)
    cells = decode_cells(row.cells, row.block * BLOCK_STEPS, CELL_STEPS)
    return cells.take((cells.step + (CELL_STEPS - 1) >= first) & (cells.step <= end))


def _summaries(rows: Sequence[Row[Any]]) -> Iterator[tuple[int, Cells]]:
    """Whole blocks as one cell each."""
    by_series: dict[int, list[Row[Any]]] = {}
    for row in rows:
        by_series.setdefault(row.series, []).append(row)
    for series_id, mine in by_series.items():
        finite = [row.min is not None for row in mine]
        yield (
            series_id,
            Cells(
                np.array([row.block * BLOCK_STEPS for row in mine], np.int64),
                np.array([row.min if some else np.inf for row, some in zip(mine, finite, strict=True)]),
                np.array([row.max if some else -np.inf for row, some in zip(mine, finite, strict=True)]),
                np.array([row.sum for row in mine], np.float64),
                np.array([row.samples for row in mine], np.int64),
                np.array([row.nonfinite for row in mine], np.int64),
                np.array([row.first_time for row in mine], np.float64),
            ),
        )


def _count_tail(view: _View, first: int, last_step: int) -> int:
    top = dict(view.attempts)
    return sum(
        int(((samples.step >= first) & (samples.step <= min(last_step, top.get(attempt, -1)))).sum())
        for (_, attempt), samples in view.tail.items()
    )


def _over_ranks(name: str, ranks: list[Cells]) -> tuple[Cells, Floats]:
    """One row of cells out of those of several ranks, as the catalogue says for this name.

    mean: the mean over all samples; sum: the ranks' means (minima, maxima) added up; max, min: the largest (smallest) of the
    ranks' means. Except for sums, minimum and maximum are those over all ranks. Answers the cells and their means.
    """
    if not ranks:
        return concatenate([]), np.empty(0)
    if len(ranks) == 1:
        return ranks[0], ranks[0].mean
    steps: Ints = np.unique(np.concatenate([cells.step for cells in ranks]))
    shape = (len(ranks), len(steps))
    low, high, total = np.full(shape, np.inf), np.full(shape, -np.inf), np.zeros(shape)
    count, nonfinite, time = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, np.inf)
    for row, cells in enumerate(ranks):
        at = np.searchsorted(steps, cells.step)
        low[row, at], high[row, at], total[row, at] = cells.min, cells.max, cells.sum
        count[row, at], nonfinite[row, at], time[row, at] = cells.count, cells.nonfinite, cells.time
    finite = count - nonfinite
    some = finite > 0
    all_finite = finite.sum(axis=0)
    how = metric(name).over_ranks
    with np.errstate(all="ignore"):
        sums = total.sum(axis=0)
        if how == "mean":
            mean: Floats = sums / np.maximum(all_finite, 1)
        else:
            rest = {"sum": 0.0, "max": -np.inf, "min": np.inf}[how]
            combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[how]
            mean = combine.reduce(np.where(some, total / np.maximum(finite, 1), rest), axis=0)
        if how == "sum":
            low, high = np.where(some, low, 0.0).sum(axis=0), np.where(some, high, 0.0).sum(axis=0)
            low, high = np.where(all_finite > 0, low, np.inf), np.where(all_finite > 0, high, -np.inf)
        else:
            low, high = low.min(axis=0), high.max(axis=0)
    cells = Cells(steps, low, high, sums, count.sum(axis=0), nonfinite.sum(axis=0), time.min(axis=0))
    return cells, np.where(all_finite > 0, mean, np.nan)


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


def _in_order(view: _View, stored: dict[int, Sequence[Row[Any]]], name: str, rank: int) -> Iterator[LogRow]:
    """One series' visible samples in step order, a block's worth at a time."""
    pieces: dict[int, list[tuple[int, Any]]] = {}  # block number -> (attempt, axis and payload, or samples)
    for attempt, _ in view.attempts:
        for row in stored[attempt]:
            if row.payload is not None:
                pieces.setdefault(row.block, []).append((attempt, (row.axis, row.payload)))
        for (_, of), samples in view.tail.items():
            if of == attempt and len(samples):
                ordered = merged([samples])
                numbers = ordered.step // BLOCK_STEPS
                for number in np.unique(numbers).tolist():
                    pieces.setdefault(number, []).append(
                        (attempt, ordered.between(number * BLOCK_STEPS, (number + 1) * BLOCK_STEPS - 1))
                    )
    top = dict(view.attempts)
    for number in sorted(pieces):
        parts = [
            (decode_block(*piece) if isinstance(piece, tuple) else piece).between(0, top[attempt])
            for attempt, piece in pieces[number]
        ]
        found = merged(parts)
        for step, time, value in zip(found.step.tolist(), found.time.tolist(), found.value.tolist(), strict=True):
            yield LogRow(name=name, rank=rank, step=step, time=time, value=value)


def judged_until(connection: Connection) -> int:
    """The tail row up to which the rules have judged; 0 before they began."""
    found = _judged.all(connection, {"name": "rules"})
    return int(found[0][0]) if found else 0
