"""What rules on the loss share: its name in a sentence, and its finite values."""

from __future__ import annotations

import math

from perfagent.wire import LOSS
from perfagent_server.rules.step_series import StepSeries

__all__ = ["bad_in_a_row", "finite", "named"]


def named(series: str) -> str:
    return "The loss" if series == LOSS else series


def finite(series: StepSeries) -> tuple[list[float], list[int]]:
    """The values that are kept and are numbers, and their steps. Not all that happens to be in memory: a restarted
    server has no more than series.size."""
    values, steps = series.last(series.size), series.last_steps(series.size)
    if math.isfinite(sum(values)):
        return values, steps
    places = [place for place, value in enumerate(values) if math.isfinite(value)]
    return [values[place] for place in places], [steps[place] for place in places]


def bad_in_a_row(values: list[float]) -> int:
    """How many of the newest values are no numbers."""
    return next((count for count, value in enumerate(reversed(values)) if math.isfinite(value)), len(values))
