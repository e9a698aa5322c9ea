"""The data that a rule may look at: the recent past of one attempt of one run.

A Window is filled from frames and knows no clock, database or network: its time is the server time at which the newest
frame was received, or the time that the engine says. It holds what the rules declare that they read (plan.py), and is
bounded. `snapshot()` and `restore()` carry it over a restart, so that a rule continues exactly where it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from perfagent.wire import LOSS, Event, loss_kind
from perfagent_server.rules.causes import reason_words
from perfagent_server.rules.learning_rate import LearningRate
from perfagent_server.rules.nonfinite_steps import NonfiniteStep, NonfiniteSteps
from perfagent_server.rules.own_series import OwnSeries
from perfagent_server.rules.plan import Column, Columns, Plan
from perfagent_server.rules.row_series import FamilyRows, RankRows
from perfagent_server.rules.rule import Rule, Series
from perfagent_server.rules.step_series import Part, StepSeries, in_step_order
from perfagent_server.rules.time_series import TimeSeries
from perfagent_server.rules.wall_time import WallTime

__all__ = ["TERMINAL", "End", "Noted", "Window", "is_end"]

TERMINAL = frozenset({"finished", "failed", "oom", "killed", "preempted"})
_PLAIN = (
    "attempt", "start_step", "world_size", "state", "now", "at", "step", "stepped", "started", "first_loss", "reported",
)  # fmt: skip
"""Of a window: what is stored as it is."""
_NO_READINGS, _NO_STEPS = TimeSeries(0, apart=True), StepSeries("", Series("", keep=0), judged=False)
_MOST_NAMED_LOSSES = 16
_STEPPING_S = 10.0
"""A reading is taken while the run makes steps if the last one ended so recently, or within three usual step times."""


def is_end(event: Event) -> bool:
    """Whether a process says that it ended. What the tail holds may be of any type: a list is no state."""
    state = event.data.get("state")
    return event.kind == "state" and isinstance(state, str) and state in TERMINAL


class Samples(Protocol):
    """A group of a frame: series that share their steps. Groups of a run have the same names again and again, so numbers
    are asked for by the places of their names."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> int: ...

    def step_list(self) -> list[int]:
        """int64 (rows,)."""

    def time_list(self) -> list[float]:
        """float64 (rows,), Unix seconds by the sender's clock."""

    def numbers(self, places: Sequence[int]) -> list[Sequence[float]]:
        """float32 or float64 (rows,) of each name."""


@dataclass(slots=True)
class End:
    """How a process of this attempt ended, in its own words. reason: those of an exception, or facts (`reason_stored`); unused:
    parameters without a gradient, by name, of which DistributedDataParallel complained; oom_kills: what the kernel has killed
    on its host for want of memory."""

    state: str
    rank: int
    time: float
    step: int | None = None
    reason: str = ""
    exception: str = ""
    traceback: str = ""
    unused: str = ""
    oom_kills: int | None = None

    @property
    def said(self) -> str:
        """Why it ended: the words that rules search."""
        return reason_words(self.reason)

    @property
    def facts(self) -> str | None:
        """The same in facts, of which a reader's language makes words."""
        return self.reason if self.reason != self.said else None


@dataclass(slots=True)
class Noted:
    """An event that a rule reads. time: Unix seconds, by its sender's clock."""

    rank: int
    time: float
    step: int | None
    data: dict[str, Any]


