"""Estimates how much slower the new run is, with a confidence interval. It does so for three times per step: wall time, wall time
without waiting for a processor, and CPU time. No I/O.

`paired` is for two commands that ran in turn. Each round has four blocks, A B B A, and gives the logarithm of the ratio of
seconds per step. Load that lasts longer than a round slows both sides and cancels out. The estimate is the mean over the rounds,
without the highest and the lowest tenth, because a short burst of load spoils one round. The interval is a circular block
bootstrap.

`apart` is for two runs that were not interleaved. It compares the medians and the means of their step times, as
`perfagent compare` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from perfagent.wire import PHASES
from perfagent_server.backtest.moment import Moment
from perfagent_server.comparing.ratio_interval import Statistic, Values, edges, ratio_of, resampled
from perfagent_server.gate.turns import Block

__all__ = ["LEAST_ROUNDS", "TIMES", "WARM_UP", "Difference", "Grown", "Steps", "apart", "culprit", "grown", "paired"]

TIMES = ("wall", "unqueued", "cpu")
WARM_UP = 10  # steps: compiling, filling caches, growing buffers
LEAST_ROUNDS = 10
_TRIMMED = 0.1
_WORTH = 0.2  # of what a step takes longer: a phase that makes less of it is not named
_LEAST_CPU_S = 0.02  # of a block: the kernel counts in hundredths of a second


@dataclass(frozen=True, slots=True)
class Difference:
    """By which factor the new one takes longer. what: one of TIMES; value: None where it cannot be said; low, high: its
    interval; count: of rounds, or of steps of the shorter run."""

    what: str
    value: float | None = None
    low: float = 0.0
    high: float = math.inf
    count: int = 0


@dataclass(frozen=True, slots=True)
class Grown:
    """A part of the step: mean seconds a step."""

    phase: str
    base_s: float
    new_s: float


@dataclass(slots=True)
class Steps:
    """Of the lowest rank. ends: Unix seconds; seconds: of each; phases: name -> seconds of each, 0 where a step has none."""

    ends: Values
    seconds: Values
    phases: dict[str, Values] = field(default_factory=dict)

    @classmethod
    def of(cls, moments: Iterable[Moment]) -> Steps:
        rows = [one for one in moments if math.isfinite(one.values.get("step_time_s", math.nan))]
        rank = min((one.rank for one in rows), default=0)
        rows = [one for one in rows if one.rank == rank]
        names = [name for name in PHASES if any(f"phase/{name}_s" in one.values for one in rows)]
        phases = {name: np.array([one.values.get(f"phase/{name}_s", 0.0) for one in rows]) for name in names}
        return cls(np.array([one.time for one in rows]), np.array([one.values["step_time_s"] for one in rows]), phases)

    def after_warm_up(self) -> Steps:
        phases = {name: values[WARM_UP:] for name, values in self.phases.items()}
        return Steps(self.ends[WARM_UP:], self.seconds[WARM_UP:], phases)

    def whole(self, blocks: Sequence[Block]) -> Steps:
        """Those in which the command was not stopped."""
        begins, ends = np.array([one.begin for one in blocks]), np.array([one.end for one in blocks])
        place = np.searchsorted(begins, self.ends, side="right") - 1
        started = self.ends - self.seconds
        kept = (place >= 0) & (started >= begins[place]) & (self.ends <= ends[place])
        return Steps(self.ends[kept], self.seconds[kept], {name: one[kept] for name, one in self.phases.items()})


def paired(
    base: tuple[Sequence[Block], Steps], new: tuple[Sequence[Block], Steps], pairs: int, confidence: float
) -> list[Difference]:
    """In the order of TIMES. base, new: the blocks, of which the first `pairs` lie beside each other, and all steps."""
    its = [_a_step(blocks[:pairs], steps) for blocks, steps in (base, new)]
    found = []
    for what, first, second in zip(TIMES, *its, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.log(second / first)
        # The first block after a pause is slower (cold caches): in A B B A each command has one such block.
        rounds = ratios[: len(ratios) // 2 * 2].reshape(-1, 2).mean(axis=1)
        found.append(_difference(what, rounds[np.isfinite(rounds)], confidence))
    return found


def _difference(what: str, ratios: Values, confidence: float) -> Difference:
    if len(ratios) < LEAST_ROUNDS:
        return Difference(what, count=len(ratios))
    value, wider = float(_trimmed(ratios)), _widening(len(ratios), confidence)
    low, high = (value + wider * (edge - value) for edge in edges(resampled(_trimmed, ratios), confidence))
    return Difference(what, math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)), len(ratios))


def _widening(count: int, confidence: float) -> float:
    """By how much the interval that resamples of so few values give is too narrow: Student's quantile to the normal one (first
    term of Cornish and Fisher's expansion), and the variance of a sample to that of its resamples."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return (1 + (z * z + 1) / (4 * (count - 1))) * math.sqrt(count / (count - 1))


