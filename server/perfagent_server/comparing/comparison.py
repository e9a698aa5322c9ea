"""Compares runs with a baseline, the first of them: speed with a confidence interval, loss, memory, settings and alerts. It
also says whether a predicted gain came true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from perfagent.wire import PHASES, Finding, RunSummary, Series, outcome_of
from perfagent.wire.loss_names import loss_of
from perfagent_server.comparing.differences import Differences, differences_of
from perfagent_server.comparing.ratio_interval import Statistic, independent, is_enough, ratio_of, resampled
from perfagent_server.comparing.windows import Window
from perfagent_server.store.interface import MetricStore

__all__ = ["Asked", "Comparison", "compare"]

_WARM_UP = 10  # steps: compiling, filling caches, growing buffers
_POINTS = 4000  # the newest steps, each by itself: what speed is said of
_TELLING = 0.01  # a smaller difference of speed changes nobody's mind
_RATES = ("tokens_per_s", "samples_per_s")
_MEMORY = ("gpu/memory_used_bytes", "cuda/allocated_bytes", "process/rss_bytes")
_BATCH = frozenset({"batch_size", "micro_batch_size", "train_batch_size", "per_device_train_batch_size", "bs", "batch"})
_LOSS_SHARE = 0.02  # of the losses up to the common last step: their median is the loss there


@dataclass(slots=True)
class Side:
    """One run in its window. begin, end: first and last step that count; warm_up: how many steps before them were left
    out. steps: how many timed ones there are; too_short: for an interval. loss_at: around the last step that all runs have;
    peaks: bytes. only: open or former alerts (rules) that no other run has."""

    run: str
    name: str
    project: str
    state: str
    severity: str
    title: str
    rule: str
    begin: int | None
    end: int | None
    warm_up: int
    steps: int
    too_short: bool
    loss: str | None
    loss_at: float | None
    loss_best: float | None
    loss_best_step: int | None
    peaks: dict[str, float]
    only: list[str]


@dataclass(slots=True)
class Measure:
    """A quantity of speed. values: one a run: the median, of `mean_step` the mean; for a phase the mean seconds a step.
    ratio, low, high: to the first run, with the 95 % interval; null for the first and where it cannot be said. word: first,
    faster, slower, same, too_short or unknown. shares: of the step time, for phases. steps: how many have it after the
    warm-up; independent: as how many independent ones they count."""

    name: str
    values: list[float | None]
    shares: list[float | None]
    ratio: list[float | None]
    low: list[float | None]
    high: list[float | None]
    word: list[str]
    steps: list[int] = field(default_factory=list)
    independent: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Gain:
    """What the first run's finding promised, and what the other run shows without it. predicted_pct: of the step time;
    measured_pct: by how much the median step is shorter."""

    rule: str
    title: str
    run: str
    predicted_pct: float
    measured_pct: float
    low_pct: float
    high_pct: float


@dataclass(slots=True)
class Comparison:
    """mean_step: compares the mean step times. Slow steps raise a mean, not a median. Null if no run has step times.
    common_step: the last step that all runs have. not_alike: settings whose difference makes speed or loss hard to compare
    (`world_size`, `batch_size`, `model`)."""

    sides: list[Side]
    speed: list[Measure]
    mean_step: Measure | None
    differences: Differences
    common_step: int | None
    not_alike: list[str]
    gains: list[Gain] = field(default_factory=list)


@dataclass(slots=True)
class Asked:
    """A run that is compared: what is known of it beside its samples."""

    window: Window
    summary: RunSummary
    verdict: Finding
    findings: Sequence[Finding]
    rules: frozenset[str]  # of its alerts, open and former ones


@dataclass(slots=True)
class _Read:
    """One run's samples in its window. loss: the name of its series."""

    loss: str | None
    step_time: npt.NDArray[np.float64]
    rates: dict[str, npt.NDArray[np.float64]]
    phases: dict[str, float]  # mean seconds a step
    begin: int | None
    end: int | None
    warm_up: int


