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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfagent.wire import LOSS, Event, Group, loss_kind
from perfagent_server.rules.learning_rate import LearningRate
from perfagent_server.rules.nonfinite_steps import GRADIENTS, NonfiniteStep, NonfiniteSteps
from perfagent_server.rules.plan import Columns, Plan
from perfagent_server.rules.row_series import RowSeries
from perfagent_server.rules.rule import Rule, Series
from perfagent_server.rules.step_series import Part, StepSeries, in_step_order
from perfagent_server.rules.time_series import TimeSeries

__all__ = ["TERMINAL", "End", "Noted", "Window"]

TERMINAL = frozenset({"finished", "failed", "oom", "killed", "preempted"})
_MOST_NAMED_LOSSES = 16
_MOST_EVENTS = 64  # that are kept of a kind
_STEPPING_S = 10.0
"""A reading is taken while the run makes steps if the last one ended so recently, or within three usual step times."""


@dataclass(slots=True)
class End:
    """How a process of this attempt ended, in its own words."""

    state: str
    rank: int
    time: float
    step: int | None = None
    reason: str = ""
    exception: str = ""
    traceback: str = ""


@dataclass(slots=True)
class Noted:
    """An event that a rule reads. time: Unix seconds, by its sender's clock."""

    rank: int
    time: float
    step: int | None
    data: dict[str, Any]


