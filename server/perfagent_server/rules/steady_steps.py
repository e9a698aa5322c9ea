"""The steps that tell how fast a run trains: those in which nothing else happened."""

from __future__ import annotations

import math

from perfagent_server.rules.rule import Series
from perfagent_server.rules.window import Window

__all__ = ["SKIPPED_STEPS", "reads", "steady_steps"]

SKIPPED_STEPS = 5
"""The first steps of an attempt compile kernels, fill caches and start loader workers."""


def reads(keep: int) -> Series:
    """What a rule reads that looks at the newest `keep` steady steps: some more, for those that are left out."""
    return Series("step_time_s", keep=keep + keep // 8, merge="median")


def steady_steps(window: Window, count: int, series: str = "step_time_s") -> tuple[list[int], list[float]]:
    """The newest `count` steps of a series and its values, oldest first, without evaluations, saves and other phases
    beside training, without the first steps of the attempt, and without values that are no numbers or not above 0: a log
    with a coarse clock has steps that took no time."""
    interrupted, first = window.wall.interrupted, window.start_step + SKIPPED_STEPS
    rows = [
        (step, value)
        for step, value in window.track(series).rows()
        if step > first and step not in interrupted and 0 < value < math.inf
    ][-count:]
    return [step for step, _ in rows], [value for _, value in rows]