def compare(store: MetricStore, asked: Sequence[Asked]) -> Comparison:
    """asked: 2 to 20, the first is what the others are compared with."""
    read = [_read(store, one) for one in asked]
    common = min((one.end for one in read if one.end is not None), default=None)
    sides = [
        _side(store, one, its, common, [other.rules for other in asked if other is not one])
        for one, its in zip(asked, read, strict=True)
    ]
    different = differences_of([(one.summary.config, one.summary.meta) for one in asked])
    speed, mean_step = _speed(read), _step_time(read, np.mean)
    return Comparison(sides, speed, mean_step, different, common, _not_alike(asked, different), _gains(asked, speed))


def _read(store: MetricStore, asked: Asked) -> _Read:
    run, window = asked.summary.run, asked.window
    loss = loss_of(store.names(run))
    counted = (name for name in ("step_time_s", *_RATES, loss) if name is not None)
    whole = next((found for name in counted if (found := _series(store, run, name, window)) is not None), None)
    if whole is None:
        return _Read(loss, np.empty(0), {}, {}, None, None, 0)
    is_long = whole.bucket_steps > 1
    warm_up = _WARM_UP if window.begin is None and len(whole.step) > 4 * _WARM_UP and not is_long else 0
    last = whole.step[-1] + whole.bucket_steps - 1
    if window.end is not None:
        last = min(last, window.end)
    inside = Window(run, max(whole.step[0], last - _POINTS + 1) if is_long else whole.step[warm_up], window.end)
    step_time = _series(store, run, "step_time_s", inside)
    rates = {name: _finite(found) for name in _RATES if (found := _series(store, run, name, inside)) is not None}
    return _Read(loss, _finite(step_time), rates, _phases(store, run, inside, step_time), inside.begin, last, warm_up)


def _series(store: MetricStore, run: str, name: str, window: Window) -> Series | None:
    found = store.series(run, name, from_step=window.begin, to_step=window.end, points=_POINTS)
    return found if found.step else None


def _finite(found: Series | None) -> npt.NDArray[np.float64]:
    values = np.asarray(found.mean if found is not None else [], np.float64)
    return values[np.isfinite(values)]


def _phases(store: MetricStore, run: str, window: Window, step_time: Series | None) -> dict[str, float]:
    """Mean seconds a step. A step without a phase spent no time in it."""
    steps = sum(step_time.count) / max(step_time.ranks, 1) if step_time is not None else 0
    found = {}
    for phase in PHASES if steps else ():
        its = _series(store, run, f"phase/{phase}_s", window)
        if its is None:
            continue
        seconds = np.nansum(np.asarray(its.mean) * np.asarray(its.count)) / max(its.ranks, 1)
        found[phase] = float(seconds / steps)
    return found


# ---- one run


def _side(store: MetricStore, asked: Asked, read: _Read, common: int | None, others: Sequence[frozenset[str]]) -> Side:
    run, verdict = asked.summary.run, asked.verdict
    at, best, best_step = _loss(store, asked, read, common)
    peaks = {}
    for name in _MEMORY:
        found = store.series(run, name, from_step=read.begin, to_step=read.end, points=1)
        if found.max and math.isfinite(found.max[0]):
            peaks[name] = max(found.max)
    timed = max([read.step_time, *read.rates.values()], key=len)
    return Side(
        run=run, name=_named(asked), project=asked.summary.project, state=asked.summary.state,
        severity=outcome_of(verdict, asked.summary.state), title=verdict.title or verdict.message,
        rule=verdict.rule, begin=read.begin, end=read.end, warm_up=read.warm_up, steps=len(timed), too_short=not is_enough(timed),
        loss=read.loss, loss_at=at, loss_best=best, loss_best_step=best_step, peaks=peaks,
        only=sorted(asked.rules.difference(*others)),
    )  # fmt: skip


def _named(asked: Asked) -> str:
    """With its window, for two windows of one run have one name."""
    name, window = asked.summary.name or asked.summary.run, asked.window
    if window.begin is None and window.end is None:
        return name
    return f"{name}:{'' if window.begin is None else window.begin}-{'' if window.end is None else window.end}"


