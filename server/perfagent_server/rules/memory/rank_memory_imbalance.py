"""rank_memory_imbalance: few ranks need far more GPU memory than the others, and so bound the batch of all."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from perfagent.wire import Finding
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series, within
from perfagent_server.rules.window import Window

__all__ = ["RankMemoryImbalance"]

_PEAK, _TOTAL = "cuda/peak_allocated_bytes", "gpu/memory_total_bytes"


@dataclass(frozen=True, kw_only=True)
class RankMemoryImbalance(Rule):
    """Few ranks peak far above a typical one (TraceML's skew and pressure).

    Stages of a pipeline, and shares of a model that cannot be cut evenly, differ in their memory on purpose. Of two ranks
    nobody knows whether they are two stages: that is never more than info.
    """

    info_more_pct: float = within(20.0, most=10_000)
    info_pressure_pct: float = 30.0
    warning_more_pct: float = within(30.0, most=10_000)
    warning_pressure_pct: float = 50.0
    most_share: float = 1 / 8
    alike_pct: float = 10.0
    warning_ranks: int = 3
    skip_steps: int = 20
    clear_at: float = 0.8

    id = "rank_memory_imbalance"
    severities = ("info", "warning")
    question = Question.WILL_IT_GO_ON
    after = ("checkpoint_anomaly",)
    reads = (Every(15.0), *(Series(name, keep=2, axis="time", ranks="apart") for name in (_PEAK, _TOTAL)))
    needs_card = True
    charts = (_PEAK, "gpu/memory_used_bytes")
    life = Life(for_s=60.0, clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | None:
        if window.world_size < 2 or window.step - window.start_step <= self.skip_steps:
            return None
        of_rank = {rank: peak for rank, peak in window.readings(_PEAK).newest_by_rank().items() if peak}
        if len(of_rank) < max(2, window.world_size // 2):
            return None
        ordered = sorted(of_rank.values())
        typical = ordered[0] if len(ordered) == 2 else median(ordered)
        limit = self.clear_at if window.is_firing(self.id) else 1.0
        high = [rank for rank, peak in of_rank.items() if 100 * (peak - typical) >= limit * self.info_more_pct * peak]
        if not high or len(high) > max(1, int(self.most_share * len(of_rank))):
            return None
        others = [peak for rank, peak in of_rank.items() if rank not in high]
        if 100 * (max(others) - min(others)) > self.alike_pct * typical:
            return None
        worst = max(high, key=lambda rank: of_rank[rank])
        total = window.readings(_TOTAL).newest(worst)
        if not total:
            return None
        more, pressure = 100 * (of_rank[worst] - typical) / of_rank[worst], 100 * of_rank[worst] / total
        if pressure < self.info_pressure_pct:
            return None
        is_warning = (
            len(of_rank) >= self.warning_ranks
            and more >= limit * self.warning_more_pct
            and pressure >= self.warning_pressure_pct
        )
        return self.found(
            "warning" if is_warning else "info",
            cause="rank 0" if worst == 0 else "",
            since_step=window.step,
            ranks=sorted(high),
            evidence={
                "rank": worst, "peak_bytes": of_rank[worst], "typical_peak_bytes": typical, "more_pct": more,
                "pressure_pct": pressure, "total_bytes": total, "more_bytes": of_rank[worst] - typical,
                "high_ranks": sorted(high), "world_size": window.world_size,
                "peak_bytes_by_rank": {str(rank): peak for rank, peak in sorted(of_rank.items())[:64]},
            },
        )  # fmt: skip
