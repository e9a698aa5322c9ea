"""The data that a rule may look at: the recent past of one attempt of one run, with ranks put together step by step.

A Window is filled from frames and knows no clock, database or network: its time is the server time at which the newest
frame was received, or the time of the engine's tick. It is bounded: each series keeps a fixed number of steps.
`snapshot()` and `restore()` carry it over a restart without loss, so that a rule continues exactly where it was.

Ranks arrive at different moments. A step of a series is closed, and only then shown to the rules, when every rank that
reports that series has reported the step, or when the slowest has kept it waiting for PATIENCE_S. Non-finite values do
not wait for that: they are noted the moment they arrive.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median
from typing import Any

from perfagent.wire import LOSS, TIMED_PHASES, Group, loss_kind

__all__ = ["PATIENCE_S", "SIGNALS", "Bad", "End", "Track", "Window"]

PATIENCE_S = 5.0  # how long the slowest rank may keep a step waiting
_ABSENT_AFTER_S = 15.0  # a rank that was silent in a series for so long is not waited for
_MAX_PENDING = 512  # steps that wait for a rank, per series
_MAX_BAD = 64  # of the non-finite steps of a frame the newest are judged, and of each unbroken row its first
_MAX_BEGINNINGS = 256
_ROW_BEGIN = 24  # steps: more than what a GradScaler may skip, or a part of a loss may miss, before it is a fault
_KEPT_BAD = 256  # non-finite steps that are remembered: other ranks send the same ones some frames later

TERMINAL = frozenset({"finished", "failed", "oom", "killed", "preempted"})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_Part = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""Steps, values and times of a series in one group."""


def _in_step_order(parts: Sequence[_Part]) -> _Part:
    """A series that is in several groups of a frame (some steps have more names than others) as though it were in one:
    a step that comes after a later one would be taken for late."""
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in zip(*part, strict=True)]
    rows.sort(key=itemgetter(0))
    steps, values, times = zip(*rows, strict=True)
    return steps, values, times


def _root_of_sum(values: Sequence[float]) -> float:
    total = sum(values)
    return math.sqrt(total) if total >= 0 else math.nan


@dataclass(frozen=True, slots=True)
class Signal:
    """A series that rules read: how many steps are kept and how ranks become one value.

    of: the series that rules read instead, when ranks send parts of it: a step of which a part is missing is then left
    out.
    """

    steps: int
    over_ranks: Callable[[Sequence[float]], float]
    of: str = ""


# These and the training losses by other names are decoded for the rules; everything else in a frame is skipped unread.
SIGNALS: dict[str, Signal] = {
    "loss": Signal(1200, _mean),
    "lr": Signal(64, max),
    "grad/norm": Signal(64, max),
    "grad/nonfinite": Signal(64, sum),
    # of sharded parameters: each rank sends its part
    "grad/local_square_sum": Signal(64, _root_of_sum, of="grad/norm"),
    "amp/scale": Signal(64, min),
    "amp/skipped": Signal(64, max),
    "step_time_s": Signal(64, median),
    **{f"phase/{phase}_s": Signal(64, median) for phase in TIMED_PHASES},
}
_NAMED_LOSS = Signal(64, _mean)  # `loss/kl`, `g_loss`: only looked at for values that are no numbers
_MAX_NAMED_LOSSES = 16
# Judged first within a frame: what the rules on the later ones look up.
_ORDER = {name: place for place, name in enumerate(SIGNALS)}
UTILIZATION = "gpu/utilization_pct"
_UTILIZATION_KEPT_S = 330
_GRADIENTS = ("grad/norm", "grad/nonfinite", "grad/local_square_sum")


@dataclass(slots=True)
class Bad:
    """A step in which a value was NaN or infinite. time: when that was noted, server clock; value: the first one seen,
    or that of `loss`; ranks: whose it was; series: of losses their names, `loss` itself when none is written."""

    step: int
    time: float
    value: float
    ranks: list[int]
    series: list[str] = field(default_factory=list)

    @property
    def leading(self) -> str:
        """The series to name: `loss`, else a whole loss, else a part of one."""
        if not self.series or LOSS in self.series:
            return LOSS
        return next((name for name in self.series if loss_kind(name) == "whole"), self.series[0])


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