def _loss(
    store: MetricStore, asked: Asked, read: _Read, common: int | None
) -> tuple[float | None, float | None, int | None]:
    """The loss around the common last step, and the lowest one with its step. The warm-up counts: it learns, too."""
    found = None if read.loss is None else _series(store, asked.summary.run, read.loss, asked.window)
    if found is None or common is None:
        return None, None, None
    values, steps = np.asarray(found.mean, np.float64), np.asarray(found.step)
    before = values[(steps <= common) & np.isfinite(values)]
    near = before[-max(1, int(len(before) * _LOSS_SHARE)) :]
    lowest = np.asarray(found.min if found.ranks == 1 else found.mean, np.float64)
    if not np.isfinite(lowest).any():
        return None, None, None
    best = int(np.nanargmin(np.where(np.isfinite(lowest), lowest, np.nan)))
    return (float(np.median(near)) if len(near) else None), float(lowest[best]), int(steps[best])


# ---- speed


def _speed(read: Sequence[_Read]) -> list[Measure]:
    rates = [name for name in _RATES if any(name in one.rates for one in read)]
    columns = {name: [one.rates.get(name, np.empty(0)) for one in read] for name in rates}
    measures = [_compared(name, its, np.median, more_is_better=True) for name, its in columns.items()]
    if (step_time := _step_time(read, np.median)) is not None:
        measures.append(step_time)
    means = [float(one.step_time.mean()) if len(one.step_time) else 0.0 for one in read]
    for phase in PHASES:
        if not any(phase in one.phases for one in read):
            continue
        values = [one.phases.get(phase, 0.0 if one.phases else None) for one in read]
        shares = [
            None if value is None or not mean else value / mean for value, mean in zip(values, means, strict=True)
        ]
        nothing: list[float | None] = [None] * len(read)
        measures.append(
            Measure(f"phase/{phase}_s", values, shares, [*nothing], [*nothing], [*nothing], [""] * len(read))
        )
    return measures


def _step_time(read: Sequence[_Read], statistic: Statistic) -> Measure | None:
    columns = [one.step_time for one in read]
    return _compared("step_time_s", columns, statistic, more_is_better=False) if any(map(len, columns)) else None


def _compared(
    name: str, columns: Sequence[npt.NDArray[np.float64]], statistic: Statistic, *, more_is_better: bool
) -> Measure:
    values = [float(statistic(one)) if len(one) else None for one in columns]
    made = Measure(name, values, [None] * len(columns), [], [], [], [])
    made.steps, made.independent = [len(one) for one in columns], [independent(one) for one in columns]
    base = resampled(statistic, columns[0]) if len(columns[0]) else None
    for place, column in enumerate(columns):
        found = ratio_of(statistic, columns[0], column, base) if place else None
        made.ratio.append(found.value if found else None)
        made.low.append(found.low if found else None)
        made.high.append(found.high if found else None)
        if not place:
            made.word.append("first")
        elif found is None:
            is_short = len(column) and len(columns[0]) and not (is_enough(columns[0]) and is_enough(column))
            made.word.append("too_short" if is_short else "unknown")
        elif found.low <= 1 <= found.high or abs(found.value - 1) < _TELLING:
            made.word.append("same")
        else:
            made.word.append("faster" if (found.value > 1) is more_is_better else "slower")
    return made


# ---- what else is to be known


def _not_alike(asked: Sequence[Asked], different: Differences) -> list[str]:
    found = []
    if len({one.summary.world_size for one in asked}) > 1:
        found.append("world_size")
    names = [one.name for one in different.different if one.group in ("yours", "found")]
    if any(name.rsplit(".", 1)[-1] in _BATCH for name in names):
        found.append("batch_size")
    if any(name == "model" or name.startswith("model.") for name in names):
        found.append("model")
    return found


def _gains(asked: Sequence[Asked], speed: Sequence[Measure]) -> list[Gain]:
    """For every finding of the first run that named a gain and that another run no longer has."""
    measure = next((one for one in speed if one.name == "step_time_s"), None)
    if measure is None:
        return []
    gains = []
    for finding in asked[0].findings:
        if not finding.gain_pct or not math.isfinite(finding.gain_pct):
            continue
        for place, other in enumerate(asked[1:], 1):
            ratio, low, high = measure.ratio[place], measure.low[place], measure.high[place]
            if ratio is None or low is None or high is None or any(one.rule == finding.rule for one in other.findings):
                continue
            percent = [100 * (1 - one) for one in (ratio, high, low)]
            gains.append(Gain(finding.rule, finding.title, other.summary.run, finding.gain_pct, *percent))
    return gains
