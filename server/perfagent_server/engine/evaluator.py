"""The judge of one run: frames in, changes of alerts out. Pure, so that the engine, a backtest and the tests share it.

It holds the run's window and one alert machine a rule, and can be put into bytes and back at any point between two
frames: judging the rest from the restored one gives the same changes, with the same alert ids.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from perfagent.wire import LOSS, Event, Finding
from perfagent.wire.limits import whole
from perfagent_server.alerts import causes
from perfagent_server.alerts.grouping import group
from perfagent_server.alerts.state_machine import RUN_ENDED, Change, Machine
from perfagent_server.engine import reports
from perfagent_server.engine.reports import REPORTED_LIFE, USER_LIFE
from perfagent_server.rules.causes import reason_stored
from perfagent_server.rules.loss.loss_spike import LossSpike
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.rules.own_alert import OwnAlert, Point
from perfagent_server.rules.plan import STEPPED, Plan
from perfagent_server.rules.rule import USER_ALERT, Life, Question, Rule, Unknown
from perfagent_server.rules.step_series import PATIENCE_S
from perfagent_server.rules.texts import Language
from perfagent_server.rules.window import End, Window, is_end
from perfagent_server.store.stored import FromTail
from perfagent_server.timestamps import rfc3339
from perfagent_server.verdict.verdict import Happened, verdict, worst_first

__all__ = ["STATE_VERSION", "Evaluator", "HalfJudgedError"]

STATE_VERSION = 6
_MOST_OTHERS = 256
"""Alerts that no rule of ours raises: a script that gives each of them another title must not fill the memory."""
_SAID_S = 3600.0
"""After that a user's alert may make room for another: it is a point in time, and nothing that goes on."""
_WORDS_OF_END = ("exception", "traceback", "unused")
_MOST_ENDS = 64

_encoder = msgspec.msgpack.Encoder()


class HalfJudgedError(Exception):
    """The samples of a frame could not be judged. changes: what follows from its events, and from the samples until
    then. The error itself is the cause of this one."""

    def __init__(self, changes: list[Change]) -> None:
        super().__init__("the samples of a frame could not be judged")
        self.changes = changes


