"""Reads the samples and cells of series for one question, out of the sample store and the tail together.

Everything is read inside one transaction of the caller, so that no sample is missed or counted twice while the
compactor works. Steps of an attempt that a later attempt has started again are cut from view here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, select

from perfagent.wire import LogRow
from perfagent.wire.limits import MAX_STEP
from perfagent_server.store.codec.aggregates import Cells, concatenate, of_samples, reduced
from perfagent_server.store.codec.blocks import BLOCK_STEPS, Samples, merged
from perfagent_server.store.codec.tail import readable_groups
from perfagent_server.store.codec.tail_columns import Arrived, matrices, rows_below_each_other
from perfagent_server.store.samples import Part, SampleSnapshot, StoredSeries
from perfagent_server.store.tables import attempt as attempt_table
from perfagent_server.store.tables import tail

__all__ = [
    "CUT_NEVER",
    "View",
    "cells_by_rank",
    "few_samples",
    "in_order",
    "open_view",
    "open_views",
    "stored_parts",
    "tail_by_rank",
    "value_at",
    "visible_attempts",
]

CUT_NEVER = MAX_STEP
_CELLS_AT_ONCE = 640_000
"""Of a question about many ranks: so many take 36 MB."""
_TAIL_AT_ONCE = 1_000_000
"""Samples of a rank that are taken out of the tail at once: up to 8 MB, unpacked."""


@dataclass(slots=True)
class View:
    """What one question sees of a name. stored: what is compacted; attempts: (attempt, last visible step), oldest first;
    tail: samples by (rank, attempt) that are not, or not wholly."""

    stored: StoredSeries
    attempts: list[tuple[int, int]]
    tail: dict[tuple[int, int], Samples]

    @property
    def holders(self) -> set[int]:
        """Ranks that have samples."""
        return {rank for rank, _ in self.stored.ends} | {rank for rank, _ in self.tail}

    def extent(self) -> tuple[int, int] | None:
        """First and last visible step."""
        top = dict(self.attempts)
        spans = [
            (low, min(high, top[attempt]))
            for (_, attempt), (low, high) in self.stored.ends.items()
            if low <= top.get(attempt, -1)
        ]
        for (_, attempt), samples in self.tail.items():
            steps = samples.step[samples.step <= top.get(attempt, -1)]
            if len(steps):
                spans.append((int(steps.min()), int(steps.max())))
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None


def open_view(connection: Connection, snapshot: SampleSnapshot, run: str, name: str, rank: int | None) -> View:
    return open_views(connection, snapshot, run, [name], rank)[name]


def open_views(
    connection: Connection, snapshot: SampleSnapshot, run: str, names: Sequence[str], rank: int | None
) -> dict[str, View]:
    """A view of each name. The tail is read once: all names together take little longer than one of them."""
    attempts = visible_attempts(connection, run)
    stored = snapshot.series(names, rank)
    views = {name: View(stored[name], attempts, {}) for name in names}
    sent = [name for name, view in views.items() if view.stored.ranks]
    if not sent:
        return views
    in_tail = _tail_samples(connection, run, sent, rank)
    for name, view in views.items():
        view.tail = in_tail.get(name, {})
        for of, samples in view.stored.loose().items():  # they came before those of the tail
            later = view.tail.get(of)
            view.tail[of] = samples if later is None else merged([samples, later])
    return views


def visible_attempts(connection: Connection, run: str) -> list[tuple[int, int]]:
    """(attempt, its last visible step), oldest first: a later attempt cuts every older one at its first step."""
    rows = connection.execute(
        select(attempt_table.c.attempt, attempt_table.c.start_step)
        .where(attempt_table.c.run == run)
        .order_by(attempt_table.c.attempt.desc())
    )
    top = CUT_NEVER
    found = []
    for row in rows:
        found.append((row.attempt, top))
        top = min(top, row.start_step - 1)
    return found[::-1]


def cells_by_rank(view: View, first: int, last_step: int, width: int) -> Iterator[tuple[int, Cells]]:
    """Rank and its cells `width` steps wide, over the visible samples of the steps first..last_step. By rank, some
    ranks at a time: who asks need not hold the cells of all."""
    ranks = sorted(view.holders)
    at_once = max(1, _CELLS_AT_ONCE // (last_step // width - first // width + 1))
    for start in range(0, len(ranks), at_once):
        yield from _cells_of_ranks(view, set(ranks[start : start + at_once]), first, last_step, width)


def _cells_of_ranks(
    view: View, ranks: Collection[int], first: int, last_step: int, width: int
) -> Iterator[tuple[int, Cells]]:
    parts: dict[int, list[Cells]] = {}
    for attempt, top in view.attempts:
        end = min(last_step, top)
        if end < first:
            continue
        inside = {
            rank
            for (rank, of), (low, high) in view.stored.ends.items()
            if of == attempt and low <= end and high >= first and rank in ranks
        }
        for rank, cells in view.stored.cells(inside, attempt, first, end, width) if inside else ():
            parts.setdefault(rank, []).append(cells)
        for (rank, of), samples in view.tail.items():
            if of == attempt and rank in ranks:
                cells = of_samples(samples.step, samples.time, samples.value).between(first, end)
                if len(cells):
                    parts.setdefault(rank, []).append(cells)
    for rank, of_rank in sorted(parts.items()):
        if any(len(part) for part in of_rank):
            yield rank, reduced(concatenate(of_rank), width)


def few_samples(view: View, first: int, last_step: int, points: int) -> Cells | None:
    """The samples themselves, if one rank has sent them all and they are at most `points`."""
    if len(view.holders) != 1:
        return None
    known = sum(len(samples) for samples in view.tail.values()) if last_step - first >= points else 0
    if known > points and _count_tail(view, first, last_step) > points:
        return None
    if any(view.stored.count(attempt, first, min(last_step, top)) > points for attempt, top in view.attempts):
        return None
    pieces: list[Samples] = []
    for attempt, top in view.attempts:
        end = min(last_step, top)
        for part in view.stored.parts(attempt, first, end):
            samples = part.load()
            if samples is None:
                return None  # retention took the samples; what is left of them are cells
            pieces.append(samples.between(first, end))
        for (_, of), samples in view.tail.items():
            if of == attempt:
                pieces.append(merged([samples]).between(first, end))
    found = merged(pieces)
    if len(found) > points:
        return None
    return of_samples(found.step, found.time, found.value)


def value_at(view: View, step: int) -> float | None:
    """The visible sample of one step of a view of one rank; None where there is none, or retention took it."""
    for attempt, top in reversed(view.attempts):
        if step > top:
            continue
        pieces = [merged([samples]).between(step, step) for (_, of), samples in view.tail.items() if of == attempt]
        loaded = [part.load() for part in view.stored.parts(attempt, step, step)]
        pieces += [samples.between(step, step) for samples in loaded if samples is not None]
        found = merged(pieces)
        if len(found):
            return float(found.value[-1])
    return None


def stored_parts(view: View) -> dict[int, Sequence[Part]]:
    """Attempt -> its compacted samples that are visible: to be loaded once the transaction is over."""
    return {attempt: view.stored.parts(attempt, 0, top) for attempt, top in view.attempts}


def in_order(view: View, stored: dict[int, Sequence[Part]], name: str, rank: int) -> Iterator[LogRow]:
    """One series' visible samples in step order, a block's worth at a time."""
    pieces: dict[int, list[tuple[int, Part | Samples]]] = {}  # block number -> (attempt, samples)
    for attempt, _ in view.attempts:
        for part in stored[attempt]:
            pieces.setdefault(part.number, []).append((attempt, part))
        for (_, of), samples in view.tail.items():
            if of == attempt and len(samples):
                ordered = merged([samples])
                numbers = ordered.step // BLOCK_STEPS
                for number in np.unique(numbers).tolist():
                    inside = ordered.between(number * BLOCK_STEPS, (number + 1) * BLOCK_STEPS - 1)
                    pieces.setdefault(number, []).append((attempt, inside))
    top = dict(view.attempts)
    for number in sorted(pieces):
        loaded = [(attempt, piece.load() if isinstance(piece, Part) else piece) for attempt, piece in pieces[number]]
        found = merged([samples.between(0, top[attempt]) for attempt, samples in loaded if samples is not None])
        for step, time, value in zip(found.step.tolist(), found.time.tolist(), found.value.tolist(), strict=True):
            yield LogRow(name=name, rank=rank, step=step, time=time, value=value)


def _tail_samples(
    connection: Connection, run: str, names: Sequence[str], rank: int | None
) -> dict[str, dict[tuple[int, int], Samples]]:
    """Name -> (rank, attempt) -> samples that are still in the tail, by step and time."""
    parts: dict[str, dict[tuple[int, int], list[Samples]]] = {name: {} for name in names}
    for of, kinds in tail_by_rank(connection, run, rank):
        for (attempt, sent), groups in kinds.items():
            wanted = [at for at, name in enumerate(sent) if name in parts]
            if not wanted:
                continue
            step, time = rows_below_each_other(groups)
            for columns, values in matrices(groups, wanted):
                for column, value in zip(columns, values, strict=True):
                    samples = Samples(step, time, value.astype("<f8", copy=False))
                    parts[sent[column]].setdefault((of, attempt), []).append(samples)
    return {name: {key: merged(pieces) for key, pieces in of_name.items()} for name, of_name in parts.items()}


def tail_by_rank(
    connection: Connection, run: str, rank: int | None = None
) -> Iterator[tuple[int, dict[tuple[int, tuple[str, ...]], list[Arrived]]]]:
    """Rank and (attempt, names) -> its groups of that kind, in the order in which they came. A rank with many samples
    comes in several pieces: who asks need not hold all that waits for the compactor. By rank, which is the order of the
    index: to sort the frames of 120 s took as long as to read them."""
    statement = select(tail.c.rank, tail.c.attempt, tail.c.received, tail.c.samples, tail.c.frame).where(
        tail.c.run == run, tail.c.samples > 0
    )
    if rank is not None:
        statement = statement.where(tail.c.rank == rank)
    kinds: dict[tuple[int, tuple[str, ...]], list[Arrived]] = {}
    held: int | None = None
    size = 0
    for of, attempt, received, samples, frame in connection.execute(statement.order_by(tail.c.rank, tail.c.id)):
        if kinds and (of != held or size >= _TAIL_AT_ONCE):
            assert held is not None
            yield held, kinds
            kinds, size = {}, 0
        held = of
        size += samples
        for group in readable_groups(frame):
            kinds.setdefault((attempt, group.names), []).append((group, received))
    if kinds:
        assert held is not None
        yield held, kinds


def _count_tail(view: View, first: int, last_step: int) -> int:
    top = dict(view.attempts)
    return sum(
        int(((samples.step >= first) & (samples.step <= min(last_step, top.get(attempt, -1)))).sum())
        for (_, attempt), samples in view.tail.items()
    )
