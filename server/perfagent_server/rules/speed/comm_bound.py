"""comm_bound: ranks wait for communication that nothing overlaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfagent.wire import Finding
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed.own_work import rank_medians
from perfagent_server.rules.speed.step_shares import UTILIZATION
from perfagent_server.rules.window import Window

__all__ = ["CommBound"]


@dataclass(frozen=True, kw_only=True)
class CommBound(Rule):
    """Exposed communication takes a large share of the step, on every rank.

    A rank that waits for a slow one shows the wait as communication. The rank that waits least waits for the transfer
    alone, so its share counts. Two healthy ranks that share the cores of one host wait for each other for a quarter to
    nearly half of a step of 10 to 30 ms: so less than half is a remark, and without a GPU nothing.
    """

    info_pct: float = 30.0
    warning_pct: float = 50.0
    steps: int = within(20, least=2, most=64)
    skip_steps: int = 5
    clear_at: float = 0.8  # of the threshold

    id = "comm_bound"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("checkpoint_bound",)
    reads = (
        Series("phase/comm_s", merge="median", judged=True),
        Series("step_time_s", merge="median"),
        Series("phase/comm_s", ranks="apart"),
        Series("step_time_s", ranks="apart"),
        UTILIZATION,
    )
    charts = ("phase/comm_s", "step_time_s")
    profile_helps = True
    level = "steps"
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        merged = window.series("phase/comm_s")
        if merged is None or merged.total < self.steps + self.skip_steps:
            return None
        typical = sorted(merged.last(self.steps))[self.steps // 2]
        whole = window.value("step_time_s")
        if whole is None or typical < 0.5 * self.clear_at * self.info_pct / 100 * whole:
            return None  # most steps end here
        if window.world_size > 1 and window.by_rank.kept_until(window.at) < self.steps:
            return UNKNOWN
        ranks, medians = rank_medians(window, ("phase/comm_s", "step_time_s"), self.steps)
        if len(ranks) < 2 or min(medians[1]) <= 0:
            return None
        waited, total = medians
        shares = 100 * waited / total
        least = int(np.argmin(shares))
        share = float(shares[least])
        limit = self.info_pct if UTILIZATION.name in window.by_time else self.warning_pct
        if not share >= limit * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        wait_s, step_s = float(waited[least]), float(total[least])
        return self.found(
            "warning" if share >= self.warning_pct else "info",
            since_step=window.at,
            evidence={
                "comm_s": wait_s, "step_time_s": step_s, "share_pct": share, "least_waiting_rank": ranks[least],
                "comm_max_s": float(waited.max()), "comm_p90_s": p90(sorted(merged.last(self.steps))), "steps": self.steps,
            },
            gain_pct=share,
        )  # fmt: skip
