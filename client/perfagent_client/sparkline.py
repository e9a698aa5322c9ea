"""A curve of one line of text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfagent.wire import Series

__all__ = ["curve_of", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"


def curve_of(series: Series) -> list[float]:
    """Means; NaN where one of the values is not finite."""
    return [float("nan") if bad else mean for mean, bad in zip(series.mean, series.nonfinite, strict=True)]


def sparkline(values: Sequence[float], width: int | None = None) -> str:
    """A block a value; a cross where it is not finite. width: the newest so many."""
    shown = list(values) if width is None else list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high - low
    if not math.isfinite(span):  # of numbers so large that their difference is none
        shown = [value / 4 for value in shown]
        low, span = low / 4, high / 4 - low / 4
    last = len(_BARS) - 1
    return "".join(
        _BARS[round((value - low) / span * last) if span else 0] if math.isfinite(value) else NOT_FINITE
        for value in shown
    )