def _a_step(blocks: Sequence[Block], steps: Steps) -> tuple[Values, Values, Values]:
    """Seconds a step of each block, in the order of TIMES; NaN before the warm-up is over, and where too little was done. Parts
    of steps count: their number grows evenly while a step lasts."""
    begins, ends = np.array([one.begin for one in blocks]), np.array([one.end for one in blocks])
    before = np.concatenate(([0.0], np.cumsum(ends - begins)))
    trained = _training_s(begins, ends, before, steps.ends)
    at = np.interp(before, trained, np.arange(len(trained), dtype=float)) if len(trained) else np.zeros(len(before))
    done = np.diff(at)
    done[(at[:-1] < WARM_UP) | (done <= 0)] = np.nan
    # A block that reaches beyond the last step has idle time at its end.
    done[before[1:] > (trained[-1] if len(trained) else 0.0)] = np.nan
    wall_s, queued_s, cpu_s = (
        ends - begins,
        np.array([one.queued_s for one in blocks]),
        np.array([one.cpu_s for one in blocks]),
    )
    return wall_s / done, (wall_s - queued_s) / done, np.where(cpu_s < _LEAST_CPU_S, np.nan, cpu_s) / done


def _training_s(begins: Values, ends: Values, before: Values, moments: Values) -> Values:
    """How long the command had trained by these moments: pauses count for nothing."""
    place = np.clip(np.searchsorted(begins, moments, side="right") - 1, 0, None)
    return before[place] + np.clip(np.minimum(moments, ends[place]) - begins[place], 0, None)


def _trimmed(values: Values, axis: int = -1) -> Values:
    """The mean without the tenth at either end."""
    ordered = np.sort(values, axis=axis)
    cut = int(values.shape[axis] * _TRIMMED)
    return np.asarray(ordered[..., cut : values.shape[axis] - cut].mean(axis=axis))


def apart(base: Steps, new: Steps, confidence: float) -> list[Difference]:
    """Of the median and of the mean step time: some slow steps raise a mean that no median sees. The one that says more."""
    first, second = base.after_warm_up().seconds, new.after_warm_up().seconds
    count = min(len(first), len(second))
    statistics: tuple[Statistic, ...] = (np.median, np.mean)
    found = [ratio_of(statistic, first, second, confidence=confidence) for statistic in statistics]
    said = [Difference("wall", one.value, one.low, one.high, count) for one in found if one is not None]
    return [max(said, key=lambda one: one.low, default=Difference("wall", count=count))]


def grown(base: Steps, new: Steps) -> list[Grown]:
    """The phases, the one that takes longer by most first."""
    both = [one.after_warm_up() for one in (base, new)]
    if not all(len(one.seconds) for one in both):
        return []
    names = dict.fromkeys(name for one in both for name in one.phases)
    means = {name: [float(one.phases[name].mean()) if name in one.phases else 0.0 for one in both] for name in names}
    found = [Grown(name, *its) for name, its in means.items()]
    return sorted(found, key=lambda one: one.base_s - one.new_s)


def culprit(phases: Sequence[Grown]) -> str:
    """The phase that makes a slower step slower, "" where none stands out."""
    longer = sum(one.new_s - one.base_s for one in phases)
    first = phases[0] if phases else None
    return first.phase if first and longer > 0 and first.new_s - first.base_s >= _WORTH * longer else ""
