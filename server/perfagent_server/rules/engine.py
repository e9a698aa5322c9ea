"""The rules thread: it judges what was committed and writes what follows from it.

It reads the tail from its cursor, has each run's evaluator judge its frames in order, and writes everything that one
round caused in ONE transaction: alert rows, their deliveries, the snapshot of each run concerned, lost sources. Killed
before that commit, it judges the same frames again from the same snapshots and comes to the same alerts with the same
ids; killed after it, the snapshots say (`upto`) which frames are behind them. Nothing is sent twice, nothing is
forgotten.

Rounds that change no alert are only remembered in memory; every CHECKPOINT_S, or as rarely as writing them costs at
most five percent of the time, the snapshots of all runs that moved and then the cursor "rules" are written together.
The tail keeps what lies beyond the cursor, so that a kill costs the judging of some seconds again, and no alert.

No frame and no rule stops the others. A rule that raises is left out at that step. Where anything else raises, or a
table does not take what follows, the run is judged again from its snapshot, this time with care: a copy before every
frame to go back to, and a transaction for every change. What fails then is passed over, counted and said once.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from sqlalchemy import Connection, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from perfagent.wire import Alert, Finding, healthy
from perfagent_server import lifecycle
from perfagent_server.alerts import rows
from perfagent_server.alerts.life import Change
from perfagent_server.database import Database, StorageError
from perfagent_server.diagnosis import verdict as diagnosis
from perfagent_server.rules.catalogue import RULES, Rule
from perfagent_server.rules.evaluator import STATE_VERSION, Evaluator
from perfagent_server.rules.liveness import LostContact
from perfagent_server.store.interface import MetricStore, Stored
from perfagent_server.store.tables import cursor, rule_state, source
from perfagent_server.store.tables import run as runs

__all__ = ["CHECKPOINT_S", "CURSOR", "Engine", "Listener"]

log = logging.getLogger("perfagent.server")

CURSOR = "rules"
CHECKPOINT_S = 2.0
GRACE_S = 60.0  # of uptime before anyone is called lost: agents need time to find a server that came back
_BATCH = 256  # frames judged between two commits
_IDLE_WAIT_S = 1.0
_SILENCE_EVERY_S = 2.0
# A program without an agent sends when it has something, which may be once an epoch: it is called lost (without an
# alert: most such programs just end) after ten times its longest pause, once there were pauses enough to know.
_PAUSES_KNOWN = 10
_PAUSES_TIMES = 10.0
_LEAST_SILENCE_S = 120.0
_UNKNOWN_SILENCE_S = 3600.0
_KEPT_RUNS = 2048  # evaluators in memory; the others lie in their snapshots
_BUSY_RUN_S = 600.0  # an evaluator that was idle for so long is dropped from memory
_MOST_SAID = 1000  # kinds of trouble that are remembered as logged


class Listener(Protocol):
    """Who shows alerts live (live.Hub)."""

    def publish_alert(self, alert: Alert) -> None: ...


class _AgainError(Exception):
    """A run could not be judged, or its state not be written down: it is to be judged again with care."""


class Engine:
    """start() and stop() the thread; wake() after each commit; run_once() does one round by hand (tests, backtests).

    link: the address of a run's page, for webhooks. on_deliveries: called after deliveries were written (wakes the
    outbox); on_states: with the runs that were just called lost; on_fire: with each finding that became an alert.
    clock: wall clock, Unix seconds; monotonic: measures silence, so that a jump of the wall clock looks like nothing.
    """

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        hub: Listener | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        rules: Sequence[Rule] = RULES,
        link: Callable[[str], str] = "http://127.0.0.1:8420/run/{}".format,
        on_deliveries: Callable[[], None] | None = None,
        on_states: Callable[[list[str]], None] | None = None,
        on_fire: Callable[[str, Finding], None] | None = None,
        checkpoint_s: float = CHECKPOINT_S,
    ) -> None:
        self._database, self._store, self._hub = database, store, hub
        self._clock, self._monotonic = clock, monotonic
        self._rules, self._link, self.on_deliveries = rules, link, on_deliveries
        self.on_states, self.on_fire = on_states, on_fire
        self._checkpoint_s = checkpoint_s
        self._lost_after_s = next((rule.after_s for rule in rules if isinstance(rule, LostContact)), 30.0)
        self._lock = threading.RLock()  # evaluators: the thread judges, routes read verdicts
        self._judges: OrderedDict[str, Evaluator] = OrderedDict()  # least recently moved first
        self._moved: dict[str, float] = {}  # run -> when its evaluator last moved, monotonic
        self._dirty: set[str] = set()  # runs whose snapshot is older than their evaluator
        self._ticking: set[str] = set()  # runs in which a step waits for a slow rank
        self._careful: set[str] = set()  # runs that failed and are judged with care
        self._said: set[tuple[str, str]] = set()  # run and what was passed over in it, logged already
        self._seen: int | None = None  # tail id judged in memory; None before the first round
        self._saved = 0  # tail id in the table
        self._started = monotonic()
        self._checkpoint_due = monotonic()
        self._silence_due = monotonic()
        self._heard: dict[
            str, tuple[float, float]
        ] = {}  # source -> (contact as stored, when that value was first met, monotonic)
        self._pauses: dict[str, tuple[int, float]] = {}  # source without an agent -> (how many, the longest, seconds)
        self._event = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        # passed_over: frames, judgements of a rule, and changes of alerts; dropped_alerts: of users, for which there
        # was no room
        self.counters = {
            "frames": 0, "rounds": 0, "alerts": 0, "checkpoints": 0, "failures": 0, "runs_in_memory": 0, "passed_over": 0,
            "dropped_alerts": 0,
        }  # fmt: skip

    # --- the thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="perfagent-rules", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Judges what is there, writes a last checkpoint and ends the thread."""
        self._stopping = True
        self._event.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def wake(self) -> None:
        """There may be something new. Cheap; called on the writer thread after each commit."""
        self._event.set()

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping:
            self._event.wait(_IDLE_WAIT_S if pause == 0 else pause)
            self._event.clear()
            try:
                while self.run_once() == _BATCH and not self._stopping:
                    pass
                self._look_for_silence()
                if self._monotonic() >= self._checkpoint_due:
                    self.checkpoint()
                pause = 0.0
            except Exception as error:  # noqa: BLE001 - the rules must outlive a full disk and a frame nobody foresaw; it is counted and said
                pause = min(max(1.0, 2 * pause), 30.0)
                self._failed(error, pause)
        with suppress(StorageError, _AgainError):
            self.checkpoint()

    def _failed(self, error: Exception, pause: float) -> None:
        self.counters["failures"] += 1
        if isinstance(error, StorageError):
            log.warning("the rules wait %.0f s for the database: %s", pause, error)
        else:
            log.error("judging failed, tried again in %.0f s", pause, exc_info=error)
        self.forget()

    def forget(self) -> None:
        """Drops everything that is only in memory: the next round starts from what the tables say."""
        with self._lock:
            self._judges.clear()
            self._dirty.clear()
            self._ticking.clear()
            self._seen = None

    # --- one round ----------------------------------------------------------------------------------------------------

    def run_once(self) -> int:
        """Judges what came since the last round; how many frames that were. Everything it causes is committed on
        return."""
        with self._lock:
            while True:
                try:
                    return self._round()
                except _AgainError:  # at most once a run: what fails with care is passed over
                    self.forget()

    def _round(self) -> int:
        if self._seen is None:
            self._seen = self._saved = self._load_cursor()
        batch = self._store.since(self._seen, _BATCH)
        self._load({stored.run for stored in batch})
        changes: list[tuple[str, Change]] = []
        moment = self._monotonic()
        drained = self._still_lost(batch)
        for stored in batch:
            changes += self._take(stored, moment, drained=stored.source in drained)
        if self._ticking:
            now = self._clock()
            for run in [run for run in self._ticking if run in self._judges]:
                changes += self._judged(run, "a tick", lambda judge: judge.tick(now))
                self._dirty.add(run)
                if not self._judges[run].needs_tick():
                    self._ticking.discard(run)
        if changes:
            self._commit(changes)
        if batch:
            self._seen = batch[-1].id
            self.counters["frames"] += len(batch)
            self.counters["rounds"] += 1
        return len(batch)

    def _take(self, stored: Stored, moment: float, *, drained: bool) -> list[tuple[str, Change]]:
        judge = self._judges.get(stored.run)
        if judge is None or stored.id <= judge.upto:
            return []  # the run is deleted, or the snapshot was taken after this frame
        changes = self._judged(stored.run, "a frame", lambda judge: judge.take(stored, drained=drained))
        judge = self._judges[stored.run]
        judge.upto = stored.id  # also of one that was passed over
        self.counters["dropped_alerts"] += judge.dropped
        judge.dropped = 0
        self._judges.move_to_end(stored.run)
        self._moved[stored.run] = moment
        self._dirty.add(stored.run)
        if stored.source.startswith(lifecycle.JSON_SOURCE):
            self._note_pause(stored.source, moment)
        if not drained:
            self._heard[stored.source] = (stored.received, moment)
        if judge.needs_tick():
            self._ticking.add(stored.run)
        return changes

    def _still_lost(self, batch: Sequence[Stored]) -> set[str]:
        """The sources of these frames that were called lost and are: what is found in the spool of a dead process is no
        sign of life. Which frames are one, lifecycle has said when it stored them."""
        judges = self._judges
        asked = {one.source for one in batch if one.run in judges and one.rank in judges[one.run].window.lost}
        if not asked:
            return set()
        with self._database.read() as connection:
            still = select(source.c.id).where(source.c.id.in_(asked), source.c.state == "lost")
            return set(connection.execute(still).scalars())

    # --- what cannot be judged or written -----------------------------------------------------------------------------

    def _judged(self, run: str, what: str, judging: Callable[[Evaluator], list[Change]]) -> list[tuple[str, Change]]:
        """What a run's evaluator makes of something. What it cannot judge leaves no trace in it."""
        judge = self._judges[run]
        before = judge.snapshot() if run in self._careful else None
        try:
            changes = judging(judge)
            if before is not None:
                judge.snapshot()  # that it can be written down is part of it
        except Exception as error:
            if before is None:
                self._careful.add(run)
                raise _AgainError(f"{what} of run {run} could not be judged") from error
            self._pass_over(run, what, error)
            self._judges[run] = self._restored(run, before)
            return []
        return [(run, change) for change in changes]

    def _pass_over(self, run: str, what: str, error: Exception) -> None:
        self.counters["passed_over"] += 1
        if (run, what) not in self._said:
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said.add((run, what))
            log.error("%s of run %s is passed over, and so is what fails in this way later", what, run, exc_info=error)

    def _restored(self, run: str, state: bytes) -> Evaluator:
        return Evaluator.restore(state, rules=self._rules, on_failure=partial(self._rule_failed, run))

    def _rule_failed(self, run: str, rule: str, error: Exception) -> None:
        self._pass_over(run, f"a judgement by {rule}", error)

    def _snapshots(self, names: Iterable[str]) -> dict[str, bytes]:
        taken = {}
        for run in names:
            try:
                taken[run] = self._judges[run].snapshot()
            except Exception as error:
                if run in self._careful:
                    raise
                self._careful.add(run)
                raise _AgainError(f"the state of run {run} cannot be written down") from error
        return taken

    def _commit(self, changes: list[tuple[str, Change]], also: Callable[[Connection], object] | None = None) -> None:
        """Alerts, deliveries and the snapshots of the runs concerned, in one transaction; of runs judged with care
        apart."""
        usual = [one for one in changes if one[0] not in self._careful]
        snapshots = self._snapshots(sorted({run for run, _ in changes}))
        try:
            for run in sorted(snapshots.keys() & self._careful):
                self._write_apart(run, [one for one in changes if one[0] == run], snapshots[run])
            if usual or also is not None:
                self._write(usual, {run: snapshots[run] for run, _ in usual}, also)
        except BaseException as error:
            self.forget()  # the evaluators have moved on from what the tables say
            if isinstance(error, Exception) and _of_the_rows(error):
                self._careful.update(run for run, _ in usual)
            raise

    def _write_apart(self, run: str, changes: list[tuple[str, Change]], snapshot: bytes) -> None:
        """Each change of a run on its own, so that one that no table takes costs no other; then its snapshot. A kill
        between them has the rest written after the restart: a row that is there already is not written, nor sent,
        again."""
        whole = True
        for one in changes:
            try:
                self._write([one], {})
            except Exception as error:
                if not _of_the_rows(error):
                    raise
                whole = False
                self._pass_over(run, f"an alert ({one[1].finding.rule})", error)
        self._write([], {run: snapshot})
        if whole and all(run != failed for failed, _ in self._said):
            self._careful.discard(run)  # it was another's fault

    def _write(
        self,
        changes: list[tuple[str, Change]],
        snapshots: dict[str, bytes],
        also: Callable[[Connection], object] | None = None,
    ) -> None:
        now = self._clock()

        def job(connection: Connection) -> tuple[list[Alert], int]:
            if also is not None:
                also(connection)
            written, deliveries = rows.apply(connection, changes, now, self._link)
            _save(connection, snapshots)
            return written, deliveries

        alerts, deliveries = self._database.write(job, essential=True)
        self._dirty.difference_update(snapshots)
        self.counters["alerts"] += sum(1 for _, change in changes if change.kind == "fire")
        if deliveries and self.on_deliveries is not None:
            self.on_deliveries()
        if self.on_fire is not None:
            for run, change in changes:
                if change.kind == "fire":
                    self.on_fire(run, change.finding)
        if self._hub is not None:
            for alert in alerts:
                self._hub.publish_alert(alert)

    def checkpoint(self) -> None:
        """Writes the snapshots of all runs that moved, then the cursor, in one transaction."""
        with self._lock:
            begun = self._monotonic()
            if self._seen is not None and (self._dirty or self._seen > self._saved):
                snapshots = self._snapshots(run for run in self._dirty if run in self._judges)
                seen = self._seen

                def job(connection: Connection) -> None:
                    _save(connection, snapshots)
                    _put(connection, cursor, {"name": CURSOR, "tail_id": seen}, ("name",))

                self._database.write(job, essential=True)
                self._saved = seen
                self._dirty.clear()
                self.counters["checkpoints"] += 1
            self._evict(begun)
            took = self._monotonic() - begun
            self._checkpoint_due = begun + max(self._checkpoint_s, 20 * took)

    def _evict(self, moment: float) -> None:
        """Drops evaluators that lie in their snapshots as they are: idle ones, and the oldest when there are many."""
        for run in list(self._judges):
            idle = moment - self._moved.get(run, moment) > _BUSY_RUN_S
            if not idle and len(self._judges) <= _KEPT_RUNS:
                break
            if run not in self._dirty:
                del self._judges[run]
                self._moved.pop(run, None)
                self._ticking.discard(run)
        self.counters["runs_in_memory"] = len(self._judges)

    # --- silence ------------------------------------------------------------------------------------------------------

    def _look_for_silence(self) -> None:
        """Calls lost who was not heard for long enough. Silence is measured between two looks at the same stored
        contact, by the monotonic clock, so that no jump of a wall clock and no downtime of this server can look like
        it."""
        moment = self._monotonic()
        if moment < self._silence_due:
            return
        self._silence_due = moment + _SILENCE_EVERY_S
        self.look_for_silence()

    def look_for_silence(self) -> None:
        """One look (the thread does it every two seconds)."""
        moment = self._monotonic()
        with self._lock, self._database.read() as connection:
            active = connection.execute(
                select(
                    source.c.id, source.c.run, source.c.attempt, source.c.rank, source.c.contact, source.c.state,
                    source.c.heartbeat,
                ).where(
                    source.c.state.in_(("starting", "running", "stuck"))
                    | (source.c.heartbeat.is_(True) & (source.c.state == "lost"))
                )
            ).all()  # fmt: skip
        silent: dict[str, dict[tuple[int, int], float]] = {}
        newly: list[str] = []
        present = set()
        for row in active:
            present.add(row.id)
            contact, since = self._heard.get(row.id, (None, moment))
            if contact != row.contact:
                if row.state != "lost":
                    since = moment
                elif contact is None:
                    since = moment - self._lost_after_s
                self._heard[row.id] = (row.contact, since)  # of one that is lost a spool was found: its silence goes on
            quiet = moment - since
            if quiet >= self._patience(row.id, row.heartbeat) and moment - self._started >= GRACE_S:
                if row.heartbeat:
                    silent.setdefault(row.run, {})[row.attempt, row.rank] = quiet
                if row.state != "lost":
                    newly.append(row.id)
        for gone in [name for name in self._heard if name not in present and moment - self._heard[name][1] > GRACE_S]:
            del self._heard[gone]
            self._pauses.pop(gone, None)
        if newly:
            self._call_lost(silent, newly)

    def _note_pause(self, name: str, moment: float) -> None:
        heard = self._heard.get(name)
        if heard is not None:
            count, longest = self._pauses.get(name, (0, 0.0))
            self._pauses[name] = (count + 1, max(longest, moment - heard[1]))

    def _patience(self, name: str, heartbeat: bool) -> float:
        """How long a source may be silent, in seconds."""
        if heartbeat:
            return self._lost_after_s
        count, longest = self._pauses.get(name, (0, 0.0))
        return max(_LEAST_SILENCE_S if count >= _PAUSES_KNOWN else _UNKNOWN_SILENCE_S, _PAUSES_TIMES * longest)

    def _call_lost(self, silent: dict[str, dict[tuple[int, int], float]], newly: list[str]) -> None:
        with self._lock:
            while self.run_once():
                pass  # what is committed but not yet judged may be the sign of life
            self._load(silent)
            now = self._clock()
            changes: list[tuple[str, Change]] = []
            for run, ranks in silent.items():
                if run in self._judges:
                    changes += self._judged(run, "the silence", partial(Evaluator.silence, lost=ranks, now=now))
            lost: list[str] = []

            def mark(connection: Connection) -> None:
                lost[:] = lifecycle.mark_lost(connection, newly)

            self._commit(changes, mark)
            if lost and self.on_states is not None:
                self.on_states(lost)

    # --- evaluators ---------------------------------------------------------------------------------------------------

    def _load_cursor(self) -> int:
        with self._database.read() as connection:
            return int(connection.execute(select(cursor.c.tail_id).where(cursor.c.name == CURSOR)).scalar() or 0)

    def _load(self, wanted: Iterable[str]) -> None:
        """Brings the evaluators of these runs into memory, from their snapshots or fresh."""
        missing = [run for run in wanted if run not in self._judges]
        if not missing:
            return
        moment = self._monotonic()
        with self._database.read() as connection:
            for start in range(0, len(missing), 500):
                piece = missing[start : start + 500]
                known = {
                    row.id: row.world_size
                    for row in connection.execute(select(runs.c.id, runs.c.world_size).where(runs.c.id.in_(piece)))
                }
                saved = {
                    row.run: row.state
                    for row in connection.execute(select(rule_state).where(rule_state.c.run.in_(piece)))
                    if row.version == STATE_VERSION
                }
                for run, world_size in known.items():
                    judge = self._evaluator(run, saved.get(run))
                    judge.window.world_size = max(judge.window.world_size, world_size or 1)
                    self._judges[run] = judge
                    self._moved[run] = moment
                    if judge.needs_tick():
                        self._ticking.add(run)

    def _evaluator(self, run: str, saved: bytes | None) -> Evaluator:
        """From its snapshot, or afresh where there is none, or none that can be read."""
        if saved is not None:
            try:
                return self._restored(run, saved)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is one run's
                self._pass_over(run, "the snapshot", error)
        return Evaluator(run, rules=self._rules, on_failure=partial(self._rule_failed, run))

    def _judge_of(self, run: str) -> Evaluator | None:
        self._load([run])
        return self._judges.get(run)

    # --- for routes ---------------------------------------------------------------------------------------------------

    def verdict(self, run: str) -> Finding:
        """Healthy, or the one thing that holds the run back."""
        with self._lock:
            judge = self._judge_of(run)
            if judge is None:
                return healthy("Nothing is known of this run yet.")
            with self._database.read() as connection:
                state = connection.execute(select(runs.c.state).where(runs.c.id == run)).scalar()
            return diagnosis.verdict(judge, lost=state == "lost")

    def findings(self, run: str) -> list[Finding]:
        """Everything that the rules find now, worst first; for a run that ended also what held most of the time."""
        with self._lock:
            judge = self._judge_of(run)
            return diagnosis.findings(judge) if judge is not None else []

    def resolve(self, run: str, alert: str, why: str) -> bool:
        """Closes an alert by hand. False when its run has no such alert open."""
        with self._lock:
            judge = self._judge_of(run)
            if judge is None:
                return False
            changes = judge.resolve(alert, self._clock(), why)
            if changes:
                self._commit([(run, change) for change in changes])
            return bool(changes)

    def drop(self, run: str) -> None:
        """Forgets a run that was deleted."""
        with self._lock:
            self._judges.pop(run, None)
            self._moved.pop(run, None)
            self._dirty.discard(run)
            self._ticking.discard(run)
            self._careful.discard(run)


def _of_the_rows(error: Exception) -> bool:
    """Whether a write failed for what was to be written, and will fail again; and not for the database of this
    moment."""
    if isinstance(error, DBAPIError):
        return isinstance(error, (DataError, IntegrityError))
    return not isinstance(error, (StorageError, sqlite3.Error, OSError, MemoryError))


def _save(connection: Connection, snapshots: dict[str, bytes]) -> None:
    """Writes snapshots of the runs that still exist."""
    there: set[str] = set()
    names = list(snapshots)
    for start in range(0, len(names), 500):
        there.update(connection.execute(select(runs.c.id).where(runs.c.id.in_(names[start : start + 500]))).scalars())
    for run in names:
        if run in there:
            _put(connection, rule_state, {"run": run, "version": STATE_VERSION, "state": snapshots[run]}, ("run",))


def _put(connection: Connection, table: object, values: dict[str, object], key: tuple[str, ...]) -> None:
    """INSERT ... ON CONFLICT UPDATE, in both dialects."""
    make = postgresql_insert if connection.dialect.name == "postgresql" else sqlite_insert
    statement = make(table).values(**values)  # type: ignore[arg-type]
    rest = {name: statement.excluded[name] for name in values if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=rest))
