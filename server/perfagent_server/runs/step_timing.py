"""Computes where the time of a run's newest steps went: percentiles and shares of each phase over a sliding window.

The window is the newest `steps` steps, of which those count that were timed as a whole: a process's first step has
phases, but began before there was anything to time it from. Ranks are put together step by step as the catalogue says,
before percentiles are taken. Percentiles are interpolated between the two nearest values (type 7 of Hyndman and Fan
1996, numpy's default).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfagent.wire import TIMED_PHASES, Quantiles, Timing
from perfagent_server.store.interface import MetricStore

__all__ = ["NAMES", "quantile", "timing"]

NAMES = ("step_time_s", *(f"phase/{phase}_s" for phase in TIMED_PHASES))
_SHARES = {
    "data": ("data",),
    "transfer": ("h2d",),
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("comm",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("eval",),
    "rollout": ("rollout",),
    "other": ("other",),
}
"""Share of the step time -> phases that make it up; a step without a phase spent no time in it."""


def timing(store: MetricStore, run: str, *, steps: int) -> Timing:
    """Of the newest `steps` steps of a run; empty where no step was timed."""
    values = _values(store, run, steps)
    whole = values.get("step_time_s")
    if not whole:
        return Timing(from_step=0, to_step=0, series={}, shares={})
    found = {
        name: Quantiles(
            p50=quantile(ordered, 0.5),
            p90=quantile(ordered, 0.9),
            p99=quantile(ordered, 0.99),
            mean=sum(ordered) / len(ordered),
            count=len(ordered),
        )
        for name, ordered in ((name, sorted(each.values())) for name, each in values.items() if each)
    }
    phases = {phase: values.get(f"phase/{phase}_s", {}) for phase in TIMED_PHASES}
    return Timing(from_step=min(whole), to_step=max(whole), series=found, shares=_shares(whole, phases))


def _values(store: MetricStore, run: str, steps: int) -> dict[str, dict[int, float]]:
    """Name -> step -> value, of the steps that have a step time."""
    values: dict[str, dict[int, float]] = {}
    for name, series in store.newest(run, NAMES, steps=steps).items():  # of which step_time_s is the first
        told = {step: value for step, value in zip(series.step, series.mean, strict=True) if math.isfinite(value)}
        timed = values.get("step_time_s", told)
        values[name] = {step: value for step, value in told.items() if step in timed}
    return values


def _shares(whole: Mapping[int, float], phases: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    # What was evaluated or saved after the last step stands under that step's number, and is not in its step time.
    total = sum(max(time, sum(each.get(step, 0.0) for each in phases.values())) for step, time in whole.items())
    return {
        share: sum(sum(phases[phase].values()) for phase in parts) / total
        for share, parts in _SHARES.items()
        if total > 0 and any(phases[phase] for phase in parts)
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the ordered values lies."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
