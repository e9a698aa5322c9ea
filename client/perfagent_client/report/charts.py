"""Which charts a report has, in their order, and what stands below each. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfagent.wire import LOGGED, Alert, Latest, Series, is_evaluation_loss, loss_kind, metric
from perfagent.wire.quantities import figure, some
from perfagent_client.report.line_chart import AlertMark, Drawing, draw, last_step

__all__ = ["POINTS", "Chart", "charts_of", "names_of_charts"]

POINTS = 360
"""Buckets of a chart: one for each unit of its width."""
_MOST_LOSSES, _MOST_LOGGED, _MOST_MARKS = 4, 12, 20
_MARK_CHARACTERS = 90
_AFTER_THE_LOSS: tuple[tuple[str, ...], ...] = (
    ("grad/norm",), ("lr",), ("tokens_per_s", "samples_per_s"), ("step_time_s",), ("phase/data_s",),
    ("gpu/memory_used_bytes", "cuda/allocated_bytes"), ("process/rss_bytes",), ("gpu/utilization_pct",), ("gpu/power_w",),
    ("mfu",), ("host/cpu_pct",), ("host/memory_used_bytes",), ("update/ratio",), ("phase/comm_s",),
)  # fmt: skip
"""Of each, the first that the run has."""


@dataclass(slots=True)
class Chart:
    """title: as the catalogue has it; words: newest, lowest and highest value, and how many are not finite."""

    name: str
    title: str
    words: str
    drawing: Drawing


def names_of_charts(names: Collection[str]) -> list[str]:
    """Of the names that a run has, those that its report draws."""
    losses = [name for name in names if loss_kind(name) or is_evaluation_loss(name)]
    losses.sort(key=lambda name: (loss_kind(name) != "whole", loss_kind(name) == "", len(name), name))
    chosen = losses[:_MOST_LOSSES]
    for choices in _AFTER_THE_LOSS:
        chosen += [name for name in choices if name in names][:1]
    logged = (name for name in sorted(names) if _is_logged(name) and name not in chosen)
    return chosen + [name for _, name in zip(range(_MOST_LOGGED), logged, strict=False)]


def _alert_marks(alerts: Sequence[Alert]) -> list[AlertMark]:
    """Of the newest alerts; numbers count them from 1, as the list of alerts does."""
    numbered = [(number, alert) for number, alert in enumerate(alerts, 1) if alert.since_step is not None]
    return [
        AlertMark(alert.since_step or 0, number, alert.severity, (alert.title or alert.message)[:_MARK_CHARACTERS])
        for number, alert in numbered[:_MOST_MARKS]
    ]


def charts_of(
    all_series: Sequence[Series], latest: Mapping[str, Latest], alerts: Sequence[Alert],
    annotations: Sequence[Mapping[str, Any]] = (),
) -> list[Chart]:  # fmt: skip
    """All over the same steps, so that an alert stands at the same place in each."""
    if not all_series:
        return []
    steps = min(series.step[0] for series in all_series), max(last_step(series) for series in all_series)
    marks = _alert_marks(alerts)
    marks += [AlertMark(one["step"], 0, "note", one["text"][:_MARK_CHARACTERS]) for one in annotations]
    return [_chart(series, latest, marks, steps) for series in all_series]


def _chart(series: Series, latest: Mapping[str, Latest], marks: Sequence[AlertMark], steps: tuple[int, int]) -> Chart:
    name = series.name
    is_loss = bool(loss_kind(name)) or is_evaluation_loss(name)
    drawing = draw(
        series,
        marks,
        steps=steps,
        may_be_log=is_loss or name == "grad/norm" or _is_logged(name),
        from_zero=bool(metric(name).unit),
    )
    return Chart(name, metric(name).title, _in_words(series, latest), drawing)


def _in_words(series: Series, latest: Mapping[str, Latest]) -> str:
    parts = []
    if series.name in latest:
        parts.append(f"newest {figure(series.name, latest[series.name].value)}")
    finite = [value for value in (*series.min, *series.max) if math.isfinite(value)]
    if len(set(finite)) > 1:
        parts += [_extreme("lowest", series, series.min, min), _extreme("highest", series, series.max, max)]
    elif len(series.step) > 1 and finite:
        parts.append("the same at all steps")
    if bad := sum(series.nonfinite):
        first = next(step for step, count in zip(series.step, series.nonfinite, strict=True) if count)
        parts.append(f"{some(bad, 'value')} NaN or Inf, first at step {first:,}")
    return "; ".join(parts)


def _extreme(word: str, series: Series, column: Sequence[float], choose: Callable[..., tuple[float, int]]) -> str:
    finite = ((value, step) for value, step in zip(column, series.step, strict=True) if math.isfinite(value))
    value, step = choose(finite, key=lambda each: each[0])
    at = f"at step {step:,}" if series.bucket_steps == 1 else f"in steps {step:,} to {step + series.bucket_steps - 1:,}"
    return f"{word} {figure(series.name, value)} {at}"


def _is_logged(name: str) -> bool:
    return metric(name).is_logged and not name.startswith(LOGGED)