class Track:
    """One series, ranks put together. steps, values, times hold the newest closed steps; a rule sees the first `seen`.

    source: the series it is filled from, of parts where it is not itself on the wire.
    """

    __slots__ = (
        "closed", "first", "of_parts", "over_ranks", "pending", "ranks", "seen", "size", "source", "steps", "times", "total",
        "values",
    )  # fmt: skip

    def __init__(self, source: str) -> None:
        signal = SIGNALS.get(source) or (SIGNALS[LOSS] if loss_kind(source) == "whole" else _NAMED_LOSS)
        self.source = source
        self.size = signal.steps
        self.over_ranks = signal.over_ranks
        self.of_parts = bool(signal.of)
        self.steps: list[int] = []
        self.values: list[float] = []
        self.times: list[float] = []
        self.seen = 0
        self.total = 0  # steps seen in this attempt
        self.closed = -1  # newest closed step
        self.first: float | None = None  # when the series first came
        self.ranks: dict[int, float] = {}  # rank -> when it last reported
        # step -> (when first reported, sample time, rank -> value)
        self.pending: dict[int, tuple[float, float, dict[int, float]]] = {}

    def last(self, count: int) -> list[float]:
        """The newest `count` values that may be seen, oldest first."""
        return self.values[max(0, self.seen - count) : self.seen]

    def last_steps(self, count: int) -> list[int]:
        return self.steps[max(0, self.seen - count) : self.seen]

    @property
    def value(self) -> float | None:
        return self.values[self.seen - 1] if self.seen else None

    @property
    def step(self) -> int | None:
        return self.steps[self.seen - 1] if self.seen else None

    @property
    def time(self) -> float | None:
        return self.times[self.seen - 1] if self.seen else None

    def at(self, step: int) -> float | None:
        """The value of that step, if it is among the newest ones that may be seen."""
        for place in range(self.seen - 1, -1, -1):
            if self.steps[place] == step:
                return self.values[place]
            if self.steps[place] < step:
                return None
        return None

    def before(self, step: int, count: int) -> list[float]:
        """The newest `count` values up to this step, oldest first. What waits for a slow rank counts too, and not only
        what the rules have seen: they are judged in turn, and a value that is no number is judged at once."""
        end = bisect_right(self.steps, step)
        waiting = [
            self.over_ranks([values[rank] for rank in sorted(values)])
            for at, (_, _, values) in sorted(self.pending.items())
            if at <= step
        ]
        return [*self.values[max(0, end - count) : end], *waiting][-count:]

    def steps_before(self, step: int, count: int) -> list[int]:
        """The steps of before(step, count)."""
        end = bisect_right(self.steps, step)
        return [*self.steps[max(0, end - count) : end], *sorted(at for at in self.pending if at <= step)][-count:]

    def take(
        self, rank: int, steps: Sequence[int], values: Sequence[float], times: Sequence[float], now: float, world: int
    ) -> None:
        self._trim()
        if self.first is None:
            self.first = now
        self.ranks[rank] = now
        alone = world <= 1 and len(self.ranks) == 1 and not self.pending
        if alone and len(steps) and steps[0] > self.closed and _rising(steps):
            self.steps.extend(steps)
            self.values.extend([self.over_ranks([value]) for value in values] if self.of_parts else values)
            self.times.extend(times)
            self.closed = steps[-1]
            return
        for step, value, time in zip(steps, values, times, strict=True):
            if step <= self.closed:
                continue  # late: that step has been judged without this rank
            entry = self.pending.get(step)
            if entry is None:
                entry = self.pending[step] = (now, time, {})
            entry[2][rank] = value

    def close(self, now: float, world: int) -> None:
        """Puts complete steps, and those that waited long enough, behind the visible ones."""
        if not self.pending:
            return
        live = sum(1 for seen in self.ranks.values() if now - seen < _ABSENT_AFTER_S) or 1
        settled = self.first is not None and now - self.first >= PATIENCE_S
        need = live if settled else max(world, live)
        for step in sorted(self.pending):
            since, time, values = self.pending[step]
            if len(values) < need and now - since < PATIENCE_S and len(self.pending) <= _MAX_PENDING:
                return
            del self.pending[step]
            self.closed = step
            if self.of_parts and len(values) < max(live, len(self.ranks)) and all(map(math.isfinite, values.values())):
                continue  # some rank did not measure that step: part of a norm is no norm
            self.steps.append(step)
            self.values.append(self.over_ranks([values[rank] for rank in sorted(values)]))
            self.times.append(time)

    def advance(self) -> bool:
        """Shows one more step to the rules. False when there is none."""
        if self.seen < len(self.steps):
            self.seen += 1
            self.total += 1
            return True
        return False

    def show_all(self) -> None:
        """Shows every step at once, where no rule wants to judge them one by one."""
        self.total += len(self.steps) - self.seen
        self.seen = len(self.steps)

    def _trim(self) -> None:
        """Drops what is too old, when new steps come and not when the last one was judged: of a frame with more steps
        than are kept, rules on other series, which are judged later, look up each."""
        over = self.seen - self.size
        if over > self.size:
            for column in (self.steps, self.values, self.times):
                del column[:over]
            self.seen = self.size

    def snapshot(self) -> list[Any]:
        steps = self.steps[-self.size :]
        values = self.values[-self.size :]
        hidden = len(self.steps) - self.seen
        even = len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1
        return [
            [steps[0], len(steps)] if even else steps, even, array("d", values).tobytes(), self.times[-1:], hidden, self.total,
            self.closed, self.first, list(self.ranks.items()),
            [[step, since, time, list(values.items())] for step, (since, time, values) in self.pending.items()],
        ]  # fmt: skip

    def restore(self, state: Sequence[Any]) -> None:
        steps, even, values, times, hidden, self.total, self.closed, self.first, ranks, pending = state
        self.steps = list(range(steps[0], steps[0] + steps[1])) if even else list(steps)
        self.values = array("d", values).tolist()
        self.times = list(times) * len(self.steps)  # only the newest is ever asked for
        self.seen = len(self.steps) - hidden
        self.ranks = dict(ranks)
        self.pending = {step: (since, time, dict(entries)) for step, since, time, entries in pending}


