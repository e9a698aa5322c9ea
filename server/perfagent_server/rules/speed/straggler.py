"""straggler: one rank is slower than its peers, and all wait for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfagent.wire import Finding
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.rule import Unknown, within
from perfagent_server.rules.speed.own_work import OwnWork, OwnWorkRule, lower_median, slowest_phase
from perfagent_server.rules.speed.stages import stages_of
from perfagent_server.rules.window import Window

__all__ = ["Straggler"]


@dataclass(frozen=True, kw_only=True)
class Straggler(OwnWorkRule):
    """A rank's own work (the step without its wait for others) takes slow_times that of a typical rank.

    1 / 0.75 is the threshold of NVIDIA Resiliency Extension's relative score. Ranks of other pipeline stages do other
    work, so a rank is compared with those of its own stage (stages.py), and has no peer in a stage of its own. Long
    sequences fall on some ranks of every step: hence medians, `often` and most_share.
    """

    slow_times: float = 1 / 0.75
    cost_pct: float = within(10.0, most=10_000)
    critical_cost_pct: float = within(30.0, most=10_000)
    most_share: float = 1 / 16
    often: float = 0.75  # of the steps in which it is slow
    steps: int = within(32, least=2, most=64)
    least_steps: int = within(16, least=2, most=64)
    clear_at: float = 0.8  # of what is above 1

    id = "straggler"
    severities = ("warning", "critical")

    def judge(self, window: Window) -> Finding | Unknown | None:
        work = self.own_work(window)
        if not isinstance(work, OwnWork):
            return work
        ranks, own = work.ranks, work.typical
        stages = stages_of(window, ranks, work.own)
        typical = np.full(len(own), lower_median(own, axis=0)) if stages is None else stages.peers(work.own)
        slack = self.clear_at if window.is_firing(self.id) else 1.0
        limit = 1 + (self.slow_times - 1) * slack
        slow = np.flatnonzero((own >= limit * typical) & (typical > 0)).tolist()
        if not slow or len(slow) > max(1, int(self.most_share * len(ranks))):
            return None
        worst = max(slow, key=lambda place: own[place] - typical[place])
        usual = float(typical[worst])
        if np.mean(work.own[worst] > 0.5 * (own[worst] + usual)) < self.often * slack:
            return None  # long sequences fell on it more often than on others
        step_s, lost_s = float(np.median(work.total)), float(own[worst]) - usual
        cost = min(100.0, 100 * lost_s / step_s)
        if cost < self.cost_pct * slack:
            return None
        took, rank = window.series("step_time_s"), ranks[worst]
        phase, more_s = slowest_phase(window, rank, self.steps)
        return self.found(
            "critical" if cost >= self.critical_cost_pct else "warning",
            cause=phase if phase in ("data", "other") else "",
            since_step=window.at,
            ranks=[ranks[place] for place in slow],
            evidence={
                "rank": rank, "more_slow": len(slow) - 1 or None, "own_s": float(own[worst]),
                "own_p90_s": p90(sorted(work.own[worst].tolist())), "typical_own_s": usual, "times": float(own[worst]) / usual,
                "lost_s": lost_s, "step_time_s": step_s, "share_pct": cost, "phase": phase, "phase_more_s": more_s,
                "steps": min(self.steps, took.total) if took is not None else 0,
                "own_s_by_rank": {
                    str(one): float(value) for value, one in sorted(zip(own, ranks, strict=True), reverse=True)[:64]
                },
            },
            gain_pct=cost,
        )  # fmt: skip
