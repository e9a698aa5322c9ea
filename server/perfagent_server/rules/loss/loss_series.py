"""What rules on the loss share: its finite values, and how far it has come down."""

from __future__ import annotations

import math

from perfagent_server.rules.rule import Rule
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["bad_in_a_row", "finite", "first_value", "has_fallen", "worth_telling"]


def finite(series: StepSeries) -> tuple[list[float], list[int]]:
    """The values that are kept and are numbers, and their steps. Not all that happens to be in memory: a restarted
    server has no more than series.size."""
    values, steps = series.last(series.size), series.last_steps(series.size)
    if math.isfinite(sum(values)):
        return values, steps
    places = [place for place, value in enumerate(values) if math.isfinite(value)]
    return [values[place] for place in places], [steps[place] for place in places]


def bad_in_a_row(values: list[float]) -> int:
    """How many of the newest values are not finite."""
    return next((count for count, value in enumerate(reversed(values)) if math.isfinite(value)), len(values))


def first_value(window: Window, rule: Rule, series: str, track: StepSeries) -> float:
    """The first finite value of a series in this attempt, kept in the rule's state; NaN if there was none."""
    firsts: dict[str, float] = window.state_of(rule, {})
    if series not in firsts:
        firsts[series] = next((value for value in track.values if math.isfinite(value)), math.nan)
    return firsts[series]


def has_fallen(first: float, level: float, *, to: float = 0.75) -> bool:
    """Whether the run has learned something: its loss fell to this share of its first value."""
    return level <= to * first


def worth_telling(first: float, level: float) -> float:
    """The least rise that undoes something of what was learned: 2 % of the way that the loss came down; 10 % where next
    to nothing is left of it, because there any bad batch is a multiple of the level. 0 for a loss that never fell."""
    share = 0.1 if abs(level) < 0.1 * first else 0.02
    return share * (first - level) if first > level else 0.0
