"""Computes step time, throughput and phase shares of a run. Tiles, `perfagent show`, the fleet and a healthy verdict all
show these figures.

The window is the newest WINDOW_STEPS steps of a run that goes on, and the whole run once it has ended. Those steps
count that were timed as a whole: a process's first step has phases, but began before there was anything to time it from.
Ranks are put together step by step as the catalogue says, before percentiles are taken. Percentiles are interpolated
between the two nearest values (type 7 of Hyndman and Fan 1996, numpy's default).

Figures are exact when each step is read by itself (`window.bucket_steps` is 1): for the newest steps, and for whole
runs of up to WHOLE_POINTS steps. A longer run is read in buckets of several steps:

- With one rank, means and shares stay exact, except that the first step of each process is included.
- Percentiles, the median among them, are percentiles of the buckets' means. They lie nearer to the mean than those of
  single steps.
- With several ranks, the step time of a bucket is the mean of the rank that was slowest over the whole bucket. The true
  mean of the slowest rank of each step may be higher.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import select

from perfagent.wire import TIMED_PHASES, Quantiles, Series, StepWindow, Timing
from perfagent_server.database import Database
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.statements import among
from perfagent_server.store.tables import run as runs

__all__ = ["WHOLE_POINTS", "WINDOW_STEPS", "Figures", "quantile", "timing_of"]

WINDOW_STEPS = 100
"""Of a run that goes on."""
WHOLE_POINTS = 8192
"""Of a whole run."""
RATES = ("tokens_per_s", "samples_per_s", "flops_per_s", "mfu")
_PHASES = {phase: f"phase/{phase}_s" for phase in TIMED_PHASES}
_NAMES = ("step_time_s", *_PHASES.values(), *RATES)
_SHARES = {
    "data": ("data",),
    "transfer": ("h2d",),
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("comm",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("eval",),
    "compiling": ("compile",),
    "rollout": ("rollout",),
    "other": ("other",),
}
"""Share of the step time -> phases that make it up; a step without a phase spent no time in it."""
_FRESH_S = 1.0
_KEPT_RUNS = 1000
_TURNS = 16


class Figures:
    """The figures of any run. What was computed is kept until the run sends more: figures of runs that rest cost a look
    at the run's row. Those of a run that goes on are computed once a second at most, so that a page, which asks for
    tiles and verdict one after the other, gets the same numbers in both."""

    def __init__(self, database: Database, store: MetricStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._store, self._clock = database, store, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()  # of _kept; runs are computed outside of it
        self._turns = [threading.Lock() for _ in range(_TURNS)]  # a run is computed by one of those who ask for it

    def of(self, run: str) -> Timing:
        """Of one run, in its window; empty where no step was timed."""
        return self.of_runs([run]).get(run) or timing_of({}, whole_run=False)

    def of_runs(self, wanted: Sequence[str]) -> dict[str, Timing]:
        """Of those of these runs that exist."""
        columns = (runs.c.id, runs.c.attempt, runs.c.ended, runs.c.updated)
        with self._database.read() as connection:
            rows = connection.execute(select(*columns).where(among(connection, runs.c.id, wanted))).all()
        return {row.id: self._current(row.id, (row.attempt, row.ended), row.updated) for row in rows}

    def newest(self, run: str, steps: int) -> Timing:
        """Of the newest `steps` steps, for who asks for another window than everybody sees."""
        return timing_of(self._read(run, steps, points=steps), whole_run=False)

    def _current(self, run: str, life: tuple[int, float | None], updated: float) -> Timing:
        with self._turns[hash(run) % _TURNS]:
            with self._lock:
                kept = self._kept.get(run)
            now, has_ended = self._clock(), life[1] is not None
            if kept is not None and kept.life == life:
                is_fresh = not has_ended and now - kept.computed < _FRESH_S
                if is_fresh or kept.updated == updated:
                    return kept.timing
            found = timing_of(self._read(run, None if has_ended else WINDOW_STEPS), whole_run=has_ended)
            with self._lock:
                self._kept[run] = _Kept(life, updated, now, found)
                self._kept.move_to_end(run)
                while len(self._kept) > _KEPT_RUNS:
                    self._kept.popitem(last=False)
            return found

    def _read(self, run: str, steps: int | None, *, points: int = WHOLE_POINTS) -> dict[str, Series]:
        found = self._store.newest(run, _NAMES, steps=steps, points=points)
        for rate in RATES[:2]:  # of a script without an agent, which times no steps
            found = found or self._store.newest(run, (rate, *RATES), steps=steps, points=points)
        return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """life: attempt and end of the run; updated: when it was heard last, by the server's clock; computed: by ours."""

    life: tuple[int, float | None]
    updated: float
    computed: float
    timing: Timing


