"""Where the time of the newest steps went: shares of phases, and how busy the GPUs were meanwhile."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from perfagent.wire import TIMED_PHASES
from perfagent_server.rules.rule import Series
from perfagent_server.rules.window import Window

__all__ = [
    "ON_DEVICE", "PAUSES", "READS", "UTILIZATION", "busy_pct", "means_over", "seconds_by_step", "seconds_in", "share_elsewhere",
]  # fmt: skip

READS = (Series("step_time_s", merge="median"), *(Series(f"phase/{phase}_s", merge="median") for phase in TIMED_PHASES))
UTILIZATION = Series("gpu/utilization_pct", keep=60, axis="time")
ON_DEVICE = ("forward", "backward", "optimizer", "comm")  # on CPU their times leave room for the loader's, too
PAUSES = ("checkpoint", "eval", "compile")
_FEWEST_STEPS = 10
"""Of fewer steps no share is typical."""
_LEAST_BUSY_S = 5.0  # utilization is sampled once a second
_BUSY_PCT = 90.0  # so busy, the device's own work bounds the step
_LEAST_WAIT_S = 0.001


def share_elsewhere(window: Window) -> float | None:
    """What part of a typical step (the median of the newest) no phase accounts for, 0 to 1. None where too few steps
    tell, or the GPUs are busy all the same: the script then only waits for their work."""
    took, other = window.track("step_time_s"), window.track("phase/other_s")
    times = dict(took.rows())
    told = {
        step: value
        for step, value in zip(other.steps, other.values, strict=True)
        if 0 < times.get(step, 0.0) < math.inf
    }
    busy = busy_pct(window, took.time, sum(times.values()))
    if len(told) < _FEWEST_STEPS or (busy is not None and busy >= _BUSY_PCT):
        return None
    if sorted(told.values())[len(told) // 2] < _LEAST_WAIT_S:  # the loop of a toy
        return None
    return min(1.0, sorted(value / times[step] for step, value in told.items())[len(told) // 2])


def means_over(window: Window, steps: set[int]) -> dict[str, float]:
    """Mean seconds that each phase takes of these steps. A step without a phase (it saved no checkpoint) spent none in
    it; phases that none of them had are absent."""
    return {
        phase: seconds_in(window, steps, phase) / len(steps)
        for phase in TIMED_PHASES
        if not steps.isdisjoint(window.track(f"phase/{phase}_s").steps)
    }


def seconds_in(window: Window, steps: set[int], *phases: str) -> float:
    """Seconds that phases took of these steps, as far as they are told. Not only of those that rules may see: the
    other phases of a step are shown to them after its wait for data."""
    spent = 0.0
    for phase in phases if steps else ():
        track = window.track(f"phase/{phase}_s")
        # A frame may hold thousands of steps, all of them in the track before the first is judged.
        part = slice(bisect_left(track.steps, min(steps)), bisect_right(track.steps, max(steps)))
        spent += sum(value for step, value in zip(track.steps[part], track.values[part], strict=True) if step in steps)
    return spent


def seconds_by_step(window: Window, phases: tuple[str, ...]) -> dict[int, float]:
    spent: dict[int, float] = {}
    for phase in phases:
        track = window.track(f"phase/{phase}_s")
        for step, value in zip(track.steps, track.values, strict=True):
            spent[step] = spent.get(step, 0.0) + value
    return spent


def busy_pct(window: Window, until: float | None, seconds: float) -> float | None:
    """Mean utilization of the GPUs over the last seconds (at least _LEAST_BUSY_S) up to a time; None where it is not
    known."""
    if until is None:
        return None
    since = until - max(seconds, _LEAST_BUSY_S)
    return window.readings(UTILIZATION.name).mean(since, until)
