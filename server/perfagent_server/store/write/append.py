"""The ack path: frames into ledger and tail, in one transaction with the rows of their runs, sources and series.

A frame is one row, or some where it has thousands of rows (pieces.py); that is all the work before the acknowledgement. The
compactor (compaction.py) turns tail rows into blocks later.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Connection, bindparam, delete, insert, select

from perfagent.wire import Frame, Group
from perfagent.wire.limits import MAX_NAMES_PER_RUN, MAX_STEP, MOST_LEFT_OUT, name_problem, room_of
from perfagent_server.database import Database
from perfagent_server.database.backend import replica_of
from perfagent_server.event_data import ImportData, Rejected
from perfagent_server.store import artifacts, imports
from perfagent_server.store.attempt_starts import Starts
from perfagent_server.store.changes import newest_deletion, note_change
from perfagent_server.store.clickhouse.marks import note_deletion
from perfagent_server.store.codec.tail import pack_tail, step_range
from perfagent_server.store.interface import Batch, Check, Receipt, no_check
from perfagent_server.store.statements import Prepared, compile_all, insert_for, pipelined
from perfagent_server.store.tables import event, idempotency, ledger, series, source, tail
from perfagent_server.store.tables import run as run_table
from perfagent_server.store.write import lifecycle
from perfagent_server.store.write.emptying import empty_run
from perfagent_server.store.write.ownership import refusals
from perfagent_server.store.write.pieces import picked, pieces

__all__ = ["Appender", "deletion_mark"]

_KNOWN_RANKS = 8192  # (run, rank) pairs whose names stay in memory

# Rows with this name are written at the end of an optimizer step. A process that never sends it is believed by whatever
# it logs, except for what samplers write while a step is still going on.
_STEP_MARKS = frozenset(("step_time_s", "phase/optimizer_s"))
"""Series of completed steps only; the first step of a process has no time."""
_SAMPLED = ("gpu/", "node_gpu", "host/", "disk/", "process/", "agent/", "cuda/")

Names = frozenset[str]

_encoder = msgspec.msgpack.Encoder()
_claim_frame = Prepared(
    lambda dialect: insert_for(dialect)(ledger).on_conflict_do_nothing().returning(ledger.c.seq), ("source", "seq")
)
_keep_frame = Prepared(
    insert(tail).returning(tail.c.id), ("run", "attempt", "rank", "source", "seq", "samples", "received", "frame")
)
_keep_event = Prepared(insert(event), ("run", "attempt", "rank", "source", "kind", "step", "time", "data"))
_names_of_rank = Prepared(
    select(series.c.name).where(series.c.run == bindparam("run"), series.c.rank == bindparam("rank"))
)
_names_of_run = Prepared(select(series.c.name).distinct().where(series.c.run == bindparam("run")))
# Fifty names a statement take 1.0 µs a name, a statement for each takes 1.6: 5 % of the first frames of a rank with
# 2000 names.
_new_series = Prepared(
    lambda dialect: insert_for(dialect)(series).on_conflict_do_nothing(), ("run", "rank", "name"), at_once=50
)


@dataclass(slots=True)
class _NamesOfRun:
    """names: that some rank of a run has; taken: of each room (wire/limits.py); left_out: hashes of those for which there
    was none."""

    names: Names
    taken: Counter[str]
    left_out: set[int] = field(default_factory=set)


class Appender:
    """The half of SqlStore that writes."""

    def __init__(self, database: Database, *, max_names: int = MAX_NAMES_PER_RUN) -> None:
        compile_all(database.engine)
        self.database = database
        self._max_names = max_names
        # Names of series; filled inside transactions, so forgotten whenever one is undone. Only the writer thread
        # looks.
        self._known: dict[tuple[str, int], Names] = {}
        self._of_run: dict[str, _NamesOfRun] = {}
        self._shared: dict[Names, Names] = {}  # most runs have the same names: one set for all of them
        self._starts = Starts()
        self._deletions = 0  # the newest one by another server that the caches know of
        self.on_deletion: list[Callable[[Connection, str], object]] = []
        """Called with a run that is about to go, in the transaction in which it does."""
        self.on_import: list[Callable[[Connection, str, ImportData], object]] = []
        """Called with a run that is imported and what its sender says of it, in the transaction that stores it."""
        database.on_rollback.append(self._forget)

    def append(self, take: Callable[[], Batch]) -> Future[list[Receipt]]:
        """See MetricStore."""
        rejected: dict[int, list[Rejected]] = {}  # a second try no longer finds what the first has taken out

        def store(connection: Connection) -> list[Receipt]:
            batch = take()
            return self.append_in(connection, batch.frames, batch.now, batch.limited, rejected)

        return self.database.submit(store)

    def append_in(
        self,
        connection: Connection,
        frames: Sequence[Frame],
        now: float,
        limited: Collection[int] = (),
        rejected: dict[int, list[Rejected]] | None = None,
    ) -> list[Receipt]:
        """append() within a transaction of the writer. What is rejected is taken out of the frames themselves, so that the
        readers behind the ack see what was stored. rejected: by position, of an earlier try with the same frames."""
        self._make_room()
        with pipelined(connection):
            receipts, fresh = self._append(connection, frames, now, limited, {} if rejected is None else rejected)
        for at in fresh:
            artifacts.take(connection, frames[at], now)
            for said in imports.take(connection, frames[at]):
                for told in self.on_import:
                    told(connection, frames[at].run, said)
        return receipts

    def _append(
        self,
        connection: Connection,
        frames: Sequence[Frame],
        now: float,
        limited: Collection[int],
        rejected: dict[int, list[Rejected]],
    ) -> tuple[list[Receipt], list[int]]:
        """The receipts, and the positions of the frames that were not here before."""
        self._heed_deletions(connection)
        sources, runs = lifecycle.load(connection, {frame.source for frame in frames}, {frame.run for frame in frames})
        refused = refusals(frames, sources, runs, limited)
        fresh = self._fresh(connection, frames, sources, refused)
        new_names: list[tuple[str, int, str]] = []
        seen = []
        for at in fresh:
            frame = frames[at]
            rejected.setdefault(at, []).extend(_take_out_bad_steps(frame))
            new_names += self._admit_names(connection, frame, rejected[at])
            first, done = _measure(frame, not _STEP_MARKS.isdisjoint(self._names(connection, frame.run, frame.rank)))
            of_run = self._of_run.get(frame.run)
            left_out = (len(of_run.left_out), self._max_names) if of_run is not None and of_run.left_out else None
            seen.append(lifecycle.Seen(frame, done, first, left_out))
        lifecycle.record(connection, seen, sources, runs, self._starts, now)
        if new_names:
            _new_series.rows(connection, new_names)
        ids = self._write_tail(connection, [frames[at] for at in fresh], now)
        stored = set(fresh)
        receipts = [
            Receipt(frame.samples, 0, rejected[at], ids.get((frame.source, frame.seq)))
            if at in stored
            else Receipt(0, 0 if at in refused else frame.samples, refused=refused.get(at), again=at not in refused)
            for at, frame in enumerate(frames)
        ]
        return receipts, fresh

    def _fresh(
        self,
        connection: Connection,
        frames: Sequence[Frame],
        sources: dict[str, dict[str, Any]],
        refused: Collection[int],
    ) -> list[int]:
        """Positions of the frames that are to be stored and not here yet; they are in the ledger from now on."""
        claims: dict[tuple[str, int], int] = {}
        for at, frame in enumerate(frames):
            row = sources.get(frame.source)
            if at not in refused and (row is None or frame.seq > row["seq_floor"]):
                claims.setdefault((frame.source, frame.seq), at)
        if not claims:
            return []
        won = _claim_frame.ask(connection, [{"source": source_id, "seq": seq} for source_id, seq in claims])()
        return sorted(at for at, row in zip(claims.values(), won, strict=True) if row is not None)

    def _names(self, connection: Connection, run: str, rank: int) -> Names:
        """Names of a rank's series."""
        known = self._known.get((run, rank))
        if known is None:
            rows = _names_of_rank.all(connection, {"run": run, "rank": rank})
            known = self._known[run, rank] = self._share(name for (name,) in rows)
        return known

    def _share(self, names: Iterable[str]) -> Names:
        found = frozenset(names)
        return self._shared.setdefault(found, found)

    def _grown(self, known: Names, more: Iterable[str]) -> Names:
        """The set with more names. A script that logs a new name at each step must not leave each set behind."""
        self._shared.pop(known, None)
        return self._share(known.union(more))

    def _make_room(self) -> None:
        """Between transactions: names that one admits are not in the tables before its end."""
        if len(self._known) >= _KNOWN_RANKS:
            self._forget_names()
        self._starts.make_room()

    def _heed_deletions(self, connection: Connection) -> None:
        """Another server may have deleted a run whose rows the caches believe in."""
        if replica_of(connection) is None:
            return
        newest = newest_deletion(connection)
        if newest > self._deletions:
            self._deletions = newest
            self._forget()

    def _forget(self) -> None:
        self._forget_names()
        self._starts.forget()

    def _forget_names(self) -> None:
        self._known.clear()
        self._of_run.clear()
        self._shared.clear()

    def _admit_names(
        self, connection: Connection, frame: Frame, rejected: list[Rejected]
    ) -> list[tuple[str, int, str]]:
        """The names of which series are to be created, as (run, rank, name); takes out of the frame what may not become
        one."""
        known = self._names(connection, frame.run, frame.rank)
        new = {
            name: None
            for group in frame.groups
            if not group.values.keys() <= known
            for name in group.values
            if name not in known
        }
        if not new:
            return []
        refused = self._refused(connection, frame.run, new)
        admitted = [name for name in new if name not in refused]
        self._known[frame.run, frame.rank] = self._grown(known, admitted)
        if refused:
            counts = dict.fromkeys(refused, 0)
            for group in frame.groups:
                for name in refused.keys() & group.values.keys():
                    del group.values[name]
                    counts[name] += group.rows
            frame.groups = [group for group in frame.groups if group.values]
            rejected.extend(
                Rejected(name[:300].encode(errors="replace").decode(), refused[name], count)
                for name, count in counts.items()
            )
        return [(frame.run, frame.rank, name) for name in admitted]

    def _refused(self, connection: Connection, run: str, new: Iterable[str]) -> dict[str, str]:
        """Which of the names that are new to a rank may not become series, and why."""
        of_run = self._names_of_run(connection, run)
        # what one rank sends, the others have mostly sent before
        unheard = [name for name in new if name not in of_run.names]
        refused = {name: problem for name in unheard if (problem := name_problem(name)) is not None}
        admitted = []
        for name in unheard:
            if name in refused:
                continue
            room = room_of(name)
            if room == "catalogue" or of_run.taken[room] < self._max_names:
                of_run.taken[room] += 1
                admitted.append(name)
                continue
            refused[name] = (
                f"the run has {self._max_names} names already, which is the limit (PERFAGENT_MAX_NAMES at the server)"
            )
            if len(of_run.left_out) < MOST_LEFT_OUT:
                of_run.left_out.add(hash(name))
        if admitted:
            of_run.names = self._grown(of_run.names, admitted)
        return refused

    def _names_of_run(self, connection: Connection, run: str) -> _NamesOfRun:
        """Names that some rank of a run has, also those that this transaction has admitted. Read once, since to look through all
        series of 512 ranks takes 150 ms. So each of several servers has a limit of its own."""
        found = self._of_run.get(run)
        if found is None:
            names = self._share(name for (name,) in _names_of_run.all(connection, {"run": run}))
            found = self._of_run[run] = _NamesOfRun(names, Counter(map(room_of, names)))
        return found

    def _write_tail(self, connection: Connection, frames: Sequence[Frame], now: float) -> dict[tuple[str, int], int]:
        """Newest tail ids by (source, seq). A frame that only said "I am here" has nothing to keep and no row."""
        events = [artifacts.lasting(frame.events) for frame in frames]
        rows: list[dict[str, Any]] = [
            {
                "run": frame.run,
                "attempt": frame.attempt,
                "rank": frame.rank,
                "source": frame.source,
                "seq": frame.seq,
                "samples": sum(group.samples for group in groups),
                "received": now,
                "frame": pack_tail(groups, said),
            }
            for frame, lasting in zip(frames, events, strict=True)
            if frame.groups or lasting
            for groups, said in pieces(frame.groups, lasting)
        ]
        if not rows:
            return {}
        ids = {
            (row["source"], row["seq"]): found[0]
            for row, found in zip(rows, _keep_frame.ask(connection, rows)(), strict=True)
        }
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
            _keep_event.send(connection, happened)
        return ids

    def delete(self, run: str, check: Check = no_check) -> None:
        """See MetricStore. Most of it goes in short transactions, so that the last one is short, too."""
        empty_run(self.database, run, check)
        self.database.write(partial(self._delete, run=run, check=check), essential=True)

    def _delete(self, connection: Connection, run: str, check: Check) -> None:
        """The foreign keys take everything else of the run along."""
        check(connection)
        for told in self.on_deletion:
            told(connection, run)
        fed = select(source.c.id).where(source.c.run == run, source.c.id.startswith(lifecycle.JSON_SOURCE)).limit(1)
        if connection.execute(fed).first() is not None:
            mark = {"key": deletion_mark(run), "created": time.time(), "reply": b""}
            connection.execute(insert_for(connection.dialect.name)(idempotency).values(mark).on_conflict_do_nothing())
        connection.execute(delete(ledger).where(ledger.c.source.in_(select(source.c.id).where(source.c.run == run))))
        note_deletion(connection, run)
        connection.execute(delete(run_table).where(run_table.c.id == run))
        note_change(connection, "deleted", run)
        self._of_run.pop(run, None)
        self._starts.drop(run)
        for key in [key for key in self._known if key[0] == run]:
            del self._known[key]