class Window:
    """The recent past of one attempt of one run.

    now: Unix seconds, server clock; started: when the attempt was first heard; at: the step under judgement; step: the
    last completed step of any rank; stepped: when that step was received, else when the attempt was first heard;
    firing: rules whose alert is open (for hysteresis); by_step, by_rank, by_family, by_time: series by name, as the
    plan says; ends: how processes ended; lost: ranks without contact and for how many seconds; heard: ranks that ever
    reported; done: those of them that ended; reported: findings of the agent that were not joined to an alert yet;
    first_loss: the first finite value of `loss`.
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
        self.by_step: dict[str, StepSeries] = {}
        self.by_rank: dict[str, RowSeries[int]] = {}
        self.by_family: dict[str, RowSeries[str]] = {}
        self.by_time: dict[str, TimeSeries] = {}
        self.nonfinite = {"loss": NonfiniteSteps(), "gradient": NonfiniteSteps()}
        self.learning_rate = LearningRate()
        self.ends: list[End] = []
        self.lost: dict[int, float] = {}
        self.heard: set[int] = set()
        self.done: set[int] = set()
        self.reported: list[dict[str, Any]] = []
        self.first_loss: float | None = None
        self._events: dict[str, list[Noted]] = {}
        self._states: dict[str, Any] = {}

    def forget_series(self) -> None:
        """Drops all series: of an attempt that is over, only its ends are still of interest."""
        for series in (self.by_step, self.by_rank, self.by_family, self.by_time):
            series.clear()

    # --- for rules ----------------------------------------------------------------------------------------------------

    def series(self, name: str) -> StepSeries | None:
        """The series, if it has at least one step to see."""
        found = self.by_step.get(name)
        return found if found is not None and found.seen else None

    def value(self, name: str) -> float | None:
        """The newest value of a series."""
        found = self.by_step.get(name)
        return found.value if found is not None else None

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

    def take(self, rank: int, groups: Sequence[Group]) -> set[str]:
        """Reads the series that rules need out of a frame. Returns the names that were in it."""
        touched: set[str] = set()
        parts: dict[str, list[Part]] = {}
        for noted in self.nonfinite.values():
            noted.forget_old()
        chosen = [(group, self.plan.columns(tuple(group.values))) for group in groups if group.rows]
        self._follow_losses(chosen)
        is_timed = "step_time_s" in self.by_step or any("step_time_s" in columns.merged for _, columns in chosen)
        for group, columns in chosen:
            self._take_group(rank, group, columns, parts, touched, is_timed)
        for shown, found in parts.items():
            self.by_step[shown].take(rank, *in_step_order(found), self.now, self.world_size)
        return touched | parts.keys()

    def _take_group(
        self,
        rank: int,
        group: Group,
        columns: Columns,
        parts: dict[str, list[Part]],
        touched: set[str],
        is_timed: bool,
    ) -> None:
        losses = [name for name in columns.losses if name in self.by_step]
        if not (losses or columns.is_wanted):
            return
        steps, times = group.steps(), group.times()
        if columns.merged or not is_timed:
            # Where steps are timed, a script may count its own losses otherwise, and readings carry the step in progress.
            self._note_step(max(steps))
        values = {name: group.column(name) for name in (*columns.merged, *losses)}
        for name, column in values.items():
            self._take_merged(name, rank, steps, column, times, parts)
        for name, keep in columns.apart if self.world_size > 1 else ():
            self._rows(name, keep).take(rank, steps, values[name] if name in values else group.column(name))
        for name, kept in columns.time:
            self._take_readings(name, kept, rank, times, group.column(name))
            touched.add(name)
        for family, names in columns.families:
            self._family(family.name, family.keep).take_largest(names, steps, _matrix(group, names))
            touched.add(family.name)

    def _note_step(self, step: int) -> None:
        if step > self.step:
            self.step, self.stepped = step, self.now

    def _take_merged(
        self,
        name: str,
        rank: int,
        steps: Sequence[int],
        values: Sequence[float],
        times: Sequence[float],
        parts: dict[str, list[Part]],
    ) -> None:
        if name in GRADIENTS:
            self.nonfinite["gradient"].note(name, rank, steps, values, self.now)
        elif loss_kind(name):
            self.nonfinite["loss"].note(name, rank, steps, values, self.now)
        shown = self.plan.part_of(name)
        series = self.by_step.get(shown)
        if series is None:
            series = self.by_step[shown] = StepSeries(name, self.plan.series_of(name))
        if series.name == name:
            parts.setdefault(shown, []).append((steps, values, times))

    def _take_readings(
        self, name: str, kept: Series, rank: int, times: Sequence[float], values: Sequence[float]
    ) -> None:
        series = self.by_time.get(name)
        if series is None:
            series = self.by_time[name] = TimeSeries(kept.keep, apart=kept.ranks == "apart")
        until = self._stepping_until()
        series.take(rank, times, values, [time <= until for time in times])

    def _stepping_until(self) -> float:
        """Until when a reading is taken while the run makes steps, by the clocks of its ranks."""
        took = self.by_step.get("step_time_s")
        if took is None or not took.times:
            return -math.inf
        return took.times[-1] + max(_STEPPING_S, 3.0 * median(took.values[-32:]))

    def _rows(self, name: str, keep: int) -> RowSeries[int]:
        if name not in self.by_rank:
            self.by_rank[name] = RowSeries(keep)
        return self.by_rank[name]

    def _family(self, prefix: str, keep: int) -> RowSeries[str]:
        if prefix not in self.by_family:
            self.by_family[prefix] = RowSeries(keep)
        return self.by_family[prefix]

    def _follow_losses(self, chosen: Sequence[tuple[Group, Columns]]) -> None:
        """Begins the series of training losses by other names than `loss`: not too many, and of parts only where no
        whole is."""
        names = {name for _, columns in chosen for name in columns.losses if name not in self.by_step}
        if not names:
            return
        whole = self.loss_name is not None or any(LOSS in group.values for group, _ in chosen)
        room = _MOST_NAMED_LOSSES - sum(1 for known in self.by_step if not self.plan.is_signal(known))
        for name in sorted(names, key=lambda name: (loss_kind(name) == "part", name))[: max(0, room)]:
            if loss_kind(name) == "part" and (whole or self.loss_name is not None):
                break
            self.by_step[name] = StepSeries(name, self.plan.of_loss(name))

    def note_event(self, rank: int, event: Event) -> None:
        """Keeps an event of a kind that a rule reads."""
        noted = self._events.setdefault(event.kind, [])
        noted.append(Noted(rank, event.time if math.isfinite(event.time) else self.now, event.step, event.data))
        del noted[:-_MOST_EVENTS]

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
            series.close(now, self.world_size)
            if series.seen < len(series.steps):
                ready.append(name)
        # The loss last: what surrounds a step (learning rate, scale) is known when the loss is judged.
        order = self.plan.order
        return sorted(ready, key=lambda name: (name == LOSS, order.get(name, len(order))))

    def waits_until(self) -> float | None:
        """When time alone closes a step that waits for a rank, server clock; None if none waits."""
        return min((at for series in self.by_step.values() if (at := series.waits_until()) is not None), default=None)

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
            "run": self.run, "attempt": self.attempt, "start_step": self.start_step, "world_size": self.world_size,
            "state": self.state, "now": self.now, "at": self.at, "step": self.step, "stepped": self.stepped,
            "started": self.started,
            "firing": sorted(self.firing), "first_loss": self.first_loss, "reported": self.reported,
            "by_step": {series.name: series.snapshot() for series in self.by_step.values()},
            "by_family": {prefix: rows.snapshot() for prefix, rows in self.by_family.items()},
            "by_time": {name: series.snapshot() for name, series in self.by_time.items()},
            "nonfinite": {kind: noted.snapshot() for kind, noted in self.nonfinite.items()},
            "learning_rate": self.learning_rate.snapshot(),
            "ends": [[getattr(end, name) for name in End.__dataclass_fields__] for end in self.ends],
            "lost": list(self.lost.items()), "heard": sorted(self.heard), "done": sorted(self.done),
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
        for name in (
            "attempt",
            "start_step",
            "world_size",
            "state",
            "now",
            "at",
            "step",
            "stepped",
            "started",
            "first_loss",
            "reported",
        ):
            setattr(window, name, state[name])
        window.firing = set(state["firing"])
        for name, saved in state["by_step"].items():
            if plan.is_signal(name) or loss_kind(name):
                series = window.by_step[plan.part_of(name)] = StepSeries(name, plan.series_of(name))
                series.restore(saved)
        for prefix, rows in state["by_family"].items():
            kept = plan.kept(prefix)
            if kept is not None and kept.family is not None:
                window._family(prefix, kept.family.keep).restore(rows)
        for name, readings in state["by_time"].items():
            kept = plan.kept(name)
            if kept is not None and kept.time is not None:
                window.by_time[name] = TimeSeries(kept.time.keep, apart=kept.time.ranks == "apart")
                window.by_time[name].restore(readings)
        for kind, noted in state["nonfinite"].items():
            window.nonfinite[kind].restore(noted)
        window.learning_rate = LearningRate(*state["learning_rate"])
        window.ends = [End(*entry) for entry in state["ends"]]
        window.lost = dict(state["lost"])
        window.heard, window.done = set(state["heard"]), set(state["done"])
        window._events = {kind: [Noted(*entry) for entry in noted] for kind, noted in state["events"].items()}
        window._states = {
            name: saved
            for name, (version, saved) in state["states"].items()
            if name in plan.rules and plan.rules[name].state_version == version
        }
        return window


def _matrix(group: Group, names: Sequence[str]) -> NDArray[np.float64]:
    """The columns of several series at once: float64 (names, rows)."""
    columns = [group.values[name] for name in names]
    size = len(columns[0])
    if all(len(column) == size for column in columns):
        kind = "<f8" if size == 8 * group.rows else "<f4"
        return np.frombuffer(b"".join(columns), kind).reshape(len(names), -1).astype(np.float64)
    return np.array([group.column(name) for name in names], np.float64)