@dataclass(slots=True)
class Window:
    """The recent past of one attempt of one run.

    now: Unix seconds, server clock; at: the step under judgement; firing: rules whose alert is open (for hysteresis);
    step: the last completed step of any rank; bad: non-finite steps by "loss" and "gradient"; ends: how processes
    ended; lost: ranks without contact and for how many seconds; heard: ranks that ever reported; done: those of them
    that ended.
    """

    run: str
    attempt: int = -1
    start_step: int = 0
    world_size: int = 1
    state: str = "running"
    now: float = 0.0
    at: int = 0
    step: int = 0
    firing: set[str] = field(default_factory=set)
    tracks: dict[str, Track] = field(default_factory=dict)
    bad: dict[str, list[Bad]] = field(default_factory=lambda: {"loss": [], "gradient": []})
    fresh: dict[str, list[int]] = field(default_factory=lambda: {"loss": [], "gradient": []})
    ends: list[End] = field(default_factory=list)
    lost: dict[int, float] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    reported: list[dict[str, Any]] = field(default_factory=list)  # findings of the agent that were not judged yet
    # GPU utilization by second: [second, sum over ranks and samples, samples, stepping]
    busy: list[list[float]] = field(default_factory=list)
    # Learning rate: highest so far, where it last rose, and until where the loss is not judged because it changed.
    lr_peak: float = -math.inf
    lr_rise: int | None = None
    quiet_until: int = -1
    first_loss: float | None = None

    def track(self, name: str) -> Track | None:
        """The series, if it has at least one step to see."""
        found = self.tracks.get(name)
        return found if found is not None and found.seen else None

    def value(self, name: str) -> float | None:
        """The newest value of a series."""
        found = self.tracks.get(name)
        return found.value if found is not None else None

    @property
    def loss_name(self) -> str | None:
        """The series that is the loss of this run: `loss`, else what the script calls so. None: it logs no whole
        one."""
        if LOSS in self.tracks:
            return LOSS
        return next((name for name in self.tracks if loss_kind(name) == "whole"), None)

    def active(self, rule: str) -> bool:
        """Whether an alert of that rule is open: its threshold to clear is then lower than the one to fire."""
        return rule in self.firing

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    # --- filling ------------------------------------------------------------------------------------------------------

    def restart(self, attempt: int) -> None:
        """A new attempt of the run began: what the older one left is no history for this one."""
        fresh = Window(self.run, attempt=attempt, world_size=self.world_size, now=self.now)
        for name in Window.__dataclass_fields__:
            setattr(self, name, getattr(fresh, name))

    def take(self, rank: int, groups: Iterable[Group]) -> list[str]:
        """Reads the series that rules need. Gives the names that may have steps to judge, in the order of judging."""
        touched: set[str] = set()
        parts: dict[str, list[_Part]] = {}
        groups = list(groups)
        for known in self.bad.values():
            del known[:-_KEPT_BAD]  # not before they were judged
        self._follow_losses(groups)
        for group in groups:
            rows = group.rows
            if not rows:
                continue
            wanted = [name for name in group.values if name in SIGNALS or name in self.tracks]
            utilization = UTILIZATION in group.values
            if not wanted and not utilization:
                continue
            steps = group.steps()
            times = group.times()
            if wanted and ("step_time_s" not in self.tracks or any(name in SIGNALS for name in wanted)):
                # a script may count its own losses otherwise than the agent counts steps
                self.step = max(self.step, *steps)
            for name in wanted:
                values = group.column(name)
                if name in _GRADIENTS or loss_kind(name):
                    self._note_bad(name, rank, steps, values)
                shown = (SIGNALS[name].of if name in SIGNALS else "") or name
                track = self.tracks.get(shown)
                if track is None:
                    track = self.tracks[shown] = Track(name)
                if track.source == name:
                    parts.setdefault(shown, []).append((steps, values, times))
            if utilization:
                self._note_busy(group.column(UTILIZATION), times)
                touched.add(UTILIZATION)
        for shown, found in parts.items():
            self.tracks[shown].take(rank, *_in_step_order(found), self.now, self.world_size)
        return self.close(touched | parts.keys())

    def _follow_losses(self, groups: Sequence[Group]) -> None:
        """Begins the tracks of training losses by other names than `loss`: not too many, and of parts only where no
        whole is."""
        names = {name for group in groups for name in group.values if loss_kind(name)} - self.tracks.keys() - {LOSS}
        if not names:
            return
        whole = self.loss_name is not None or any(LOSS in group.values for group in groups)
        room = _MAX_NAMED_LOSSES - sum(1 for known in self.tracks if known not in SIGNALS)
        for name in sorted(names, key=lambda name: (loss_kind(name) == "part", name))[: max(0, room)]:
            if loss_kind(name) == "part" and (whole or self.loss_name is not None):
                break
            self.tracks[name] = Track(name)

    def close(self, names: Iterable[str], *, final: bool = False) -> list[str]:
        """Closes what can be closed of these series, and gives those with steps to judge. final: no rank will send any
        more."""
        now = math.inf if final else self.now
        ready = []
        for name in names:
            track = self.tracks.get(name)
            if track is None:
                ready.append(name)
                continue
            track.close(now, self.world_size)
            if track.seen < len(track.steps):
                ready.append(name)
        # The loss last: what surrounds a step (learning rate, scale) is known when the loss is judged.
        return sorted(ready, key=lambda name: (name == "loss", _ORDER.get(name, 99)))

    def waiting(self) -> bool:
        """Whether a step waits for a rank: then time alone can close it."""
        return any(track.pending for track in self.tracks.values())

    def advance(self, name: str) -> bool:
        """Shows the next step of a series to the rules; `at` is then that step."""
        track = self.tracks[name]
        if not track.advance():
            return False
        self.at = track.steps[track.seen - 1]
        if name == "lr":
            self._note_lr(self.at, track.values[track.seen - 1])
        elif name == "loss" and self.first_loss is None and math.isfinite(track.values[track.seen - 1]):
            self.first_loss = track.values[track.seen - 1]
        return True

    def _note_bad(self, name: str, rank: int, steps: Sequence[int], values: Sequence[float]) -> None:
        total = sum(values)
        if name == "grad/nonfinite":
            if total == 0:
                return
            bad = [place for place, value in enumerate(values) if value != 0]
        elif math.isfinite(total):
            return
        else:
            bad = [place for place, value in enumerate(values) if not math.isfinite(value)]
        kind = "gradient" if name in _GRADIENTS else "loss"
        series = [] if kind == "gradient" else [name]
        known = self.bad[kind]
        by_step = {one.step: one for one in known}
        for place in _to_judge(bad):
            step = steps[place]
            value = values[place] if name != "grad/nonfinite" else math.nan
            entry = by_step.get(step)
            if entry is None:
                entry = by_step[step] = Bad(step, self.now, value, [rank], series.copy())
                known.append(entry)
                self.fresh[kind].append(step)
                continue
            if rank not in entry.ranks:
                entry.ranks.append(rank)
                entry.ranks.sort()
                self.fresh[kind].append(step)
            if series and name not in (entry.series or [LOSS]):
                entry.series.append(name)
                entry.value = value if name == LOSS else entry.value
                self.fresh[kind].append(step)
        known.sort(key=lambda one: one.step)

    def bad_at(self, kind: str, step: int) -> Bad | None:
        for entry in reversed(self.bad[kind]):
            if entry.step == step:
                return entry
            if entry.step < step:
                return None
        return None

    def _note_lr(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        track = self.tracks["lr"]
        if value > self.lr_peak * (1 + 1e-6):
            self.lr_rise = step
        self.lr_peak = max(self.lr_peak, value)
        # A warm restart or a changed schedule: the loss rises with reason until its history is from after the change.
        # A rise without a break since the start is the warm-up, which the rules know by lr_rise.
        before = track.values[max(0, track.seen - 17) : max(0, track.seen - 1)]
        if len(before) == 16 and value > 1.25 * min(before) and value - min(before) > 0.02 * self.lr_peak:
            warming_up = all(a < b for a, b in itertools.pairwise(before)) and value >= self.lr_peak
            if not warming_up:
                self.quiet_until = max(self.quiet_until, step + 200)

    def _note_busy(self, values: Sequence[float], times: Sequence[float]) -> None:
        stepped = self.tracks.get("step_time_s")
        for value, time in zip(values, times, strict=True):
            if not (math.isfinite(value) and math.isfinite(time)):
                continue
            stepping = 0.0
            if stepped is not None and stepped.times:
                usual = median(stepped.values[-32:])
                stepping = float(time - stepped.times[-1] <= max(10.0, 3.0 * usual))
            second = float(math.floor(time))
            if self.busy and second <= self.busy[-1][0]:
                place = next((entry for entry in reversed(self.busy) if entry[0] == second), None)
                if place is not None:
                    place[1] += value
                    place[2] += 1
                    place[3] = max(place[3], stepping)
            else:
                self.busy.append([second, value, 1, stepping])
        if len(self.busy) > 2 * _UTILIZATION_KEPT_S:
            del self.busy[:-_UTILIZATION_KEPT_S]

    # --- persistence --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Plain values for MessagePack."""
        return {
            "run": self.run, "attempt": self.attempt, "start_step": self.start_step, "world_size": self.world_size,
            "state": self.state, "now": self.now, "at": self.at, "step": self.step, "firing": sorted(self.firing),
            "tracks": {track.source: track.snapshot() for track in self.tracks.values()},
            "bad": {
                kind: [[one.step, one.time, one.value, one.ranks, one.series] for one in entries]
                for kind, entries in self.bad.items()
            },
            "fresh": self.fresh,
            "ends": [[end.state, end.rank, end.time, end.step, end.reason, end.exception, end.traceback] for end in self.ends],
            "lost": list(self.lost.items()), "heard": sorted(self.heard), "done": sorted(self.done),
            "reported": self.reported, "busy": self.busy[-_UTILIZATION_KEPT_S:],
            "lr_peak": self.lr_peak, "lr_rise": self.lr_rise, "quiet_until": self.quiet_until,
            "first_loss": self.first_loss,
        }  # fmt: skip

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Window:
        tracks: dict[str, Track] = {}
        for name, entry in state["tracks"].items():
            if name in SIGNALS or loss_kind(name):
                track = tracks[(SIGNALS[name].of if name in SIGNALS else "") or name] = Track(name)
                track.restore(entry)
        apart = ("tracks", "bad", "ends", "lost", "heard", "done", "firing")
        rest = {key: value for key, value in state.items() if key not in apart}
        ends = [End(*entry) for entry in state["ends"]]
        done = {end.rank for end in ends}
        told = {rank for track in tracks.values() for rank in track.ranks}
        return cls(
            **rest,
            tracks=tracks,
            firing=set(state["firing"]),
            bad={kind: [Bad(*entry) for entry in entries] for kind, entries in state["bad"].items()},
            ends=ends,
            lost=dict(state["lost"]),
            # An older server did not write these two down.
            heard=set(state.get("heard", told | done)),
            done=set(state.get("done", done)),
        )


def _to_judge(bad: Sequence[int]) -> Sequence[int]:
    """Of the places of bad values in a frame those to judge: a fault begins where an unbroken row of them does, and the
    newest say how it is now. What lies between, in a frame of thousands of them, says no more."""
    if len(bad) <= _MAX_BAD:
        return bad
    beginnings: list[int] = []
    row = 0
    for before, place in itertools.pairwise([-2, *bad]):
        row = row + 1 if place == before + 1 else 1
        if row <= _ROW_BEGIN:
            beginnings.append(place)
    return sorted({*beginnings[:_MAX_BEGINNINGS], *bad[-_MAX_BAD:]})


def _rising(steps: Sequence[int]) -> bool:
    if len(steps) == 1:
        return True
    return all(a < b for a, b in itertools.pairwise(steps))
