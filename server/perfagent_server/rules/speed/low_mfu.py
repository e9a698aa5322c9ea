"""low_mfu: the devices do little of the arithmetic that they could."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import bounds
from perfagent_server.rules.speed.bounds import bound_figures, what_bounds
from perfagent_server.rules.window import Window

__all__ = ["LowMfu"]

_MFU = "mfu"
_LOOKED_EVERY = 20  # steps


@dataclass(frozen=True, kw_only=True)
class LowMfu(Rule):
    """Model FLOPs utilization is low, in the median.

    The peak is known for some devices, for dense arithmetic in the type that the model computes in. It is a remark: small
    models cannot fill a large device. Where it falls while the arithmetic of a step stays the same, steps take longer, and
    throughput_regression says so.
    """

    info_below_pct: float = 20.0
    steps: int = within(64, least=2, most=64)
    clear_at: float = 1.1  # times the level

    id = "low_mfu"
    severities = ("info",)
    question = Question.IS_IT_FAST
    after = ("load_imbalance",)
    reads = (Series(_MFU, judged=True), *bounds.READS)
    charts = (_MFU,)
    profile_helps = True
    life = Life(clear_steps=20, restated=True)
    joins = ("throughput_regression",)
    needs_card = True

    def judge(self, window: Window) -> Finding | Unknown | None:
        series = window.by_step[_MFU]
        known = [value for value in series.last(self.steps) if math.isfinite(value)]
        if len(known) < self.steps // 2 or series.total % _LOOKED_EVERY:
            return UNKNOWN
        mfu = 100 * median(known)
        if mfu >= self.info_below_pct * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self.found(
            "info",
            since_step=window.at,
            evidence={"mfu_pct": mfu, "steps": len(known), **bound_figures(what_bounds(window))},
        )
