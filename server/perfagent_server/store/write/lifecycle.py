"""Runs, attempts and sources: who sends, how far they are, and how it ended.

Everything here happens inside the transaction that stores the frames, so that a run's state and its samples never
disagree. A run's state is computed from the sources of its newest attempt, so it does not depend on the order in which
reports arrive:
- the earliest failure among the ranks is the run's (a rank that another rank's crash brings down reports later);
- finished, when every rank that ever reported has finished;
- lost, when no rank that has not finished is in contact; a frame that its process made just now brings it back;
- frames that arrive late for a source that has ended (a drained spool) change nothing.

When a run began and ended is its senders' word, put right where their clocks are wrong; when it was last heard is ours.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, insert, null, select, update

from perfagent.wire import STATES, Event, Frame
from perfagent.wire.limits import MAX_COUNT, MOST_LEFT_OUT, whole
from perfagent_server.rules.causes import reason_stored
from perfagent_server.rules.life.first_failure import Failure, first_of
from perfagent_server.store.attempt_starts import UNDECIDED, Starts
from perfagent_server.store.changes import note_change
from perfagent_server.store.statements import Prepared, among
from perfagent_server.store.stored import IMPORTED_SOURCE
from perfagent_server.store.stored_json import stored_number
from perfagent_server.store.tables import attempt as attempts
from perfagent_server.store.tables import run as runs
from perfagent_server.store.tables import source as sources
from perfagent_server.store.write.descriptions import Descriptions, note_left_out
from perfagent_server.store.write.held import HELD, note_held

__all__ = [
    "ENDED",
    "FAILED",
    "FRESH_S",
    "JSON_SOURCE",
    "Seen",
    "load",
    "mark_lost",
    "record",
]

FAILED = ("failed", "oom", "killed", "preempted")
ENDED = ("finished", *FAILED)
FRESH_S = 120.0
JSON_SOURCE = "http-"
"""How the sources begin that this server keeps for programs without an agent (POST /log): they send when they have
something."""
_TIME = struct.Struct("<d")
_SKEW_S = 60.0
"""A clock is off when it differs from ours by more; less may be the time that the first frame took to come."""
_CLOCK_SET = 1e9
"""Unix seconds (2001). Before that a clock was not set yet."""
_REASON_CHARACTERS = 4000


@dataclass(slots=True)
class Seen:
    """A frame and what its rows say. step: the last completed step in it; first_step: the first of its rows but those
    of samplers; None if it holds none. left_out: how many names of its run had no room, and the limit."""

    frame: Frame
    step: int | None
    first_step: int | None
    left_out: tuple[int, int] | None = None


class _RankState(NamedTuple):
    rank: int
    state: str
    reason: str
    started: float
    contact: float
    ended: float | None
    clock_offset_s: float | None

    @classmethod
    def of(cls, rank: object, state: str, reason: str, *times: object) -> _RankState:
        """Of a row, which may hold anything: a rank that cannot be read must not keep others from being marked."""
        started, contact, ended, clock_offset_s = map(stored_number, times)
        number = int(stored_number(rank) or 0)
        return cls(number, str(state), str(reason), started or 0.0, contact or 0.0, ended, clock_offset_s)

    def ended_by_our_clock(self) -> float:
        """Between the start and the last contact, give or take what clocks may be apart, whatever its own clock
        said."""
        return max(self.started, min(_our_time(self.ended or 0.0, self.clock_offset_s), self.contact + _SKEW_S))


_TOUCHED = ("step", "contact", *HELD)
_SOURCE_COLUMNS = ("state", "reason", "host", "pid", "started", "ended", "heartbeat", *_TOUCHED)
_RUN_COLUMNS = (
    "project",
    "name",
    "state",
    "reason",
    "step",
    "started",
    "updated",
    "ended",
    "attempt",
    "attempts",
    "world_size",
    "group_name",
    "host",
    "left_out",
)
_SOURCE_ROW = ("id", "run", "attempt", "rank", *_SOURCE_COLUMNS, "clock_offset_s", "seq_floor")
_RUN_ROW = ("id", *_RUN_COLUMNS)
# Those of a new row: all columns, for what is handed to the driver as it is has no defaults.
_NEW_RUN = (*_RUN_ROW, "tags", "notes", "config", "meta")
_load_source = Prepared(select(*(sources.c[name] for name in _SOURCE_ROW)).where(sources.c.id == bindparam("_id")))
_new_run = Prepared(insert(runs), _NEW_RUN)
_new_source = Prepared(insert(sources), _SOURCE_ROW)
_begin_attempt = Prepared(
    update(attempts)
    .where(
        attempts.c.run == bindparam("_run"),
        attempts.c.attempt == bindparam("_attempt"),
        attempts.c.started > bindparam("started"),
    )
    .values(started=bindparam("started"))
)
_load_run = Prepared(select(*(runs.c[name] for name in _RUN_ROW)).where(runs.c.id == bindparam("_id")))
_states_of_attempt = Prepared(
    select(*(sources.c[name] for name in _RankState._fields)).where(
        sources.c.run == bindparam("run"), sources.c.attempt == bindparam("attempt")
    )
)
_by_source = update(sources).where(sources.c.id == bindparam("_id"))
_by_run = update(runs).where(runs.c.id == bindparam("_id"))
_update_source = Prepared(_by_source.values({name: bindparam(name) for name in _SOURCE_COLUMNS}))
_touch_source = Prepared(_by_source.values({name: bindparam(name) for name in _TOUCHED}))
# How it ended may be another matter now: the engine settles its outcome anew.
_update_run = Prepared(_by_run.values({name: bindparam(name) for name in _RUN_COLUMNS} | {"outcome": null()}))
_touch_run = Prepared(_by_run.values({name: bindparam(name) for name in ("step", "updated")}))


def load(
    connection: Connection, source_ids: Iterable[str], run_ids: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The rows of these sources and runs as far as they exist, by id."""
    of_sources = _load_source.ask(connection, [{"_id": source_id} for source_id in source_ids])
    of_runs = _load_run.ask(connection, [{"_id": run} for run in run_ids])
    return _by_id(_SOURCE_ROW, of_sources()), _by_id(_RUN_ROW, of_runs())