class Window:
    """The recent past of one attempt of one run.

    now: Unix seconds, server clock; started: when the attempt was first heard; at: the step under judgment; step: the
    last completed step of any rank; stepped: when that step was received, else when the attempt was first heard;
    firing: rules whose alert is open (for hysteresis); pending: those whose finding has not held for long enough yet;
    by_step, by_family, by_time: series by name, as the plan says; by_rank: series with a row for each rank; stages: rank
    -> its pipeline stage, where it said; ends: how processes ended; lost: ranks without contact and for how many
    seconds; heard: ranks that ever reported; done: those of them that ended; reported: findings of the agent that were
    not joined to an alert yet; first_loss: the first finite value of `loss`; wall: where the time went; own: the series
    that users' own alerts watch. before: learning rate and loss of the attempt before, for a run that goes on from a
    checkpoint; loss_before: the first loss of all attempts before.
    """

    def __init__(
        self, run: str, plan: Plan, *, attempt: int = -1, world_size: int = 1, now: float = 0.0, started: float = 0.0
    ) -> None:
        self.run, self.plan = run, plan
        self.attempt, self.world_size, self.now = attempt, world_size, now
        self.start_step = self.at = self.step = 0
        self.stepped = self.started = started
        self.state = "running"
        self.firing: set[str] = set()
        self.pending: set[str] = set()
        self.by_step: dict[str, StepSeries] = {}
        self.by_rank = RankRows(plan.apart)
        self.by_family: dict[str, FamilyRows] = {}
        self.by_time: dict[str, TimeSeries] = {}
        self.nonfinite = {"loss": NonfiniteSteps(), "gradient": NonfiniteSteps()}
        self.learning_rate = LearningRate()
        self.wall = WallTime()
        self.own = OwnSeries(plan.own)
        self.ends: list[End] = []
        self.lost: dict[int, float] = {}
        self.heard: set[int] = set()
        self.done: set[int] = set()
        self.stages: dict[int, int] = {}
        self.reported: list[dict[str, Any]] = []
        self.first_loss: float | None = None
        self.before: dict[str, StepSeries] = {}
        self.loss_before: float | None = None
        self._is_timed = False  # whether the agent times the steps of this run
        self._pause_after, self._pause_s = -1, _STEPPING_S  # the longest pause between two steps, as of this step
        self._events: dict[str, list[Noted]] = {}
        self._states: dict[str, Any] = {}

    def go_on_from(self, older: Window) -> None:
        """The run was started again."""
        self.wall.go_on_from(older.wall, is_restart=older.state != "finished")
        known = {name: older.by_step[name] for name in ("lr", older.loss_name) if name in older.by_step}
        self.before = known or older.before
        self.loss_before = older.first_loss if older.loss_before is None else older.loss_before

    def forget_series(self) -> None:
        """Drops all series: of an attempt that is over, only its ends are still of interest."""
        for series in (self.by_step, self.by_family, self.by_time):
            series.clear()
        self.by_rank, self.own = RankRows(self.plan.apart), OwnSeries({})

    # --- for rules ----------------------------------------------------------------------------------------------------

    def series(self, name: str) -> StepSeries | None:
        """The series, if it has at least one step to see."""
        found = self.by_step.get(name)
        return found if found is not None and found.seen else None

    def track(self, name: str) -> StepSeries:
        """The series; one without steps where no rank sent it."""
        return self.by_step.get(name, _NO_STEPS)

    def value(self, name: str) -> float | None:
        """The newest value of a series."""
        found = self.by_step.get(name)  # asked for often
        return None if found is None else found.value

    def readings(self, name: str) -> TimeSeries:
        """The series over time; one without ranks where none sent it."""
        return self.by_time.get(name, _NO_READINGS)

    def events(self, kind: str) -> Sequence[Noted]:
        """The newest events of a kind that a rule reads, oldest first."""
        return self._events.get(kind, ())

    def state_of(self, rule: Rule, fresh: Any) -> Any:
        """The small state that a rule keeps in this window: plain values for MessagePack. fresh: what it is at
        first."""
        return self._states.setdefault(rule.id, fresh)

    def nonfinite_at(self, kind: str, step: int) -> NonfiniteStep | None:
        return self.nonfinite[kind].at(step)

    @property
    def loss_name(self) -> str | None:
        """The series that is the loss of this run: `loss`, else what the script calls so. None: it logs no whole
        one."""
        if LOSS in self.by_step:
            return LOSS
        return next((name for name in self.by_step if loss_kind(name) == "whole"), None)

    def is_firing(self, rule: str) -> bool:
        """Whether an alert of that rule is open: its threshold to clear is then lower than the one to fire."""
        return rule in self.firing

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    # --- filling ------------------------------------------------------------------------------------------------------

    def take(self, rank: int, groups: Sequence[Samples]) -> set[str]:
        """Reads the series that rules need out of a frame. Returns the names of those with something new to judge."""
        touched: set[str] = set()
        parts: dict[str, list[Part]] = {}
        for noted in self.nonfinite.values():
            noted.forget_old()
        chosen = [(group, self.plan.columns(group.names)) for group in groups if group.rows]
        self._follow_losses([columns for _, columns in chosen])
        self._is_timed = self._is_timed or any(columns.step_time is not None for _, columns in chosen)
        for group, columns in chosen:
            self._take_group(rank, group, columns, parts, touched)
        for shown, found in parts.items():
            self.by_step[shown].take(rank, *in_step_order(found), self.now, self.world_size)
        return touched | parts.keys()

    def _take_group(
        self, rank: int, group: Samples, columns: Columns, parts: dict[str, list[Part]], touched: set[str]
    ) -> None:
        if columns.own:
            asked = sorted({one.place for one in columns.own})
            own = dict(zip(asked, group.numbers(asked), strict=True))
            self.own.take(rank, columns.own, group.step_list(), group.time_list(), own, self.now, self.world_size)
        losses = [one for one in columns.named_losses if one.name in self.by_step]
        if not (losses or columns.is_wanted):
            return
        steps, times = group.step_list(), group.time_list()
        values = dict(zip(columns.places, group.numbers(columns.places), strict=True))
        # Where steps are timed, losses and readings may be of the step in progress, which may never be completed.
        if (columns.step_time is not None or not self._is_timed) and (newest := max(steps)) > self.step:
            self.step, self.stepped = newest, self.now
        for column in (*columns.merged, *losses):
            if column.noted:
                self.nonfinite[column.noted].note(column.name, rank, steps, values[column.place], self.now)
            series = self.by_step.get(column.shown)
            if series is None:
                series = self.begin(column.name)
            if series.name == column.name:
                parts.setdefault(column.shown, []).append((steps, values[column.place], times))
        if columns.phases or columns.step_time is not None:
            phases = [(phase, values[place]) for phase, place in columns.phases]
            if columns.step_time is None:
                self.wall.take_rest(rank, steps, phases)
            else:
                self.wall.take(rank, steps, times, values[columns.step_time], phases)
        names, places = columns.apart
        if names and self.world_size > 1:
            self.by_rank.take(rank, names, steps, [values[place] for place in places])
        for column in columns.time:
            if self._take_readings(column, rank, times, values[column.place]):
                touched.add(column.name)
        for family, names, places in columns.families:
            if self._family(family).take(names, steps, [values[place] for place in places]):
                touched.add(family.name)

    def _take_readings(self, column: Column, rank: int, times: Sequence[float], values: Sequence[float]) -> bool:
        """Whether it is time to judge the series."""
        known = self.by_time.get(column.name)
        series = known if known is not None else _readings(column.plan)
        until = self._stepping_until()
        is_due = series.take(rank, times, values, [time <= until for time in times])
        if known is None and series.ranks:  # a sampler that only failed so far has told nothing
            self.by_time[column.name] = series
        return is_due

    def _stepping_until(self) -> float:
        """Until when a reading is taken while the run makes steps, by the clocks of its ranks."""
        took = self.by_step.get("step_time_s")
        if took is None or (not took.seen and not took.hidden):
            return -math.inf
        if took.closed != self._pause_after:  # a median costs more than the readings of a frame
            self._pause_after, self._pause_s = took.closed, max(_STEPPING_S, 3.0 * median(took.values[-32:]))
        return took.times[-1] + self._pause_s

    def _family(self, family: Series) -> FamilyRows:
        if family.name not in self.by_family:
            self.by_family[family.name] = FamilyRows(family.keep)
        return self.by_family[family.name]

    def _follow_losses(self, chosen: Sequence[Columns]) -> None:
        """Begins the series of training losses by other names than `loss`: not too many, and of parts only where no
        whole is."""
        losses = {one.name for columns in chosen for one in columns.named_losses if one.name not in self.by_step}
        if not losses:
            return
        whole = self.loss_name is not None or any(one.name == LOSS for columns in chosen for one in columns.merged)
        room = _MOST_NAMED_LOSSES - sum(1 for known in self.by_step if not self.plan.is_signal(known))
        for name in sorted(losses, key=lambda name: (loss_kind(name) == "part", name))[: max(0, room)]:
            if loss_kind(name) == "part" and (whole or self.loss_name is not None):
                break
            self.begin(name)

    def begin(self, name: str) -> StepSeries:
        """A new series over steps, ranks put together."""
        shown = self.plan.part_of(name)
        series = StepSeries(name, self.plan.series_of(name), judged=self.plan.is_judged(shown))
        self.by_step[shown] = series
        return series

    def note_event(self, rank: int, event: Event) -> None:
        """Keeps an event of a kind that a rule reads."""
        noted = self._events.setdefault(event.kind, [])
        noted.append(Noted(rank, event.time if math.isfinite(event.time) else self.now, event.step, event.data))
        del noted[: -self.plan.events[event.kind]]

    def close(self, names: Iterable[str], *, final: bool = False) -> list[str]:
        """Closes what can be closed of these series, and returns those with steps to judge, in the order of judging.
        final: no rank will send any more."""
        now = math.inf if final else self.now
        ready = []
        for name in names:
            series = self.by_step.get(name)
            if series is None:
                ready.append(name)
                continue
            if series.pending:
                series.close(now, self.world_size)
            if not series.hidden:
                continue
            if series.judged:
                ready.append(name)
            else:
                series.show_all()
        if len(ready) < 2:
            return ready
        # The loss last: what surrounds a step (learning rate, scale) is known when the loss is judged.
        order = self.plan.order
        return sorted(ready, key=lambda name: (name == LOSS, order.get(name, len(order))))

    def waits_until(self) -> float | None:
        """When time alone closes a step that waits for a rank, server clock; None if none waits."""
        found = (*(series.waits_until() for series in self.by_step.values()), self.own.waits_until())
        return min((at for at in found if at is not None), default=None)

    def advance(self, name: str) -> bool:
        """Shows the next step of a series to the rules; `at` is then that step."""
        series = self.by_step[name]
        if not series.advance():
            return False
        self.at, value = series.steps[series.seen - 1], series.values[series.seen - 1]
        if name == "lr":
            self.learning_rate.note(self.at, value, series.values[max(0, series.seen - 17) : series.seen - 1])
        elif name == LOSS and self.first_loss is None and math.isfinite(value):
            self.first_loss = value
        return True

    # --- persistence --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Plain values for MessagePack. Rows of ranks are not among them: they fill again in some steps, and of
        thousands of ranks they are megabytes."""
        return {
            "run": self.run, **{name: getattr(self, name) for name in _PLAIN},
            "firing": sorted(self.firing), "pending": sorted(self.pending),
            "by_step": {series.name: series.snapshot() for series in self.by_step.values()},
            "before": {name: series.snapshot() for name, series in self.before.items()}, "loss_before": self.loss_before,
            "by_family": {prefix: rows.snapshot() for prefix, rows in self.by_family.items()},
            "by_time": {name: series.snapshot() for name, series in self.by_time.items()},
            "nonfinite": {kind: noted.snapshot() for kind, noted in self.nonfinite.items()},
            "learning_rate": self.learning_rate.snapshot(), "wall": self.wall.snapshot(),
            "own": self.own.snapshot(),
            "ends": [[getattr(end, name) for name in End.__dataclass_fields__] for end in self.ends],
            "lost": list(self.lost.items()), "heard": sorted(self.heard), "done": sorted(self.done),
            "stages": list(self.stages.items()),
            "events": {
                kind: [[one.rank, one.time, one.step, one.data] for one in noted] for kind, noted in self._events.items()
            },
            "states": {name: [self.plan.rules[name].state_version, state] for name, state in self._states.items()},
        }  # fmt: skip

    @classmethod
    def restore(cls, state: dict[str, Any], plan: Plan) -> Window:
        """The window of a snapshot. A series that no rule reads any more, and the state of a rule that has changed, are
        left out."""
        window = cls(state["run"], plan)
        for name in _PLAIN:
            setattr(window, name, state[name])
        window.firing, window.pending = set(state["firing"]), set(state["pending"])
        for name, saved in state["by_step"].items():
            if plan.is_signal(name) or loss_kind(name) or plan.is_evaluation(name):
                window.begin(name).restore(saved)
        for name, saved in state.get("before", {}).items():
            window.before[name] = StepSeries(name, plan.series_of(name), judged=False)
            window.before[name].restore(saved)
        window.loss_before = state.get("loss_before")
        window._is_timed = "step_time_s" in window.by_step
        for prefix, rows in state["by_family"].items():
            if prefix in plan.families:
                window._family(plan.families[prefix]).restore(rows)
        for name, readings in state["by_time"].items():
            if name in plan.time:
                window.by_time[name] = _readings(plan.time[name])
                window.by_time[name].restore(readings)
        for kind, noted in state["nonfinite"].items():
            window.nonfinite[kind].restore(noted)
        window.learning_rate = LearningRate(*state["learning_rate"])
        window.wall.restore(state["wall"])
        if "own" in state:  # not in a snapshot of an older version
            window.own.restore(state["own"])
        window.ends = [End(*entry) for entry in state["ends"]]
        window.lost = dict(state["lost"])
        window.heard, window.done = set(state["heard"]), set(state["done"])
        window.stages = dict(state.get("stages", ()))
        window._events = {kind: [Noted(*entry) for entry in noted] for kind, noted in state["events"].items()}
        window._states = {
            name: saved
            for name, (version, saved) in state["states"].items()
            if name in plan.rules and plan.rules[name].state_version == version
        }
        return window


def _readings(plan: Series) -> TimeSeries:
    return TimeSeries(plan.keep, apart=plan.ranks == "apart")
