"""The geometry of a line chart in SVG: a series goes in, coordinates and labels come out. Pure; the template draws it.

Minimum and maximum of every bucket are drawn, so that a spike of one step is seen however long the run is. The axis is
logarithmic where the caller allows it and the values span decades."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perfagent.wire import Series
from perfagent.wire.quantities import scaled_unit

__all__ = ["HEIGHT", "WIDTH", "AlertMark", "Drawing", "Label", "draw", "last_step"]

WIDTH, HEIGHT = 420.0, 160.0


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float


BOX = Box(46.0, 14.0, WIDTH - 12.0, HEIGHT - 22.0)
_DECADES = 2.0
"""The values of a logarithmic axis span at least so many."""
_LARGEST = 1e300
"""What is beyond is drawn there: differences of larger numbers are infinite."""
_PREFIXES = (("T", 1e12, 1e12), ("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3), ("", 0.0, 1.0))
"""Of a number on an axis: from which size on, and by what it is divided."""


class Label(NamedTuple):
    """at: x or y, by the axis."""

    at: float
    text: str


class AlertMark(NamedTuple):
    """An alert on a chart. number: as in the list of alerts; 0 for what somebody wrote at a step."""

    step: int
    number: int
    severity: str
    text: str


class DrawnMark(NamedTuple):
    x: float
    alert: AlertMark


@dataclass(slots=True)
class Drawing:
    """line, band, dots, nonfinite: data of a path each: the mean, the area from minimum to maximum, values with no
    neighbour, and where values are NaN or Inf."""

    unit: str
    is_log: bool = False
    line: str = ""
    band: str = ""
    dots: str = ""
    nonfinite: str = ""
    marks: list[DrawnMark] = field(default_factory=list)
    x_labels: list[Label] = field(default_factory=list)
    y_labels: list[Label] = field(default_factory=list)
    box: Box = BOX


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    is_log: bool
    pixels: tuple[float, float]

    def at(self, value: float) -> float:
        low, high, where = self.low, self.high, value
        if self.is_log:
            low, high, where = math.log10(low), math.log10(high), math.log10(value)
        begin, end = self.pixels
        return round(begin + (where - low) / (high - low) * (end - begin), 1)


def draw(
    series: Series,
    marks: Sequence[AlertMark] = (),
    *,
    steps: tuple[int, int] | None = None,
    may_be_log: bool = False,
    from_zero: bool = False,
) -> Drawing:
    """steps: the first and the last of the axis, where charts share one. from_zero: the axis of the values begins at 0, as
    that of a duration or a size should."""
    values = [_clipped(value) for each in (series.min, series.max) for value in each if math.isfinite(value)]
    divisor, unit = scaled_unit(series.name, max(map(abs, values), default=0.0))
    drawing = Drawing(unit)
    if not series.step:
        return drawing
    first, last = steps or (series.step[0], last_step(series))
    across = _Axis(min(first, series.step[0]), max(last, last_step(series), first + 1), False, (BOX.left, BOX.right))
    up = _value_axis([value / divisor for value in values], may_be_log=may_be_log, from_zero=from_zero)
    drawing.is_log = up.is_log
    drawing.x_labels = [
        Label(across.at(tick), _number(tick)) for tick in _linear_ticks(across.low, across.high, 5, whole=True)
    ]
    drawing.y_labels = [Label(up.at(tick), _number(tick)) for tick in _ticks(up)]
    for stretch in _stretches(series):
        low, mean, high = (
            [(across.at(series.step[i]), up.at(_clipped(column[i]) / divisor)) for i in stretch]
            for column in (series.min, series.mean, series.max)
        )
        if len(stretch) == 1:
            drawing.dots += "".join(f"M{x:g},{y:g}h0" for x, y in dict.fromkeys((low[0], mean[0], high[0])))
            continue
        drawing.line += _path(mean)
        if not series.exact:
            drawing.band += _path([*high, *reversed(low)]) + "Z"
    drawing.nonfinite = "".join(f"M{x:g},{BOX.bottom - 3:g}h{width:g}" for x, width in _spans(series, across))
    drawing.marks = [DrawnMark(across.at(mark.step), mark) for mark in marks if across.low <= mark.step <= across.high]
    return drawing


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def last_step(series: Series) -> int:
    return series.step[-1] + series.bucket_steps - 1


def _clipped(value: float) -> float:
    return max(-_LARGEST, min(_LARGEST, value))


def _value_axis(values: list[float], *, may_be_log: bool, from_zero: bool) -> _Axis:
    pixels = (BOX.bottom, BOX.top)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if may_be_log and low > 0 and math.log10(high) - math.log10(low) >= _DECADES:
        return _Axis(low / 1.2, high * 1.2, True, pixels)
    if from_zero and low >= 0:
        return _Axis(0.0, high * 1.06 or 1.0, False, pixels)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Axis(low - pad, high + pad, False, pixels)


def _stretches(series: Series) -> list[list[int]]:
    """Indices of buckets with finite values, side by side. A bucket that is missing does not part them: what is logged now
    and then is one line."""
    found: list[list[int]] = [[]]
    for index, (low, mean, high) in enumerate(zip(series.min, series.mean, series.max, strict=True)):
        if math.isfinite(low) and math.isfinite(mean) and math.isfinite(high):
            found[-1].append(index)
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _spans(series: Series, across: _Axis) -> list[tuple[float, float]]:
    """Where buckets with NaN or Inf begin, and how wide they are, those beside each other together; wide enough to be seen."""
    spans: list[tuple[float, float]] = []
    previous = False
    for step, bad in zip(series.step, series.nonfinite, strict=True):
        if bad:
            begin, end = across.at(step), across.at(min(step + series.bucket_steps, across.high))
            if previous:
                begin = spans.pop()[0]
            spans.append((begin, max(2.0, round(end - begin, 1))))
        previous = bool(bad)
    return spans


def _ticks(axis: _Axis) -> list[float]:
    if not axis.is_log:
        return _linear_ticks(axis.low, axis.high, 4)
    first, last = math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high))
    every = max(1, (last - first) // 5 + 1)
    return [10.0**power for power in range(first, last + 1, every)]


def _linear_ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}"
    prefix, divisor = next((prefix, divisor) for prefix, from_, divisor in _PREFIXES if size >= from_)
    return f"{value / divisor:.4g}{prefix}"