def _by_id(columns: Sequence[str], rows: Iterable[Any]) -> dict[str, dict[str, Any]]:
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows if row is not None}


def record(
    connection: Connection,
    seen: Sequence[Seen],
    known_sources: dict[str, dict[str, Any]],
    known_runs: dict[str, dict[str, Any]],
    starts: Starts,
    now: float,
) -> None:
    """Creates and updates the rows of the runs, attempts and sources of these fresh frames. known_sources, known_runs:
    from load()."""
    if not seen:
        return
    book = _Book(connection, known_runs, known_sources, starts, now)
    for item in seen:
        book.enter(item)
    book.close()


class _Book:
    """The rows in the hands of one transaction: read once, changed in memory, written once."""

    def __init__(
        self,
        connection: Connection,
        run_rows: dict[str, dict[str, Any]],
        source_rows: dict[str, dict[str, Any]],
        starts: Starts,
        now: float,
    ) -> None:
        self.connection, self.runs, self.sources, self.starts, self.now = connection, run_rows, source_rows, starts, now
        self.touched_sources: dict[str, None] = {}
        self.changed_sources: dict[str, None] = {}
        self.new_sources: list[dict[str, Any]] = []
        self.touched_runs: dict[str, None] = {}
        self.judge: dict[str, None] = {}  # runs whose state must be computed again
        self.changed_runs: dict[str, None] = {}
        self.descriptions = Descriptions(connection)

    def enter(self, item: Seen) -> None:
        frame = item.frame
        states = [event for event in frame.events if event.kind == "state"]
        run = self._run(frame)
        source = self.sources.get(frame.source)
        if source is None:
            source = self._source(frame, run, states)
        lives = self._lives(frame, source)
        if lives and source["state"] == "lost":
            source["state"] = "running" if source["step"] or item.step is not None else "starting"
            self._changed(source)
        # a clock may have been set since the source's first frame
        sent = frame.sent
        offset = sent - self.now if sent is not None and math.isfinite(sent) else source["clock_offset_s"]
        self._began(run, source, frame, offset)
        newest = min(self.now, max((_our_time(time, offset) for time in _last_times(frame)), default=0.0))
        note_held(source, frame, newest)
        source["contact"] = self.now if lives else max(source["contact"], newest, source["started"])
        self.touched_sources[source["id"]] = None
        for event in states:
            self._report(run, source, frame, event)
        for event in frame.events:
            if event.kind == "context":
                self._describe(run, frame, event.data)
            elif event.kind == "left_out":  # by the agent; of several ranks, each counts its own
                counted = event.data.get("count")
                count = len(event.data.get("names") or ()) if counted is None else counted
                exact = counted is not None and run["world_size"] == 1
                self._left_out(run, count, event.data.get("limit") or 0, exact=exact)
        if item.left_out is not None:
            self._left_out(run, *item.left_out)
        if item.first_step is not None and not frame.source.startswith(JSON_SOURCE):
            self.starts.has_row(self.connection, frame.run, frame.attempt, item.first_step)
        step = max([item.step or 0, *(event.step or 0 for event in states)])
        if step > source["step"]:
            source["step"] = step
            if source["state"] == "starting" and item.step is not None:
                source["state"] = "running"  # steps are done: a source that does not send its state is running
                self._changed(source)
        run["updated"] = max(run["updated"], self.now)
        if frame.attempt == run["attempt"]:
            run["step"] = max(run["step"], source["step"])
        self.touched_runs[run["id"]] = None

    def close(self) -> None:
        """Writes what changed, then the states that follow from it."""
        self._write_sources()
        self.descriptions.write()
        for run in self.judge:
            self._judge(self.runs[run])
        fresh_runs = [self.runs[run] for run in self.changed_runs]
        if fresh_runs:
            _update_run.send(
                self.connection,
                [{"_id": run["id"], **{name: run[name] for name in _RUN_COLUMNS}} for run in fresh_runs],
            )
        rest = [run for run in self.touched_runs if run not in self.changed_runs]
        if rest:
            _touch_run.send(
                self.connection,
                [{"_id": run, "step": self.runs[run]["step"], "updated": self.runs[run]["updated"]} for run in rest],
            )

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _run(self, frame: Frame) -> dict[str, Any]:
        run = self.runs.get(frame.run)
        if run is None:
            run = {
                "id": frame.run,
                "project": frame.project,
                "name": (frame.name or frame.run)[:256],
                "state": "starting",
                "reason": "",
                "step": 0,
                "started": self.now,
                "updated": self.now,
                "ended": None,
                "attempt": frame.attempt,
                "attempts": 0,
                "world_size": 1,
                "group_name": None,
                "host": None,
                "left_out": "{}",
            }
            _new_run.send(self.connection, [{**run, "tags": "[]", "notes": "", "config": "{}", "meta": "{}"}])
            self.runs[frame.run] = run
            self.judge[frame.run] = None
        return run

    def _source(self, frame: Frame, run: dict[str, Any], states: Sequence[Event]) -> dict[str, Any]:
        self._attempt(frame, run, states)
        sent = frame.sent if frame.sent is not None and math.isfinite(frame.sent) else self.now
        source = {
            "id": frame.source,
            "run": frame.run,
            "attempt": frame.attempt,
            "rank": frame.rank,
            "state": "starting",
            "reason": "",
            "step": 0,
            "host": None,
            "pid": None,
            "started": self.now,
            "contact": 0.0,
            "ended": None,
            "clock_offset_s": sent - self.now,
            "heartbeat": not frame.source.startswith(JSON_SOURCE),  # until it says otherwise
            "worked_until": None,
            "gpus": 0,
            "cpu_cores": None,
            "gpu_energy_j": None,
            "gpu_energy_per_step_j": None,
            "seq_floor": 0,
        }
        self.sources[frame.source] = source
        self.new_sources.append(source)
        self.judge[frame.run] = None
        return source

    def _attempt(self, frame: Frame, run: dict[str, Any], states: Sequence[Event]) -> None:
        if self.starts.exists(self.connection, frame.run, frame.attempt):
            return
        self.starts.begin(self.connection, frame.run, frame.attempt, UNDECIDED, self.now)
        run["attempts"] += 1
        if frame.attempt > run["attempt"]:
            run.update(attempt=frame.attempt, step=0, ended=None, reason="")
        told = next((start for event in states if (start := whole(event.data.get("start_step"))) is not None), None)
        if told is not None:
            self._told_start(run, frame, told)
        self.changed_runs[run["id"]] = None
        self.judge[run["id"]] = None

    def _told_start(self, run: dict[str, Any], frame: Frame, start: int) -> None:
        taken = self.starts.tell(self.connection, frame.run, frame.attempt, frame.rank, start)
        if taken and frame.attempt == run["attempt"]:
            run["step"] = max(run["step"], start - 1)

    def _began(self, run: dict[str, Any], source: dict[str, Any], frame: Frame, offset: float | None) -> None:
        """A run, an attempt and a source began at the earliest time in their frames, in whatever order those come. (By
        the time of arrival, a run recorded offline would end before it began.)"""
        told = [_our_time(time, offset) for time in _times(frame)]
        began = min((time for time in told if time >= _CLOCK_SET), default=self.now)
        if began >= source["started"]:
            return
        source["started"] = began
        self.changed_sources[source["id"]] = None
        _begin_attempt.send(self.connection, [{"_run": frame.run, "_attempt": frame.attempt, "started": began}])
        if began < run["started"]:
            run["started"] = began
            self.changed_runs[run["id"]] = None

    def _report(self, run: dict[str, Any], source: dict[str, Any], frame: Frame, event: Event) -> None:
        """A state event of a source."""
        data = event.data
        state = data.get("state")
        if state not in STATES:
            return
        source["heartbeat"] = data.get("heartbeat") is not False
        if isinstance(data.get("host"), str):
            source["host"] = data["host"][:256]
        if (pid := whole(data.get("pid"), MAX_COUNT)) is not None:
            source["pid"] = pid
        # the agent says more when a later attach() or init() adds to the run
        if state == "starting" or "config" in data:
            self._describe(run, frame, data)
        is_news = state in FAILED and source["state"] == "finished"
        if source["state"] in ENDED and not (is_news or frame.source.startswith(IMPORTED_SOURCE)):
            self._changed(source)  # how it ended is known; files that were still growing are imported again
            return
        if source["state"] == "lost" and state not in ENDED:
            return  # a frame that shows that its process lives has brought it back already
        source["state"] = state
        if state in ENDED:
            source["contact"] = self.now  # nothing of it came later than its end
            source["ended"] = event.time if math.isfinite(event.time) else self.now
            source["reason"] = reason_stored(data.get("reason") or data.get("exception"))[:_REASON_CHARACTERS]
        self._changed(source)

    def _describe(self, run: dict[str, Any], frame: Frame, data: dict[str, Any]) -> None:
        """What the user and the agent said about the run at its start; rank 0 says it, others only what is still
        missing."""
        first = frame.rank == 0
        start = whole(data.get("start_step"))
        if start is not None:
            self._told_start(run, frame, start)
        if frame.attempt != run["attempt"] or not (first or run["host"] is None):
            return
        run["project"] = frame.project
        if "world_size" in data:
            run["world_size"] = max(whole(data["world_size"], MAX_COUNT) or 1, 1)
        if data.get("group"):
            run["group_name"] = str(data["group"])[:256]
        if data.get("host"):
            run["host"] = str(data["host"])[:256]
        self.changed_runs[run["id"]] = None
        self.descriptions.add(run, frame.name, data)

    def _left_out(self, run: dict[str, Any], count: int, limit: int, *, exact: bool = False) -> None:
        if note_left_out(run, "names", count, limit, exact=exact and count < MOST_LEFT_OUT):
            self.changed_runs[run["id"]] = None

    def _lives(self, frame: Frame, source: dict[str, Any]) -> bool:
        """Whether the frame is a sign of life: its own process sent it, and, of a lost one, just now."""
        if frame.relayed or frame.sent is None or source["state"] != "lost":
            return not frame.relayed
        return self.now - (frame.sent - (source["clock_offset_s"] or 0.0)) < FRESH_S

    def _changed(self, source: dict[str, Any]) -> None:
        self.changed_sources[source["id"]] = None
        self.judge[source["run"]] = None

    def _write_sources(self) -> None:
        new = {source["id"] for source in self.new_sources}
        if new:
            _new_source.send(self.connection, self.new_sources)
        changed = [self.sources[source] for source in self.changed_sources if source not in new]
        if changed:
            rows = [{"_id": source["id"], **{name: source[name] for name in _SOURCE_COLUMNS}} for source in changed]
            _update_source.send(self.connection, rows)
        rest = [source for source in self.touched_sources if source not in new and source not in self.changed_sources]
        if rest:
            rows = [{"_id": source, **{name: self.sources[source][name] for name in _TOUCHED}} for source in rest]
            _touch_source.send(self.connection, rows)

    def _judge(self, run: dict[str, Any]) -> None:
        state, reason, ended = _state_of(self.connection, run["id"], run["attempt"])
        run.update(state=state, reason=reason, ended=ended)
        self.changed_runs[run["id"]] = None


