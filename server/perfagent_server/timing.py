"""Where the time of a run's newest steps went: percentiles of each phase over a sliding window, and what share each has.

The window is the newest `steps` steps; ranks are put together step by step as the catalogue says, before percentiles are taken.
Percentiles are interpolated between the two nearest values (type 7 of Hyndman and Fan 1996, numpy's default).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfagent.wire import PHASES, Quantiles, Timing
from perfagent_server.store.interface import MetricStore

__all__ = ["NAMES", "quantile", "timing"]

NAMES = ("step_time_s", *(f"phase/{phase}_s" for phase in PHASES))
_SHARES = {
    "data": ("data",),
    "transfer": ("h2d",),
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("comm",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("eval",),
    "other": ("other",),
}
"""Share of the step time -> phases that make it up; a step without a phase spent no time in it."""


def timing(store: MetricStore, run: str, *, steps: int) -> Timing:
    """Of the newest `steps` steps of a run; empty where no step was timed."""
    known = set(store.names(run))
    newest = store.latest(run).get("step_time_s")
    if newest is None:
        return Timing(from_step=0, to_step=0, series={}, shares={})
    first = newest.step - steps + 1
    values = {
        name: [value for value in series.mean if math.isfinite(value)]
        for name in NAMES
        if name in known
        for series in (store.series(run, name, from_step=first, to_step=newest.step, points=steps),)
    }
    found = {
        name: Quantiles(
            p50=quantile(ordered, 0.5),
            p90=quantile(ordered, 0.9),
            p99=quantile(ordered, 0.99),
            mean=sum(ordered) / len(ordered),
            count=len(ordered),
        )
        for name, ordered in ((name, sorted(each)) for name, each in values.items() if each)
    }
    total = sum(values.get("step_time_s", ()))
    shares = {
        share: min(1.0, sum(sum(values.get(f"phase/{phase}_s", ())) for phase in phases) / total)
        for share, phases in _SHARES.items()
        if total > 0 and any(values.get(f"phase/{phase}_s") for phase in phases)
    }
    return Timing(from_step=max(first, 0), to_step=newest.step, series=found, shares=shares)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the ordered values lies."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