def deletion_mark(run: str) -> str:
    """Stands among the idempotency keys, as long as one of them, after a run with rows of POST /log was deleted: a
    retry of these rows must not bring it back."""
    return f"deleted:{run}"


def _take_out_bad_steps(frame: Frame) -> list[Rejected]:
    """Takes out rows whose step is no step, and what has no rows."""
    rejected: list[Rejected] = []
    for at, group in enumerate(frame.groups):
        if group.step:
            low, high = step_range(group)
            if low < 0 or high > MAX_STEP:
                frame.groups[at] = _without_bad_steps(group, rejected)
    frame.groups = [group for group in frame.groups if group.step and group.values]
    return rejected


def _measure(frame: Frame, marks: bool) -> tuple[int | None, int | None]:
    """First step of a frame's rows but those of samplers, and the last one that it shows to be completed. marks:
    whether its process marks the ends of its steps."""
    first: int | None = None
    marked: int | None = None
    logged: int | None = None
    for group in frame.groups:
        if all(name.startswith(_SAMPLED) for name in group.values):
            continue
        low, high = step_range(group)
        first = low if first is None else min(first, low)
        logged = high if logged is None else max(logged, high)
        if not _STEP_MARKS.isdisjoint(group.values):
            marked = high if marked is None else max(marked, high)
    return first, marked if marks else logged


def _without_bad_steps(group: Group, rejected: list[Rejected]) -> Group:
    steps = np.frombuffer(group.step, "<i8")
    keep = (steps >= 0) & (steps <= MAX_STEP)
    count = int((~keep).sum())
    rejected.extend(Rejected(name[:300], f"a step must be from 0 to {MAX_STEP}", count) for name in group.values)
    return picked(group, keep)