def mark_lost(connection: Connection, source_ids: Sequence[str]) -> list[str]:
    """Marks active sources as lost, and with them runs that have no other rank in contact. Answers the runs that
    changed. Their `updated` stays: it says when the run was last heard."""
    active = sources.c.state.in_(("starting", "running"))
    rows = connection.execute(
        select(sources.c.id, sources.c.run).where(among(connection, sources.c.id, source_ids), active)
    ).all()
    if not rows:
        return []
    connection.execute(
        update(sources).where(among(connection, sources.c.id, (row.id for row in rows))).values(state="lost")
    )
    changed = []
    for run in sorted({row.run for row in rows}):
        before = connection.execute(select(runs.c.state, runs.c.attempt).where(runs.c.id == run)).one()
        state, reason, ended = _state_of(connection, run, before.attempt)
        if state != before.state:
            connection.execute(update(runs).where(runs.c.id == run).values(state=state, reason=reason, ended=ended))
            note_change(connection, "run", run)
            changed.append(run)
    return changed


def _state_of(connection: Connection, run: str, attempt: int) -> tuple[str, str, float | None]:
    """State, reason and end (Unix seconds) of a run, from the sources of one attempt."""
    rows = [_RankState.of(*row) for row in _states_of_attempt.all(connection, {"run": run, "attempt": attempt})]
    # By the ranks' own clocks: on one host they resolve milliseconds, which our guess of how far a clock is off does
    # not.
    failures = [row for row in rows if row.state in FAILED]
    if failures:
        first = failures[first_of([Failure(row.ended or 0.0, row.rank, row.state, row.reason) for row in failures])]
        several = len({row.rank for row in rows}) > 1
        reason = first.reason
        if several and reason:
            reason = reason_stored({"key": "of_rank", "rank": first.rank, "why": reason})
        return first.state, reason, first.ended_by_our_clock()
    finished = {row.rank for row in rows if row.state == "finished"}
    active = [row for row in rows if row.rank not in finished]
    if finished and not active:
        said = next((row.reason for row in rows if row.reason and row.state == "finished"), "")  # stopped from afar
        return "finished", said, max(row.ended_by_our_clock() for row in rows if row.state == "finished")
    states = {row.state for row in active}
    for state in ("running", "starting"):
        if state in states:
            return state, "", None
    return ("lost", reason_stored({"key": "no_contact"}), None) if states else ("starting", "", None)


def _times(frame: Frame) -> list[float]:
    """The times in a frame, by its sender's clock: of its events, and of the first row of each group, which is its
    earliest (all but: to look at every row would take longer than storing them)."""
    times = [_TIME.unpack_from(group.time)[0] for group in frame.groups if group.rows]
    for event in frame.events:
        times.append(event.time)
        if event.kind == "state" and isinstance(told := event.data.get("started"), float):
            times.append(told)  # of a watcher, which may have said nothing before its script ended
    return times


def _last_times(frame: Frame) -> list[float]:
    """The last time of each group, which is its latest, and those of the events."""
    times = [_TIME.unpack_from(group.time, len(group.time) - 8)[0] for group in frame.groups if group.rows]
    return [time for time in (*times, *(event.time for event in frame.events)) if math.isfinite(time)]


def _our_time(time: float, clock_offset_s: float | None) -> float:
    """A sender's time by our clock. A frame holds the time at which it was sent, so that even one that was kept for
    days shows how far its sender's clock is off."""
    return time - clock_offset_s if clock_offset_s is not None and abs(clock_offset_s) > _SKEW_S else time
