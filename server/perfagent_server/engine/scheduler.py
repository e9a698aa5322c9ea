"""The rules thread: it judges what was committed and writes what follows from it.

It reads the tail from its cursor, has each run's evaluator judge its frames in order, and writes everything that one
round caused in ONE transaction: alert rows, their deliveries, the snapshot of each run concerned. Killed before that
commit, it judges the same frames again from the same snapshots and comes to the same alerts with the same ids; killed
after it, the snapshots say (`upto`) which frames are behind them. Nothing is sent twice, nothing is forgotten.

Between two rounds, also while it is behind, the thread does what is due by time: runs in which time alone changes
something (a heap of due times), sources that fell silent, and a piece of a checkpoint. The tail keeps what lies beyond
the cursor, so that a kill costs the judging of some seconds again, and no alert.

Several servers on one database divide the runs by shards (store/shards.py). Each judges those of the shards that it
holds. It writes nothing for a run whose shard went to another server meanwhile: then it forgets what it has in memory,
and the other server comes to the same alerts from the same snapshots.

No run, frame or rule stops the others. A rule that raises is left out at that step. A frame that cannot be judged, and
an alert that no table takes, is passed over, counted and logged once. A run that cannot be loaded, or fails frame after
frame, is set aside and tried again later (set_aside.py).

Nor does a slow run delay them. If its frames take more than its share of a round, it is late: its frames are judged
behind those of all others, some in each round, until it has caught up.

No jump of the wall clock reaches the rules: they are judged by a clock that moves like the monotonic one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Protocol

from sqlalchemy import Connection, select

from perfagent.wire import Alert, Finding, outcome_of
from perfagent_server.alerts.state_machine import Change
from perfagent_server.database import Database, StorageError
from perfagent_server.database.errors import spell
from perfagent_server.engine import set_aside
from perfagent_server.engine.alert_writer import AlertWriter, Changes
from perfagent_server.engine.canary import Canary
from perfagent_server.engine.checkpoints import Checkpoints, load_cursors, save_snapshots
from perfagent_server.engine.due_times import DueTimes
from perfagent_server.engine.evaluator import Evaluator, HalfJudgedError
from perfagent_server.engine.evaluators import Evaluators, PlanOf
from perfagent_server.engine.held_shards import HeldShards
from perfagent_server.engine.rules_thread import RulesThread
from perfagent_server.engine.set_aside import CannotJudgeError, Mark, SetAside
from perfagent_server.engine.silence import Silence, Silent
from perfagent_server.engine.snapshot_evaluators import SnapshotEvaluators
from perfagent_server.engine.steady_clock import steady
from perfagent_server.engine.verdicts import Verdicts
from perfagent_server.rules.catalogue import all_rules, rules_for
from perfagent_server.rules.own_alert import OWN
from perfagent_server.rules.plan import Plan
from perfagent_server.runs import outcomes
from perfagent_server.store.changes import deletions_since, newest_deletion
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.shards import AllShards, LeaseLost, Shards, shard_of
from perfagent_server.store.stored import FromTail
from perfagent_server.store.tables import SET_ASIDE, rule_state, source
from perfagent_server.store.write import lifecycle

__all__ = ["CHECKPOINT_S", "MOST_LAG_FRAMES", "Engine", "Listener", "default_plan"]

log = logging.getLogger("perfagent.server")

CHECKPOINT_S = 2.0
MOST_LAG_FRAMES = 100_000
"""So many frames the rules may be behind; then agents are told to send again later."""
_BATCH = 256  # frames judged between two commits
_ROUND_S = 2.0  # or as many as take so long
_ASKED_S = 0.2  # or while somebody waits for a verdict
_AT_ONCE = 8  # whose runs are loaded together; then the round may be over
_SHARE_S = 1.0  # of one run in a round: if its frames take longer, the rest waits for those of all others
_RELOADED = 16  # runs that get other rules between two rounds
_BATCH_BYTES = 8 * 2**20  # as stored
_LAG_EVERY_S = 1.0
_AGAIN_S = 1.0  # when what could not be judged by the clock is tried again
_MOST_SAID = 1000  # kinds of trouble that are remembered as logged


class Listener(Protocol):
    """Who shows alerts live (live.Hub)."""

    def publish_alert(self, alert: Alert) -> None: ...


@cache
def _plan_of_all_rules() -> Plan:
    return Plan(rules_for())


def default_plan(_project: str, _off: Sequence[str], _tags: Sequence[str] = ()) -> Plan:
    """Every rule with its own thresholds."""
    return _plan_of_all_rules()


class Engine(RulesThread):
    """start() and stop() the thread; wake() after each commit; run_once() does one round by hand (tests, backtests).

    plan_of: the rules of a run. link: the address of a run's page, for webhooks. on_deliveries: called after deliveries
    were written (wakes the outbox); on_states: with the runs that were just called lost; on_fire: with the run, the id
    and the finding of each alert that fires, or opens again. shards: those whose runs this server judges. clock: wall
    clock, Unix seconds, for what is written; monotonic: for what is due and how long something lasts, so that a jump of the
    wall clock looks like nothing. aside: the runs that cannot be judged for now."""

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        hub: Listener | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        shards: Shards | None = None,
        plan_of: PlanOf = default_plan,
        link: Callable[[str], str] = "http://127.0.0.1:8420/run/{}".format,
        on_deliveries: Callable[[], None] | None = None,
        on_states: Callable[[list[str]], None] | None = None,
        on_fire: Callable[[str, str, Finding], None] | None = None,
        checkpoint_s: float = CHECKPOINT_S,
    ) -> None:
        self._database, self._store, self._hub = database, store, hub
        self._clock, self._now = clock, steady(clock, monotonic)
        super().__init__(Canary(plan_of, default_plan, self._now, monotonic, self._rehearse), monotonic)
        self.held = HeldShards(AllShards() if shards is None else shards)
        self.on_deliveries, self.on_states, self.on_fire = on_deliveries, on_states, on_fire
        self._lock = threading.RLock()  # evaluators: the thread judges, routes read verdicts
        self.aside = SetAside(clock, monotonic)
        self.evaluators = Evaluators(
            database, store, plan_of, on_failure=self._pass_over, on_set_aside=self._set_aside, on_progress=self._moves
        )
        self.checkpoints = Checkpoints(database, self.held, self.evaluators.snapshots, monotonic, every_s=checkpoint_s)
        self._writer = AlertWriter(
            database, self.held, clock, link, snapshots=self.evaluators.snapshots, forget=self.forget,
            on_failure=self._pass_over, on_written=self._was_written,
        )  # fmt: skip
        self.silence = Silence(database, clock, monotonic, plan_of=plan_of)
        self._due = DueTimes()
        self._next_lag = monotonic()
        self._said: set[tuple[str, str]] = set()  # run and what was passed over in it, logged already
        self._deletion: int | None = None  # the newest by another server that was heeded
        self._to_reload: deque[str | None] = deque()  # runs whose rules have changed; None for all
        self._judged_again: set[str] = set()  # runs of which something was judged after their end
        self._of_others = SnapshotEvaluators(database, self.evaluators, self._now, monotonic)
        self._verdicts = Verdicts(database, self._lock, self._judge_of, self.aside, self._pass_over)
        self.verdict, self.findings = self._verdicts.verdict, self._verdicts.findings
        # passed_over: frames, judgments of a rule, and changes of alerts; dropped_alerts: of users, for which there
        # was no room; set_aside: runs; left_out_frames: of runs that were set aside, when the tail held them no longer;
        # lag_frames, lag_s: how far behind the newest frame the rules are
        self.counters: dict[str, float] = {
            "frames": 0, "rounds": 0, "alerts": 0, "checkpoints": 0, "failures": 0, "runs_in_memory": 0, "passed_over": 0,
            "dropped_alerts": 0, "set_aside": 0, "left_out_frames": 0, "late_runs": 0, "lag_frames": 0, "lag_s": 0.0,
        }  # fmt: skip

    # --- the thread ---------------------------------------------------------------------------------------------------

    def judged(self) -> tuple[int, frozenset[str]]:
        """The tail id up to which frames of these shards were judged. Needs no lock."""
        seen = dict(self.held.seen)
        return min(seen.values(), default=0), frozenset(seen)

    def _rehearse(self, run: str, changes: Sequence[Change]) -> int:
        return self._writer.rehearse(run, changes)

    def trouble(self) -> str:
        return super().trouble() or self._writer.trouble

    @property
    def is_behind(self) -> bool:
        """Whether ingest must wait for the rules."""
        return self.counters["lag_frames"] > MOST_LAG_FRAMES

    def _work(self) -> None:
        """Rounds until everything is judged, and between them what is due by time."""
        while not self._stopping:
            if self._monotonic() >= self.canary.due:
                self.canary.judge()
            judged = self.run_once()
            if self._monotonic() >= self.silence.due:
                self.look_for_silence()
            self._checkpoint_piece()
            self._reload_some()
            self._let_in()
            if judged == 0 and not self._to_reload and not self.settle_outcomes():
                break
        while self.checkpoints.is_under_way and not self._stopping and not self._event.is_set():
            self._checkpoint_piece()

    def _let_in(self) -> None:
        """Gives way to questions that wait for the lock."""
        until = self._monotonic() + _ASKED_S
        while self._verdicts.is_asked and self._monotonic() < until:
            time.sleep(0.001)

    def _is_over(self, began: float) -> bool:
        """Whether a round that began then has had its time."""
        return self._monotonic() - began > (_ASKED_S if self._verdicts.is_asked else _ROUND_S)

    def _note_failure(self, error: Exception) -> None:
        self.counters["failures"] += 1
        if not isinstance(error, LeaseLost):  # of what is lost, the next round forgets the runs
            self.forget()

    def forget(self) -> None:
        """Drops everything that is only in memory: the next round starts from what the tables say."""
        with self._lock:
            for run in list(self.evaluators.in_memory):
                self.evaluators.drop(run)
            self._due.clear()
            self.checkpoints.forget()
            self.held.forget()

    def _follow_shards(self) -> None:
        """Forgets the runs of shards that went to another server, and begins with those that came, from where the tables say
        that they were judged. Never in the middle of a round: of a shard that comes then, frames would be missed."""
        held = self.held.present
        if self.held.terms == held and self.held.seen.keys() == held.keys():
            return
        if lost := self.held.lost():
            self.checkpoints.cancel()
            for run in [run for run in self.evaluators.in_memory if shard_of(run) in lost]:
                self._drop(run)
            self.held.seen = {shard: seen for shard, seen in self.held.seen.items() if shard not in lost}
        self.held.terms = held
        with self._database.read() as connection:
            cursors = load_cursors(connection)
            marks = connection.execute(select(rule_state).where(rule_state.c.version == SET_ASIDE)).all()
        for shard in held.keys() - self.held.seen.keys():
            self.held.seen[shard] = self.checkpoints.saved[shard] = cursors[shard]
        for run in self.aside.names():
            if run not in self.held:
                self.aside.remove(run)
        for row in marks:
            if row.run in self.held and row.run not in self.aside:
                self.aside.remember(row.run, Mark.read(row.state).error)

    # --- one round ----------------------------------------------------------------------------------------------------

    def run_once(self) -> int:
        """Judges what came since the last round; how many frames that were. Everything it causes is committed on
        return."""
        self._moves()
        with self._lock:
            self._follow_shards()
            after = self.held.upto()
            shards = frozenset(self.held.seen)
            if not shards:
                return 0
            batch = self._store.since(after, _BATCH, _BATCH_BYTES, shards=shards)
            self._heed_deletions()
            moment = self._monotonic()
            self._load(self.aside.due())
            batch, changes = self._take_all(batch)
            changes += self._tick_due(self._now())
            if moment >= self._next_lag:
                self._next_lag = moment + _LAG_EVERY_S
                self._note_lag(batch)
            if changes:
                self._writer.commit(changes)
            if batch:
                self.held.seen = {shard: max(seen, batch[-1].id) for shard, seen in self.held.seen.items()}
                self.counters["rounds"] += 1
            return len(batch) + self._judge_late()

    def _take_all(self, batch: list[FromTail]) -> tuple[list[FromTail], list[tuple[str, Change]]]:
        """Judges as much of a batch as a round has time for; that part, and what follows from it."""
        began, spent = self._monotonic(), defaultdict[str, float](float)
        changes: list[tuple[str, Change]] = []
        for start in range(0, len(batch), _AT_ONCE):
            part = self._without_imported(batch[start : start + _AT_ONCE])
            loaded = self._load({stored.run for stored in part if stored.run not in self.aside})
            drained = self._still_lost(part)
            for stored in part:
                changes += self._take_share(stored, spent, drained=stored.source in drained)
            for run in loaded:
                # A step of these frames may be due sooner than what was due when the run was loaded.
                self._schedule(run)
            if self._is_over(began):
                return batch[: start + _AT_ONCE], changes
        return batch, changes

    def _without_imported(self, frames: Sequence[FromTail]) -> list[FromTail]:
        """`perfagent import` has judged its runs. Their evaluators in memory are older than these frames, and are dropped."""
        live = [stored for stored in frames if not stored.is_imported]
        for run in {stored.run for stored in frames} - {stored.run for stored in live}:
            self._drop(run)
            self._judged_again.add(run)
        return live

    def _take_share(self, stored: FromTail, spent: dict[str, float], *, drained: bool) -> list[tuple[str, Change]]:
        """spent: run -> the seconds that its frames took in this round."""
        run = stored.run
        if run in self.held.late:
            self.aside.note_frame(run)
            return []
        began = self._monotonic()
        changes = self._take(stored, began, drained=drained)
        spent[run] += self._monotonic() - began
        if spent[run] > _SHARE_S and run in self.evaluators.in_memory:
            self.held.late[run] = stored.id
        return changes

    def _judge_late(self) -> int:
        """Frames of late runs, of one run after the other; how many."""
        count, began = 0, self._monotonic()
        for run in list(self.held.late):
            while run in self.held.late and not self._is_over(began):
                count += self._catch_up(run, began)
        return count

    def _catch_up(self, run: str, began: float) -> int:
        """Judges frames of a late run, as far as the tail holds them, while the round that began then lasts; how many."""
        judge, upto = self.evaluators.in_memory[run], self.held.upto(run)
        found = self._store.since(judge.upto, _BATCH, _BATCH_BYTES, run=run)
        batch = [one for one in found if one.id <= upto and not one.is_imported]
        if not batch:
            self._is_up_to_date(run)
            return 0
        drained, changes, count = self._still_lost(batch), list[tuple[str, Change]](), 0
        for stored in batch:
            count += 1
            changes += self._take_by(judge, stored, self._monotonic(), drained=stored.source in drained)
            self.aside.note_judged(run)
            if run not in self.held.late or self._is_over(began):
                break  # it was set aside, or it is the turn of others
        if changes:
            self._writer.commit(changes)
        if self.held.late.pop(run, None) is not None:
            self.held.late[run] = judge.upto  # behind the other late ones
        return count

    def _heed_deletions(self) -> None:
        """Another server may have deleted a run. Asked behind the frames: those of a new run of the same id come after it."""
        if not self._database.is_shared:
            return
        with self._database.read() as connection:
            if self._deletion is None:
                self._deletion = newest_deletion(connection)
            deleted = deletions_since(connection, self._deletion)
        for change, run in deleted:
            self._deletion = change
            self.drop(run)

    def _take(self, stored: FromTail, moment: float, *, drained: bool) -> list[tuple[str, Change]]:
        judge = self.evaluators.in_memory.get(stored.run)
        if stored.id <= self.held.upto(stored.run):
            return []  # another shard is behind
        if judge is None or stored.id <= judge.upto:  # the run is deleted or set aside, or the snapshot knows the frame
            self.aside.note_frame(stored.run)
            return []
        return self._take_by(judge, stored, moment, drained=drained)

    def _take_by(self, judge: Evaluator, stored: FromTail, moment: float, *, drained: bool) -> list[tuple[str, Change]]:
        self._moves()
        now = self._now()
        self.counters["frames"] += 1
        changes = self._judged(stored.run, "a frame", lambda: judge.take(stored, drained=drained, now=now))
        judge.upto = max(judge.upto, stored.id)  # also of one that was passed over
        self.counters["dropped_alerts"] += judge.dropped
        judge.dropped = 0
        if judge.window.ended:
            self._judged_again.add(stored.run)
        if stored.run not in self.evaluators.in_memory:  # set aside with this frame
            return changes
        self.evaluators.in_memory.move_to_end(stored.run)
        self.evaluators.moved[stored.run] = moment
        self.checkpoints.dirty.add(stored.run)
        if not drained:
            self.silence.note(stored, moment, by_itself=not stored.source.startswith(lifecycle.JSON_SOURCE))
        if stored.run not in self._due:  # else a frame moves nothing before the time that is set already
            self._schedule(stored.run)
        return changes

    def _still_lost(self, batch: Sequence[FromTail]) -> set[str]:
        """The sources of these frames that were called lost and are: what is found in the spool of a dead process is no
        sign of life. Which frames are one, lifecycle has said when it stored them."""
        judges = self.evaluators.in_memory
        asked = {one.source for one in batch if one.run in judges and one.rank in judges[one.run].window.lost}
        if not asked:
            return set()
        with self._database.read() as connection:
            still = select(source.c.id).where(source.c.id.in_(asked), source.c.state == "lost")
            return set(connection.execute(still).scalars())

    def _note_lag(self, batch: Sequence[FromTail]) -> None:
        behind = max(0, self._store.newest_id() - batch[-1].id) if batch else 0
        self.counters["lag_frames"], self.counters["late_runs"] = behind, len(self.held.late)
        self.counters["lag_s"] = round(max(0.0, self._clock() - batch[-1].received), 3) if behind else 0.0

    def settle_outcomes(self) -> int:
        """Writes what some runs that ended are called by their verdicts, if all that they sent was judged: how many runs
        that were."""
        with self._lock:
            again = list(self._judged_again)[: outcomes.AT_ONCE]
            with self._database.read() as connection:
                found = outcomes.unsettled(connection, again)
            if found and self.run_once():
                return len(found)
            words = self._outcomes(found)
            changed = self._database.write(partial(outcomes.settle, found=words), essential=True) if words else []
            left = {run for run in found if run in self.held and run not in words}
            self._judged_again.difference_update(set(again) - left)
        if changed and self.on_states is not None:
            self.on_states(changed)
        return len(words)

    def _outcomes(self, states: Mapping[str, str]) -> dict[str, str]:
        """Of these runs, as far as a round has time and all that they sent was judged."""
        words, until = dict[str, str](), self._monotonic() + _ROUND_S
        for run, state in states.items():
            if self._monotonic() > until:
                break
            word = self._outcome(run, state) if run in self.held else ""
            if word and run not in self.held.late:
                words[run] = word
        return words

    def _outcome(self, run: str, state: str) -> str:
        was_in_memory = run in self.evaluators.in_memory
        self._moves()
        try:
            found = self.verdict(run)
            return "unknown" if found.rule == set_aside.RULES_STOPPED else outcome_of(found, state)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - one run's verdict must not hold up those of others
            self._pass_over(run, "the verdict", error)
            return "unknown"
        finally:
            if not was_in_memory and run not in self.held.late:
                self._drop(run)  # runs that go on keep their places there

    # --- what time alone changes --------------------------------------------------------------------------------------

    def _schedule(self, run: str) -> None:
        judge = self.evaluators.in_memory.get(run)
        if judge is not None:
            self._due.set(run, judge.due())

    def _tick_due(self, now: float) -> list[tuple[str, Change]]:
        changes: list[tuple[str, Change]] = []
        for run in self._due.pop(now):
            judge = self.evaluators.in_memory.get(run)
            if judge is None or run in self.held.late:  # what it has sent meanwhile waits to be judged
                continue
            self._moves()
            found = self._judged(run, "a tick", partial(judge.tick, now))
            changes += found
            if run in self.evaluators.in_memory:
                self.checkpoints.dirty.update([run] if found else ())
                self._schedule(run)
                self._due.put_off(run, now, now + _AGAIN_S)
        return changes

    def look_for_silence(self) -> None:
        """One look at the sources (the thread does it every two seconds)."""
        found = self.silence.look(frozenset(self.held.present))
        if not found:
            return
        newest = self._store.newest_id()  # what is committed but not yet judged may be the sign of life
        while self.held.upto() < newest and self.run_once() and not self._stopping:
            self._checkpoint_piece()
        with self._lock:
            self._call_lost([one for one in found if self.silence.quiet_s(one.source) >= one.quiet_s])

    def _call_lost(self, found: Sequence[Silent]) -> None:
        self._load({one.run for one in found if one.heartbeat})
        found = [one for one in found if one.run not in self.held.late]  # a sign of life may wait to be judged
        silent: dict[str, dict[tuple[int, int], float]] = {}
        for one in found:
            if one.heartbeat:
                silent.setdefault(one.run, {})[one.attempt, one.rank] = one.quiet_s
        now = self._now()
        changes: list[tuple[str, Change]] = []
        for run, ranks in silent.items():
            judge = self.evaluators.in_memory.get(run)
            if judge is not None:
                changes += self._judged(run, "the silence", partial(judge.silence, ranks, now))
                if run in self.evaluators.in_memory:
                    self.checkpoints.dirty.add(run)
        lost: list[str] = []

        def mark(connection: Connection) -> None:
            lost[:] = lifecycle.mark_lost(connection, [one.source for one in found])

        self._writer.commit(changes, self.held.verified((one.run for one in found), mark))
        if lost and self.on_states is not None:
            self.on_states(lost)

    # --- what cannot be judged or written -----------------------------------------------------------------------------

    def _judged(self, run: str, what: str, judging: Callable[[], list[Change]]) -> list[tuple[str, Change]]:
        """What a run's evaluator makes of something. What it cannot judge is passed over; a run that fails again and again
        is set aside."""
        judge = self.evaluators.in_memory[run]
        self._moves()
        found: list[Change] = []
        error: BaseException | None = None
        try:
            found = judging()
        except HalfJudgedError as half:
            found, error = half.changes, half.__cause__
        except Exception as raised:  # noqa: BLE001 - one frame must not stop the others
            error = raised
        if isinstance(error, Exception):
            self._pass_over(run, what, error)
            judge.failing[what] += 1
            if judge.failing[what] >= set_aside.MOST_FAILING:
                self._set_aside(run, judge.upto, error)
        else:
            del judge.failing[what]
        return [(run, change) for change in found]

    def _set_aside(self, run: str, upto: int | None, error: Exception) -> None:
        """upto: the tail id up to which it was judged; None: its row of state says it."""
        was_judged = run in self.evaluators.in_memory
        self._drop(run)
        self.checkpoints.leave_out(run)
        is_new = self.aside.add(run, spell(error))
        if is_new:
            log.error("run %s cannot be judged, and is set aside: it is tried again later", run, exc_info=error)
        self.counters["set_aside"] = len(self.aside)
        if upto is None or not (is_new or was_judged):  # else its Mark says more
            return
        mark = {run: Mark(upto, spell(error)).row()}
        save = partial(save_snapshots, snapshots=mark, version=SET_ASIDE)
        try:
            self._database.write(self.held.verified([run], save), essential=True)
        except StorageError:
            raise
        except Exception as unwritten:  # noqa: BLE001 - its row is broken
            self._pass_over(run, "the mark", unwritten)

    def _pass_over(self, run: str, what: str, error: Exception) -> None:
        self.counters["passed_over"] += 1
        if (run, what) not in self._said:
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said.add((run, what))
            log.error("%s of run %s is passed over, and so is what fails in this way later", what, run, exc_info=error)

    def _was_written(self, changes: Changes, saved: Iterable[str], alerts: Sequence[Alert], deliveries: int) -> None:
        self.checkpoints.dirty.difference_update(saved)
        self.counters["alerts"] += sum(1 for _, change in changes if change.kind == "fire")
        if deliveries and self.on_deliveries is not None:
            self.on_deliveries()
        if self.on_fire is not None:
            for run, change in changes:
                if change.kind in ("fire", "reopen"):
                    self.on_fire(run, change.alert, change.finding)
        if self._hub is not None:
            for alert in alerts:
                self._hub.publish_alert(alert)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """A whole checkpoint, now."""
        with self._lock:
            self._finish_checkpoint()
            self.checkpoints.due = self._monotonic()
            self._checkpoint_piece()
            self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        while self.checkpoints.is_under_way:
            self._checkpoint_piece()

    def _checkpoint_piece(self) -> None:
        self._moves()
        with self._lock:
            if self.checkpoints.piece():
                self.counters["checkpoints"] = self.checkpoints.count
                for run in self.evaluators.evict(self._monotonic(), self.checkpoints.dirty | self.held.late.keys()):
                    self._due.drop(run)
                self.counters["runs_in_memory"] = len(self.evaluators.in_memory)

    def _load(self, wanted: Iterable[str]) -> list[str]:
        """Those that were not in memory before. One that is behind its shard, as after it was set aside, is late."""
        held = [run for run in wanted if run in self.held]
        loaded = self.evaluators.load(held, self._monotonic(), self._now(), self.held.upto)
        for run, waiting in loaded.items():
            if lost := self.aside.note_waiting(run, waiting):
                self.counters["left_out_frames"] += lost
                log.warning("of the frames of run %s that came while it was set aside, the tail has lost %d", run, lost)
            if waiting:
                self.held.late[run] = self.evaluators.in_memory[run].upto
            else:
                self._is_up_to_date(run)
        return list(loaded)

    def _is_up_to_date(self, run: str) -> None:
        self.held.late.pop(run, None)
        if self.aside.remove(run):
            log.warning("run %s is judged again", run)
        self.counters["set_aside"] = len(self.aside)
        self._schedule(run)

    # --- for routes ---------------------------------------------------------------------------------------------------

    def resolve(self, run: str, alert: str, why: str) -> bool:
        """Closes an alert by hand. False when its run has no such alert open."""
        try:
            with self._verdicts.asking(run):
                judge = self._judge_of(run) if self.judges(run) else None
                if judge is None:
                    return False
                changes = judge.resolve(alert, self._now(), why)
                self._judged_again.add(run)
                if changes:
                    self._writer.commit([(run, change) for change in changes])
                return bool(changes)
        except CannotJudgeError:
            return False

    def reload(self, run: str | None = None) -> None:
        """The rules of a run, or of all, have changed: it is written down, and loaded anew with its rules when it
        moves. What a rule that is switched off had found is resolved."""
        with self._lock:
            self.aside.hurry(run)
            names = [run] if run is not None else list(self.evaluators.in_memory)
        for name in names:
            with self._lock:  # of each run alone: others wait for it
                self._of_others.forget(name)
                self._follow_shards()
                if name not in self.held:
                    continue
                self._load([name])
                if name in self.aside:
                    continue
                save = partial(save_snapshots, snapshots=self.evaluators.snapshots([name]))
                self._database.write(self.held.verified([name], save), essential=True)
                self._drop(name)
                changes = self._without_rules(name)
                if changes:
                    self._writer.commit(changes)
                self._judged_again.add(name)
        self.wake()

    def reload_soon(self, run: str | None = None) -> None:
        """The same on the thread, between its rounds."""
        self._to_reload.append(run)
        self.wake()

    def _reload_some(self) -> None:
        for _ in range(min(len(self._to_reload), _RELOADED)):
            run = self._to_reload.popleft()
            if run is None:
                self._to_reload.extend(self.evaluators.in_memory)
                return
            try:
                self.reload(run)
            except StorageError:
                self._to_reload.append(run)
                raise

    def _without_rules(self, run: str) -> list[tuple[str, Change]]:
        """Resolves the alerts of rules that no longer judge this run, and of users' own alerts that ask for something else."""
        self._load([run])
        judge = self.evaluators.in_memory.get(run)
        if judge is None:
            return []
        now, ours = self._now(), {rule.id for rule in all_rules()}
        off = [
            machine
            for key, machine in judge.machines.items()
            if (key not in judge.plan.rules and (key in ours or key.startswith(OWN)))
            or (
                key in judge.plan.own and machine.finding is not None and not judge.plan.own[key].is_of(machine.finding)
            )
        ]
        return [(run, change) for one in off for change in judge.resolve(one.alert, now, "the rule was switched off")]

    def drop(self, run: str) -> None:
        """Forgets a run that was deleted."""
        with self._lock:
            self._drop(run)
            self.aside.remove(run)
            self._of_others.forget(run)

    def _drop(self, run: str) -> None:
        self.evaluators.drop(run)
        self.held.late.pop(run, None)
        self.checkpoints.dirty.discard(run)
        self._due.drop(run)

    def judges(self, run: str) -> bool:
        """Whether this server judges a run; if not, another one does."""
        return shard_of(run) in self.held.present

    def _judge_of(self, run: str) -> Evaluator | None:
        """The evaluator of a run; of one that another server judges, as its newest snapshot has it. Raises CannotJudgeError
        for one that is set aside."""
        self._follow_shards()
        if run not in self.held:
            return self._of_others.of(run)
        if run not in self.aside:
            self._load([run])
        if run in self.aside:
            raise CannotJudgeError
        return self.evaluators.in_memory.get(run)
