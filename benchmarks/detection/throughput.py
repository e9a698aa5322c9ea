"""How well throughput_regression tells slower steps from noise: on the recorded runs with a wall time of each step, and on
made-up jobs that are noisier than those.

healthy() counts false alarms on made-up jobs; the recorded ones are judged with all other rules (measure.py). drops() puts
a slowdown at a random step of a recorded run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from records import begin_at, curves, mlperf

from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import replay
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.speed.throughput_regression import ThroughputRegression

__all__ = ["drops", "healthy"]

WITHIN_STEPS = 20
_BEFORE_STEPS, _LEAST_STEPS, _AFTER_STEPS = 400, 220, 40
_STEP_S = (0.005, 0.03, 0.2, 2.0)
Noise = Callable[[random.Random, int], float]
"""(draw, step) -> what a step takes, as a multiple of its usual time."""

_JOBS: tuple[Noise, ...] = (
    lambda draw, _: math.exp(draw.gauss(0, 0.005)),
    lambda draw, _: math.exp(draw.gauss(0, 0.2)),
    lambda draw, _: math.exp(draw.gauss(0, 0.5)),
    lambda draw, _: (1.5 if draw.random() < 0.3 else 1.0) * math.exp(draw.gauss(0, 0.02)),
    lambda draw, _: (draw.uniform(2, 6) if draw.random() < 0.05 else 1.0) * math.exp(draw.gauss(0, 0.1)),
    lambda draw, step: (1 + 0.1 * math.sin(2 * math.pi * step / 8000)) * math.exp(draw.gauss(0, 0.1)),
)
"""Quiet, jittery, very jittery, of two kinds, with single slow steps, with a slow drift."""


def healthy(*, jobs: int | None = None, steps: int = 6000) -> tuple[int, int]:
    """(alerts at warning or above, steps) over made-up jobs of every kind and length of a step, or the first of them."""
    kinds = [(noise, step_s) for noise in _JOBS for step_s in _STEP_S][:jobs]
    found = 0
    for place, (noise, step_s) in enumerate(kinds):
        draw = random.Random(place)
        time, moments = 0.0, []
        for step in range(1, steps + 1):
            took = step_s * noise(draw, step)
            time += took
            moments.append(Moment(time, step, {"step_time_s": took}))
        alerts = replay(begin_at(moments), Plan((ThroughputRegression(),))).alerts
        found += sum(alert.severity != "info" for alert in alerts)
    return found, len(kinds) * steps


def drops(pct: float, seed: int, *, draws: int = 100) -> tuple[int, int, list[int]]:
    """(found, total, steps until each was found) of slowdowns of so many percent. Found means: within WITHIN_STEPS, and
    nothing before."""
    draw = random.Random(seed)
    able = [
        one
        for one in [*curves(), *mlperf()]
        if len(one.moments) > _LEAST_STEPS + _AFTER_STEPS and "step_time_s" in one.series
    ]
    latencies = []
    for _ in range(draws):
        moments = draw.choice(able).moments
        place = _LEAST_STEPS + draw.randrange(len(moments) - _LEAST_STEPS - _AFTER_STEPS)
        before, after = moments[max(0, place - _BEFORE_STEPS) : place], moments[place : place + _AFTER_STEPS]
        slower = [replace(one, values=_slower(one.values, 1 + pct / 100)) for one in after]
        alerts = replay(begin_at([*before, *slower]), Plan((ThroughputRegression(),))).alerts
        first = min((alert.first_step for alert in alerts), default=None)
        if first is not None and 0 <= first - after[0].step <= WITHIN_STEPS:
            latencies.append(first - after[0].step)
    return len(latencies), draws, sorted(latencies)


def _slower(values: dict[str, float], times: float) -> dict[str, float]:
    return {name: value * times if name == "step_time_s" else value for name, value in values.items()}
