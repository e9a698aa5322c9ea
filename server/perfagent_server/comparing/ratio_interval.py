"""How much faster one run is than another, with how much confidence.

Step times are neither independent (a slow step seldom comes alone) nor normal (their tail is long). So medians are
compared, or means where slow steps are to count, and the interval comes from a circular block bootstrap (Politis and Romano
1992): blocks of consecutive steps are drawn, as long as steps depend on each other, so that their dependence stays in the
sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "LEAST_STEPS", "Ratio", "Statistic", "Values", "block_length", "edges", "independent", "is_enough", "ratio_of", "resampled",
]  # fmt: skip

LEAST_STEPS = 50
"""With fewer, nothing is said."""
_LEAST_INDEPENDENT = 20  # effective sample size: steps divided by their autocorrelation time
_RESAMPLES = 1000
_CONFIDENCE = 0.95
_SEED = 7  # the same answer to the same question

Values = npt.NDArray[np.float64]
Statistic = Callable[..., Values]
"""np.median or np.mean."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The statistic of the second series divided by that of the first, and its interval."""

    value: float
    low: float
    high: float


def is_enough(values: Values) -> bool:
    """Whether there are enough steps for an interval. Steps that depend on each other count less."""
    return len(values) >= LEAST_STEPS and independent(values) >= _LEAST_INDEPENDENT


def independent(values: Values) -> int:
    """As how many independent steps these count: their effective sample size."""
    return int(len(values) / _dependence(values)) if len(values) else 0


def ratio_of(
    statistic: Statistic, first: Values, second: Values, base: Values | None = None, confidence: float = _CONFIDENCE
) -> Ratio | None:
    """first, second: finite values in the order of their steps. base: resampled(statistic, first), computed once where many
    runs have the same baseline. None with too few of either, or where a statistic is not above 0."""
    whole = [float(statistic(one)) for one in (first, second)] if len(first) and len(second) else [0.0]
    if not (is_enough(first) and is_enough(second)) or min(whole) <= 0:
        return None
    a = np.maximum(resampled(statistic, first) if base is None else base, np.finfo(float).tiny)
    b = _resampled(statistic, second, np.random.default_rng(_SEED + 1))
    low, high = edges(b / a, confidence)
    value = whole[1] / whole[0]
    return Ratio(value, min(low, value), max(high, value))


def edges(resamples: Values, confidence: float) -> tuple[float, float]:
    """The interval that holds this share of them, from 0 to 1, with as many below as above."""
    low, high = np.quantile(resamples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def resampled(statistic: Statistic, values: Values) -> Values:
    """What the first of a ratio contributes to its interval."""
    return _resampled(statistic, values, np.random.default_rng(_SEED))


def _resampled(statistic: Statistic, values: Values, random: np.random.Generator) -> Values:
    """Of resamples, each of blocks from random places; a block that reaches the end goes on at the beginning."""
    n, length = len(values), block_length(values)
    starts = random.integers(0, n, (_RESAMPLES, math.ceil(n / length)))
    rows = (starts[:, :, None] + np.arange(length)) % n
    return statistic(values[rows.reshape(_RESAMPLES, -1)[:, :n]], axis=1)


def block_length(values: Values) -> int:
    """At least n^(1/3), the order at which the error of a block bootstrap is smallest (Künsch 1989), and three times as
    long as ranks of values depend on each other: their integrated autocorrelation time, with Sokal's window of five such
    times. Ranks, because one outlier would hide the dependence of all the others."""
    n = len(values)
    shortest: int = math.ceil(n ** (1 / 3))
    longest: int = max(1, n // 4)
    return min(max(shortest, math.ceil(3 * _dependence(values))), longest)


def _dependence(values: Values) -> float:
    """The integrated autocorrelation time of the values' ranks: 1 where they are independent."""
    n = len(values)
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - count / 2)[place]  # equal values share theirs
    ranks -= ranks.mean()
    spectrum = np.fft.rfft(ranks, 2 * n)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:n]
    if correlation[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(correlation / correlation[0]) - 1
    settled = np.flatnonzero(np.arange(n) >= 5 * times)
    return max(1.0, float(times[settled[0]] if len(settled) else n))
