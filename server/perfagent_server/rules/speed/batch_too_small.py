"""batch_too_small: nothing of the machine is used much, and the memory of the GPU has room for a larger batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import bounds
from perfagent_server.rules.speed.bounds import what_bounds
from perfagent_server.rules.speed.cpu_load import BUSY
from perfagent_server.rules.time_series import Seconds
from perfagent_server.rules.window import Window

__all__ = ["BatchTooSmall"]

_GPU, _PEAK, _MEMORY = "gpu/utilization_pct", "cuda/peak_allocated_bytes", "gpu/memory_total_bytes"
_CORES_S = 120.0  # for so long the load of the cores is kept


@dataclass(frozen=True, kw_only=True)
class BatchTooSmall(Rule):
    """SageMaker Debugger's rule. Memory is what live tensors took at most, since frameworks reserve more than they use.
    Silent if something else holds the GPU back.
    """

    below_pct: float = 70.0
    most_wait_pct: float = 30.0
    for_s: float = within(300.0, least=1, most=600)
    clear_at: float = 1.1  # times the threshold

    id = "batch_too_small"
    severities = ("info",)
    question = Question.IS_IT_FAST
    after = ("dataloader_workers",)
    reads = (
        Every(15.0),
        Series(_GPU, keep=600, axis="time"),
        BUSY,
        *(Series(name, keep=2, axis="time", ranks="apart") for name in (_PEAK, _MEMORY)),
        *bounds.READS,
    )
    charts = (_GPU, "cuda/peak_allocated_bytes")
    profile_helps = True
    level = "for_s"
    life = Life(clear_s=60.0, restated=True)
    needs_card = True

    def judge(self, window: Window) -> Finding | Unknown | None:
        gpu = window.by_time.get(_GPU)
        took = window.series("step_time_s")
        if gpu is None or took is None or took.time is None:
            return None
        slack = self.clear_at if window.is_firing(self.id) else 1.0
        memory = _memory(window)
        busy = _p95(gpu.seconds(), took.time - self.for_s, self.for_s)
        if memory is None or busy is None:
            return UNKNOWN
        peak, total = memory
        memory_pct, limit = 100 * peak / total, slack * self.below_pct
        if max(memory_pct, busy) >= limit:
            return None
        cores = window.readings(BUSY.name)
        known = [_p95(cores.seconds(rank), took.time - _CORES_S, _CORES_S) for rank in cores.ranks]
        cpu_pct = max((one for one in known if one is not None), default=None)
        bound = what_bounds(window)
        if cpu_pct is None or bound is None:
            return UNKNOWN
        if cpu_pct >= limit or 100.0 - bound.shares_pct.get("compute", 0.0) >= self.most_wait_pct:
            return None
        return self.found(
            "info",
            since_step=window.at,
            evidence={
                "memory_pct": memory_pct, "peak_bytes": peak, "total_bytes": total, "utilization_p95_pct": busy,
                "cpu_p95_pct": cpu_pct, "over_s": self.for_s, "room_times": total / max(peak, 1.0),
                "shares_pct": bound.shares_pct,
            },
        )  # fmt: skip


def _memory(window: Window) -> tuple[float, float] | None:
    """Peak of the live tensors and size of the GPU on which the least is left."""
    peaks, totals = (window.readings(name).newest_by_rank() for name in (_PEAK, _MEMORY))
    known = [(peak, totals[rank]) for rank, peak in peaks.items() if peak and totals.get(rank)]
    return max(known, key=lambda one: one[0] / one[1], default=None)


def _p95(readings: Seconds, since: float, for_s: float) -> float | None:
    """The reading that 95 of 100 are below, of those while steps were made; None where they do not cover the time."""
    inside = (readings.second >= since) & readings.stepping
    seconds = readings.second[inside]
    if len(seconds) < 10 or seconds[-1] - seconds[0] < 0.8 * for_s:
        return None
    return float(np.quantile(readings.total[inside] / readings.count[inside], 0.95))