@dataclass(frozen=True, slots=True)
class _Values:
    """The finite values of one series, by step, and for how many steps each stands."""

    step: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    weight: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.step)

    @property
    def total(self) -> float:
        return float((self.value * self.weight).sum())

    def take(self, rows: npt.NDArray[np.bool_]) -> _Values:
        return _Values(self.step[rows], self.value[rows], self.weight[rows])

    def quantiles(self) -> Quantiles:
        order = np.argsort(self.value, kind="stable")
        values, ends = self.value[order], np.cumsum(self.weight[order])
        p50, p90, p99 = (quantile(values, share, ends) for share in (0.5, 0.9, 0.99))
        return Quantiles(p50=p50, p90=p90, p99=p99, mean=self.total / int(ends[-1]), count=int(ends[-1]))


def timing_of(series: Mapping[str, Series], *, whole_run: bool) -> Timing:
    """The figures of what was read of one window."""
    values = {name: found for name, one in series.items() if len(found := _values(one))}
    timed = next((values[name] for name in ("step_time_s", *RATES) if name in values), None)
    if timed is None:
        return Timing(from_step=0, to_step=0, series={}, shares={})
    bucket_steps = max(int(timed.weight.max()), *(one.bucket_steps for one in series.values()))
    first, last = int(timed.step[0]), int(timed.step[-1] + timed.weight[-1]) - 1
    inside = (lambda steps: np.isin(steps, timed.step)) if bucket_steps == 1 else (lambda steps: steps >= first)
    values = {name: found for name, one in values.items() if len(found := one.take(inside(one.step)))}
    phases = {phase: values[name] for phase, name in _PHASES.items() if name in values}
    spent = _shares(values["step_time_s"], phases) if "step_time_s" in values else {}
    return Timing(
        from_step=first,
        to_step=last,
        series={name: values[name].quantiles() for name in ("step_time_s", *_PHASES.values()) if name in values},
        shares={
            share: sum(spent.get(part, 0.0) for part in parts)
            for share, parts in _SHARES.items()
            if any(part in spent for part in parts)
        },
        window=StepWindow(
            from_step=first, to_step=last, steps=last - first + 1, whole_run=whole_run, bucket_steps=bucket_steps
        ),
        rates={name: values[name].quantiles() for name in RATES if name in values},
        phase_shares=spent,
    )


def _values(series: Series) -> _Values:
    """A bucket stands for as many steps as each of its ranks has told of it."""
    told = np.array(series.count, np.int64) - np.array(series.nonfinite, np.int64)
    weight = np.maximum(1, np.rint(told / series.ranks).astype(np.int64))
    found = _Values(np.array(series.step, np.int64), np.array(series.mean, np.float64), weight)
    return found.take(np.isfinite(found.value))


def _shares(whole: _Values, phases: Mapping[str, _Values]) -> dict[str, float]:
    """Phase -> its share of all the time. What was evaluated or saved after the last step stands under that step's
    number, and is not in its step time."""
    spent = np.zeros(len(whole))
    for phase in phases.values():
        at = np.clip(np.searchsorted(whole.step, phase.step, side="right") - 1, 0, None)
        np.add.at(spent, at, phase.value * phase.weight)
    total = float(np.maximum(whole.value * whole.weight, spent).sum())
    return {name: phase.total / total for name, phase in phases.items()} if total > 0 else {}


def quantile(ordered: Sequence[float] | npt.NDArray[np.float64], share: float, ends: Any = None) -> float:
    """The value below which that share of the ordered values lies. ends: up to which place, counted from 1, each value
    stands; without them one place each."""
    ends = np.arange(1, len(ordered) + 1) if ends is None else ends
    last = int(ends[-1]) - 1
    place = share * last
    below = math.floor(place)
    low, high = (float(ordered[int(np.searchsorted(ends, at, side="right"))]) for at in (below, min(below + 1, last)))
    return low + (place - below) * (high - low)
