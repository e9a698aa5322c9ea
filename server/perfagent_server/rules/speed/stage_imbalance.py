"""stage_imbalance: a stage of the pipeline has more work than the others, which wait for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfagent.wire import Finding
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.row_series import Floats
from perfagent_server.rules.rule import Unknown, within
from perfagent_server.rules.speed.own_work import OwnWork, OwnWorkRule, slowest_phase
from perfagent_server.rules.speed.stages import Stages, stages_of
from perfagent_server.rules.window import Window

__all__ = ["StageImbalance"]


@dataclass(frozen=True, kw_only=True)
class StageImbalance(OwnWorkRule):
    """The own work of a typical rank of the slowest stage, against that of the fastest.

    Stages are known from the ranks; else those that alone have a loss are the last one; else equally large rows of
    ranks with equal work are stages. The gain is the slowest stage less the mean of all, as in ByteDance's "What-if"
    analysis of stragglers, where the uneven last stage was the most frequent cause.
    """

    slow_times: float = 1.15
    cost_pct: float = within(5.0, most=10_000)
    warning_pct: float = 10.0
    steps: int = within(32, least=2, most=64)
    least_steps: int = within(16, least=2, most=64)
    clear_at: float = 0.8  # of what is above 1

    id = "stage_imbalance"
    severities = ("info", "warning")
    after = ("straggler",)

    def judge(self, window: Window) -> Finding | Unknown | None:
        work = self.own_work(window)
        if not isinstance(work, OwnWork):
            return work
        stages = stages_of(window, work.ranks, work.own)
        if stages is None:
            return None
        typical = stages.typical(work.own)
        slack = self.clear_at if window.is_firing(self.id) else 1.0
        step_s, lost_s = float(np.median(work.total)), float(typical.max() - typical.mean())
        limit = (1 + (self.slow_times - 1) * slack) * typical.min()
        if not typical.min() > 0 or typical.max() < limit or 100 * lost_s < self.cost_pct * slack * step_s:
            return None
        return self._finding(window, work.ranks, stages, typical, step_s, lost_s)

    def _finding(
        self, window: Window, ranks: list[int], stages: Stages, typical: Floats, step_s: float, lost_s: float
    ) -> Finding:
        slow, fast = int(typical.argmax()), int(typical.argmin())
        of_slow = [ranks[place] for place in stages.of[slow]]
        share, times = min(100.0, 100 * lost_s / step_s), float(typical[slow] / typical[fast])
        phase, more_s = slowest_phase(window, of_slow[0], self.steps)
        ordered = sorted(window.track("step_time_s").last(self.steps)) or [step_s]
        return self.found(
            "warning" if share >= self.warning_pct else "info",
            cause="by their work" if stages.known == "by their work" else "",
            since_step=window.at,
            ranks=of_slow,
            evidence={
                "stage": slow, "stage_number": slow + 1, "stages": len(typical), "stages_known": stages.known, "ranks": of_slow,
                "world_size": window.world_size, "times": times, "own_s": float(typical[slow]),
                "fastest_own_s": float(typical[fast]), "step_time_s": step_s, "step_p90_s": p90(ordered), "lost_s": lost_s,
                "share_pct": share, "phase": phase, "phase_more_s": more_s, "steps": len(ordered),
                "own_s_by_stage": [float(value) for value in typical[:64]],
            },
            gain_pct=share,
        )  # fmt: skip