class Evaluator:
    """upto: the tail id of the newest frame that was judged; dropped: alerts for which there was no room; failing: how
    many frames (or ticks) in a row could not be judged, by which of the two.

    on_failure: called with a judgment or an event that failed, and its error; judging goes on without it. None, as in
    tests and backtests: it is raised.

    Times are seconds of the caller's clock, which must not jump. The window's clock is never behind what the window has
    seen already: a snapshot of a server whose clock was wrong may be hours ahead, and goes on from there (`_ahead_s`).
    """

    def __init__(self, run: str, plan: Plan, *, on_failure: Callable[[str, Exception], None] | None = None) -> None:
        self.plan = plan
        self.window = Window(run, plan)
        self.machines: dict[str, Machine] = {}
        self.upto = 0
        self.dropped = 0
        self.failing: Counter[str] = Counter()
        self.on_failure = on_failure
        self._ahead_s = 0.0
        self._clock_due: dict[str, float] = {}  # rule -> when it is judged by the clock next, server clock
        self._older: Evaluator | None = None  # of the attempt before, for its ends that come late

    # --- judging ------------------------------------------------------------------------------------------------------

    def take(self, stored: FromTail, *, drained: bool = False, now: float = math.inf) -> list[Change]:
        """Judges one frame. drained: it lay in a spool, and its sender is still lost. now: it cannot have come later,
        whatever the clock of that moment said. Raises HalfJudgedError where its samples cannot be judged."""
        window = self.window
        self.upto = max(self.upto, stored.id)
        self._go_on(min(stored.received, now))
        if stored.attempt < window.attempt:
            return self._take_of_an_older_attempt(stored)
        changes: list[Change] = []
        if stored.attempt > window.attempt:
            changes += self._restart(stored.attempt)
            window = self.window
        self._hear(stored.rank)
        ends: list[Event] = []
        for event in stored.events:
            changes += self._guarded(event, partial(self._take_event, stored, event, ends))
        if stored.rank in window.lost and not drained:
            del window.lost[stored.rank]
            changes += self._judge_event("contact")
        failure: Exception | None = None
        try:
            touched = window.take(stored.rank, stored.groups)
            changes += self._judge_urgent()
            changes += self._judge_ready(window.close(touched))
            changes += self._judge_own()
        except Exception as error:
            if self.on_failure is None:
                raise
            failure = error
        for event in ends:
            changes += self._guarded(event, partial(self._end, stored, event))
        if failure is not None:
            raise HalfJudgedError(changes) from failure
        return changes

    def _guarded(self, event: Event, judging: Callable[[], list[Change]]) -> list[Change]:
        """What follows from an event. One that cannot be read costs neither the other events nor the samples of its
        frame."""
        try:
            return judging()
        except Exception as error:
            if self.on_failure is None:
                raise
            self.on_failure(f"an event `{event.kind[:40]}`", error)
            return []

    def _take_event(self, stored: FromTail, event: Event, ends: list[Event]) -> list[Change]:
        window = self.window
        if event.kind == "state":
            if is_end(event):
                ends.append(event)
            else:
                self._begin(event, stored.rank)
            return []
        if event.kind == "finding":
            return self._explained(stored, event) if "explains" in event.data else self._reported(stored, event)
        if event.kind == "alert":
            return self._by_user(stored, event)
        if event.kind in self.plan.on_event:
            window.note_event(stored.rank, event)
            window.step = max(window.step, (whole(event.step) or 0) - 1)  # it carries the step in progress
            return self._judge_event(event.kind)
        return []

    def _take_of_an_older_attempt(self, stored: FromTail) -> list[Change]:
        """A late frame of an older start: what it says is no longer so, but how that start ended is worth an alert.

        torchrun starts the job again before the last frame of a rank that ran out of memory has come.
        """
        if self._older is None:
            self._older = Evaluator(self.window.run, self.plan, on_failure=self.on_failure)
            self._older.window.attempt = stored.attempt
        older = self._older
        if stored.attempt != older.window.attempt:
            return []
        older.upto, older.window.now = self.upto, self.window.now
        older._hear(stored.rank)
        changes = [
            change
            for event in stored.events
            if is_end(event)
            for change in self._guarded(event, partial(older._end, stored, event))
        ]
        return changes + older._close_all("the run was started again")

    # --- by the clock -------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When time alone changes something: a step that waits for a slow rank, a rule that is judged by
        the clock. None: never."""
        window = self.window
        times = list(self._clock_due.values()) if self._is_clocked() else []
        waits = window.waits_until()
        if waits is not None:
            times.append(waits)
        for noted in window.nonfinite.values():
            times += [entry.time + 2 * PATIENCE_S for step in noted.fresh if (entry := noted.at(step)) is not None]
        return min(times) - self._ahead_s if times else None

    def tick(self, now: float) -> list[Change]:
        """Time passed and nothing came: steps that waited for a slow rank are judged without it, and rules that are
        judged by the clock."""
        window = self.window
        self._go_on(now)
        changes = self._judge_urgent()
        changes += self._judge_ready(window.close(list(window.by_step)))
        changes += self._judge_own()
        if self._is_clocked():
            for seconds, rule in self.plan.clocked:
                if self._clock_due.get(rule.id, window.now) <= window.now:
                    self._clock_due[rule.id] = window.now + seconds
                    window.at = window.step
                    changes += self._judge(rule)
        return changes

    def start_clock(self, now: float) -> None:
        """From now on the rules that are judged by the clock are due."""
        for seconds, rule in self.plan.clocked:
            self._clock_due.setdefault(rule.id, now + self._ahead_s + seconds)

    def set_clock(self, now: float) -> None:
        """What it reads on the caller's clock: that of the window is never behind what it has seen already."""
        self._ahead_s = max(0.0, self.window.now - now)

    def _go_on(self, now: float) -> None:
        """Moves the clock of the window on."""
        self.window.now = max(self.window.now, now + self._ahead_s)

    def _is_clocked(self) -> bool:
        """Whether the run goes on and is heard: no rule judges the silence of a run by the clock."""
        window = self.window
        return bool(self.plan.clocked) and not window.ended and not (window.lost and window.heard <= window.lost.keys())

    def silence(self, lost: dict[tuple[int, int], float], now: float) -> list[Change]:
        """(attempt, rank) that fell silent, and for how many seconds they were."""
        window = self.window
        self._go_on(now)
        if window.ended:
            return []
        window.lost.update({rank: quiet for (attempt, rank), quiet in lost.items() if attempt == window.attempt})
        return self._judge_event("contact")

    def firing(self) -> set[str]:
        """The alerts that are open."""
        return {one.alert for one in self.machines.values() if one.state == "firing" and not one.absorbed}

    def resolve(self, alert: str, now: float, why: str) -> list[Change]:
        """Closes one alert by hand; it opens again only after its cool-down, or at the next finding of another kind."""
        return self._close([one for one in self.machines.values() if one.alert == alert], now + self._ahead_s, why)

    # --- the life of the run ------------------------------------------------------------------------------------------

    def _restart(self, attempt: int) -> list[Change]:
        """A new attempt of the run began: what the older one left is no history for this one."""
        window = self.window
        changes = self._close_all("the run was started again")
        self.window = Window(
            window.run, self.plan, attempt=attempt, world_size=window.world_size, now=window.now, started=window.now
        )
        self.window.go_on_from(window)
        if window.attempt >= 0:
            window.forget_series()
            self._older = Evaluator(window.run, self.plan, on_failure=self.on_failure)
            self._older.window, self._older.machines = window, self.machines
            self.machines = {}
        self._clock_due = {rule.id: window.now + seconds for seconds, rule in self.plan.clocked}
        return changes

    def _close_all(self, why: str) -> list[Change]:
        return self._close(self.machines.values(), self.window.now, why)

    def _close(self, machines: Iterable[Machine], now: float, why: str) -> list[Change]:
        closed = (machine.close(self.window.step, now, why) for machine in machines)
        changes = [change for change in closed if change is not None]
        self.note_firing()
        return changes

    def _hear(self, rank: int) -> None:
        window = self.window
        if rank not in window.heard:
            window.heard.add(rank)
            if window.state == "finished":
                window.state = "running"  # as lifecycle has it: those who had reported so far were not all

    def _begin(self, event: Event, rank: int) -> None:
        window = self.window
        world_size, start_step = event.data.get("world_size"), whole(event.data.get("start_step"))
        if isinstance(world_size, int) and 0 < world_size <= 1_000_000:
            window.world_size = max(world_size, 1)
        # A script that trains another model in the same run: what rules know of the one before is no measure for it.
        begins = whole(event.data.get("training_after"))
        window.start_step = max(window.start_step, start_step or 0, begins or 0)
        stage = whole(event.data.get("pipeline_stage", event.data.get("stage")))
        if stage is not None:
            window.stages[rank] = stage

    def _end(self, stored: FromTail, event: Event) -> list[Change]:
        window = self.window
        state = str(event.data.get("state"))
        earlier = [end for end in window.ends if end.rank == stored.rank]
        # The trainer's own word comes first and says most; a watcher's only counts where it says more.
        if any(end.state == state or (end.state != "finished" and state != "oom") for end in earlier):
            return []
        words = {key: str(event.data.get(key) or "")[:8000] for key in _WORDS_OF_END}
        words["reason"] = reason_stored(event.data.get("reason"))[:8000]
        step, kills = whole(event.step), whole(event.data.get("oom_kills"))
        # A watcher knows no step. What other ranks send of later steps must not move this end.
        time = reports.time_of(event, window.now)
        self._note_end(End(state, stored.rank, time, window.step if step is None else step, oom_kills=kills, **words))
        window.lost.pop(stored.rank, None)
        changes = self._judge_urgent(final=True)
        changes += self._judge_ready(window.close(list(window.by_step)))
        changes += self._judge_own()
        if state == "finished":
            if not window.heard <= window.done:
                return changes
            changes += self._judge_ready(window.close(list(window.by_step), final=True))
            changes += self._judge_own(final=True)
        if not window.ended or window.state == "finished":
            window.state = state
        changes += self._judge_event("state")
        window.lost = {}
        over = {key: one for key, one in self.machines.items() if not self._life(key).outlives_run}
        for key, machine in over.items():
            machine.open_at_end = machine.open_at_end or machine.present(self._life(key)) is not None
        return changes + self._close(over.values(), window.now, f"{RUN_ENDED} ({state})")

    def _note_end(self, end: End) -> None:
        """Of thousands of ranks that end those that finished say nothing of interest: they make room."""
        window = self.window
        window.done.add(end.rank)
        if len(window.ends) >= _MOST_ENDS:
            place = next((at for at, known in enumerate(window.ends) if known.state == "finished"), None)
            if end.state == "finished" or place is None:
                return
            del window.ends[place]
        window.ends.append(end)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _judge_urgent(self, *, final: bool = False) -> list[Change]:
        """Judges steps with non-finite values the moment they are known."""
        changes: list[Change] = []
        for kind, noted in self.window.nonfinite.items():
            if not noted.fresh:
                continue
            fresh, noted.fresh = noted.fresh, []
            rule = self.plan.urgent.get(kind)
            if rule is None:
                continue
            for step in sorted(set(fresh), key=lambda step, kind=kind: (not self._is_measured(kind, step), step)):  # type: ignore[misc]
                if not final and self._scaler_may_say_more(kind, step):
                    noted.fresh.append(step)
                    continue
                self.window.at = step
                changes += self._judge(rule)
        return changes

    def _is_measured(self, kind: str, step: int) -> bool:
        """Whether it is `loss` itself, or a gradient: judged before what the script logged of the same step, or one
        beside it."""
        bad = self.window.nonfinite_at(kind, step)
        return kind == "gradient" or (bad is not None and bad.leading == LOSS)

    def _scaler_may_say_more(self, kind: str, step: int) -> bool:
        """Whether a GradScaler is at work whose word on this step (skipped or not) may come with the next one. Its word
        on `loss` comes with it."""
        window = self.window
        bad = window.nonfinite_at(kind, step)
        if bad is None or window.now - bad.time > 2 * PATIENCE_S or (kind == "loss" and bad.leading == LOSS):
            return False
        words = [
            series
            for name in ("amp/skipped", "amp/scale")
            if (series := window.by_step.get(name)) is not None and series.steps
        ]
        return bool(words) and all(series.steps[-1] <= step for series in words)

    def _judge_ready(self, names: Iterable[str]) -> list[Change]:
        window, plan = self.window, self.plan
        changes: list[Change] = []
        for name in names:
            if name not in window.by_step:  # readings over time, and families
                window.at = window.step
                for rule in (*plan.on_time.get(name, ()), *plan.on_step.get(name, ())):
                    changes += self._judge(rule)
                continue
            rules = plan.rules_on(name, window.loss_name)
            if name not in STEPPED and not any(self._wants(rule) for rule in rules):
                window.by_step[name].show_all()
                continue
            while window.advance(name):
                for rule in rules:
                    changes += self._judge_step(rule, name)
        return changes

    def _judge_step(self, rule: Rule, name: str) -> list[Change]:
        if not rule.urgent:
            return self._judge(rule)
        # Steps with a bad value were judged when they came; here it counts that this one has none.
        window = self.window
        is_finite = window.nonfinite_at(rule.urgent, window.at) is None
        return self._observe(rule, None) if self._wants(rule) and is_finite and self._heals(rule, name) else []

    def _heals(self, rule: Rule, name: str) -> bool:
        """Whether a finite value of this series says that the alert's trouble is over: of losses only the one it is
        about."""
        machine = self.machines.get(rule.id)
        if rule.urgent != "loss" or machine is None or machine.finding is None:
            return True
        return bool(machine.finding.evidence.get("series", LOSS) == name)

    def _wants(self, rule: Rule) -> bool:
        """Whether a rule has something to say about single steps: one that judges urgently has, only while an alert is
        open."""
        if not rule.urgent:
            return True
        machine = self.machines.get(rule.id)
        return machine is not None and machine.state != "inactive"

    def _judge_own(self, *, final: bool = False) -> list[Change]:
        """Judges users' own alerts on what has come of their series."""
        window = self.window
        now = math.inf if final else window.now
        changes: list[Change] = []
        for alert, point in window.own.ready(now, window.world_size, window.step):
            window.at = point.step
            changes += self._judge(alert, point)
        return changes

    def _judge_event(self, kind: str) -> list[Change]:
        self.window.at = self.window.step
        return [change for rule in self.plan.on_event.get(kind, ()) for change in self._judge(rule)]

    def _judge(self, rule: Rule, point: Point | None = None) -> list[Change]:
        """Runs a rule at the step window.at. If it raises, it has not judged this step: its findings at other steps
        stay, and the other rules go on. point: for a user's own alert, of a series that it watches."""
        try:
            if point is not None and isinstance(rule, OwnAlert):
                rule.take(self.window, point)
            found = rule.judge(self.window)
        except Exception as error:
            if self.on_failure is None:
                raise
            self.on_failure(f"a judgment by {rule.id}", error)
            return []
        return [] if isinstance(found, Unknown) else self._observe(rule, found)

    # --- alerts -------------------------------------------------------------------------------------------------------

    def _observe(self, rule: Rule, found: Finding | None) -> list[Change]:
        if found is not None and self.window.ended and not rule.life.outlives_run:
            return []  # nobody would resolve it any more
        if found is not None and self._follows_from_nan(rule):
            return []
        return self._carry(rule.id, self.plan.lives[rule.id], found, self.window.at)

    def _follows_from_nan(self, rule: Rule) -> bool:
        """Whether it is no news: weights that are NaN also make dead units, or an environment that always looks the same."""
        is_new = rule.id not in self.window.firing and not rule.joins
        return is_new and rule.question is Question.DOES_IT_LEARN and NonfiniteLoss.id in self.window.firing

    def _carry(self, key: str, life: Life, found: Finding | None, step: int) -> list[Change]:
        window = self.window
        machine = self.machines.get(key)
        changes: list[Change] = []
        if machine is None:
            room = self._make_room() if key not in self.plan.rules else []
            if room is None:
                self.dropped += 1
                return []
            changes += room
            machine = self.machines[key] = Machine(key)
        if found is not None and found.since is None:
            found.since = rfc3339(self._time_of(step, found.evidence.get("series")))
        before = machine.state
        change = machine.observe(life, found, step, window.now, f"{window.run}\n{window.attempt}\n{self.upto}")
        if machine.state != before:
            self.note_firing()
        if change is None:
            return changes
        change = group(change, key, self.machines, self.plan.rules)
        if change.kind in ("fire", "reopen"):
            causes.join(window.reported, change.finding)
        return [*changes, change]

    def _make_room(self) -> list[Change] | None:
        """Room for one more alert that is none of our rules'; None when there is none. First goes what is over, oldest
        first, then what a user said long ago."""
        window = self.window
        others = [machine for key, machine in self.machines.items() if key not in self.plan.rules]
        if len(others) < _MOST_OTHERS:
            return []
        done = [machine for machine in others if machine.state == "inactive"] or [
            machine for machine in others if machine.rule.startswith(USER_ALERT) and window.now - machine.hit > _SAID_S
        ]
        if not done:
            return None
        oldest = min(done, key=lambda machine: machine.hit)
        del self.machines[oldest.rule]
        change = oldest.close(window.step, window.now, "newer ones took its place")
        return [] if change is None else [change]

    def note_firing(self) -> None:
        """Tells the window which alerts are open, and which are pending."""
        self.window.firing = {key for key, machine in self.machines.items() if machine.state == "firing"}
        self.window.pending = {key for key, machine in self.machines.items() if machine.state == "pending"}

    def _life(self, key: str) -> Life:
        if key.startswith(USER_ALERT):
            return USER_LIFE
        return self.plan.lives.get(key, REPORTED_LIFE)

    def _time_of(self, step: int, series: str | None) -> float:
        """When a step was, by the clock of who measured it (first that of the series in question); else the server's
        own."""
        for name in (series or LOSS, LOSS, "step_time_s"):
            found = self.window.by_step.get(name)
            if found is not None and found.steps and found.steps[-1] >= step:
                return found.times[bisect_left(found.steps, step)]
        return self.window.now

    # --- what the agent and the user say ------------------------------------------------------------------------------

    def _reported(self, stored: FromTail, event: Event) -> list[Change]:
        found = reports.of_the_agent(event, stored.rank, self.window.now, self.window.step)
        if found is None:
            return []
        rule = self.plan.rules.get(found.rule)  # who judges by himself has waited for himself
        life = REPORTED_LIFE if rule is None else rule.life
        return self._carry(found.rule, life, found, found.since_step or self.window.step)

    def _explained(self, stored: FromTail, event: Event) -> list[Change]:
        """What an agent found out about an alert that is open, or that will be: it becomes part of its evidence."""
        cause = causes.cause_of(event.data, stored.rank, reports.step_of(self.window.step, event.step))
        if cause is None:
            return []
        for rule in cause["explains"]:
            machine = self.machines.get(rule)
            if machine is None or machine.state != "firing" or machine.finding is None or machine.absorbed:
                continue
            if causes.join([cause], machine.finding):
                return [Change("update", machine.alert, machine.finding, self.window.step, self.window.now)]
            return []
        self.window.reported = [*self.window.reported, cause][-causes.MOST :]
        return []

    def _by_user(self, stored: FromTail, event: Event) -> list[Change]:
        """run.alert(title, text, level): fires at once; the same title not again within a minute."""
        window, key = self.window, reports.user_key(event)
        machine = self.machines.get(key)
        changes: list[Change | None] = []
        if machine is not None and machine.state == "firing":
            if window.now - machine.hit < USER_LIFE.cooldown_s:
                return []
            changes.append(machine.close(window.step, window.now, "said again"))
            machine.resolved = machine.resolved_step = None  # no cool-down: what is said again fires again
        found = reports.of_the_user(event, stored.rank, window.now, window.step)
        changes += self._carry(key, USER_LIFE, found, found.since_step or 0)
        if window.ended and key in self.machines:  # said by a rank that outlived the run, or late: sent, and over
            changes.append(self.machines[key].close(window.step, window.now, f"{RUN_ENDED} ({window.state})"))
            self.note_firing()
        return [change for change in changes if change is not None]

    # --- for the verdict ----------------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """What is so now, worst first; for a run that ended also what was so at its end, or most of the time it ran."""
        present = (machine.present(self._life(key)) for key, machine in self.machines.items())
        found = [finding for finding in present if finding is not None]
        if self.window.ended:
            known = {finding.rule for finding in found}
            found += [
                one
                for machine in self.machines.values()
                if (one := machine.held()) is not None and one.rule not in known
            ]
        return worst_first(found, self.plan.rules)

    def verdict(self, *, lost: bool = False, language: Language = "en") -> Finding:
        """lost: nothing is heard of the run any more."""
        spike = self.machines.get(LossSpike.id)
        jump = spike.finding if spike is not None and spike.state != "firing" else None
        happened = self._happened()
        return verdict(self.window, self.findings(), happened=happened, jump=jump, lost=lost, language=language)

    def _happened(self) -> list[Happened]:
        """The alerts of this attempt that are over, oldest first; not those that were open when the run ended."""
        over = [
            machine
            for machine in self.machines.values()
            if machine.finding is not None
            and machine.state != "firing"
            and not (machine.absorbed or machine.open_at_end or machine.rule.startswith(USER_ALERT))
            and machine.finding.severity != "info"
        ]
        over.sort(key=lambda machine: machine.since)
        return [Happened(machine.finding, machine.resolved_step) for machine in over if machine.finding is not None]

    # --- persistence --------------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        machines = {key: machine.snapshot() for key, machine in self.machines.items()}
        older = None if self._older is None else self._older.snapshot()
        state = {"upto": self.upto, "window": self.window.snapshot(), "machines": machines, "older": older}
        return _encoder.encode(state)

    @classmethod
    def restore(
        cls, data: bytes, plan: Plan, *, on_failure: Callable[[str, Exception], None] | None = None
    ) -> Evaluator:
        state: dict[str, Any] = msgspec.msgpack.decode(data, strict=False)
        judge = cls(state["window"]["run"], plan, on_failure=on_failure)
        judge.upto = state["upto"]
        judge.window = Window.restore(state["window"], plan)
        judge.machines = {key: Machine.restore(entry) for key, entry in state["machines"].items()}
        if state["older"] is not None:
            judge._older = cls.restore(state["older"], plan, on_failure=on_failure)
        return judge
