"""load_imbalance: in each step another rank has more work than the others, which wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfagent.wire import Finding
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.row_series import Floats
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Unknown, within
from perfagent_server.rules.speed import own_work
from perfagent_server.rules.speed.cpu_load import PRESSURE
from perfagent_server.rules.speed.own_work import OwnWork, OwnWorkRule, lower_median
from perfagent_server.rules.speed.stages import stages_of
from perfagent_server.rules.window import Window

__all__ = ["LoadImbalance"]

_TOTAL = "step_time_s"
_LEAST_LOST_S = 0.001


@dataclass(frozen=True, kw_only=True)
class LoadImbalance(OwnWorkRule):
    """Own work (the step without the wait for others) of the busiest rank in each step, where that is another rank each
    time.

    SageMaker Debugger compares histograms of GPU utilization, but a rank that waits in a collective is as busy there as
    one that computes. Own work by step tells them apart, on any device, and says what even work would gain. What one
    rank needs more in every step belongs to `straggler`.
    """

    info_pct: float = 10.0
    warning_pct: float = 25.0
    fixed_share: float = 0.5
    most_pressure_pct: float = 20.0
    steps: int = within(64, least=2, most=64)
    least_steps: int = within(32, least=2, most=64)
    clear_at: float = 0.8  # of the threshold

    id = "load_imbalance"
    severities = ("info", "warning")
    after = ("batch_too_small",)
    reads = (Every(5.0), *own_work.READS, PRESSURE)
    life = Life(for_s=15.0, clear_s=30.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        work = self.own_work(window)
        if not isinstance(work, OwnWork):
            return work
        if work.steps < self.least_steps:
            return UNKNOWN
        ranks, own, total = work.ranks, work.own, work.total
        stages = stages_of(window, ranks, own)
        groups = [[*range(len(ranks))]] if stages is None else [[*stage] for stage in stages.of if len(stage) > 1]
        if not groups:
            return None
        # of each stage by itself; the one that loses most
        excess, places = max(
            ((_excess(own[group]), group) for group in groups), key=lambda one: one[0].max(axis=0).mean()
        )
        lost, step_s = excess.max(axis=0), float(np.median(total))
        fixed = float(np.median(excess, axis=1).max())
        lost_s = float(lost.mean())
        share = min(100.0, 100 * lost_s / step_s) if step_s > 0 else 0.0
        lowest = self.info_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        if share < lowest or lost_s < _LEAST_LOST_S or fixed >= self.fixed_share * lost_s:
            return None
        at, told = window.track(_TOTAL).time, window.readings(PRESSURE.name)
        if at is not None:  # others' programs slow down a node at a time
            waited = [told.mean(at - 60.0, at, rank) or 0.0 for rank in told.ranks]
            if max(waited, default=0.0) >= self.most_pressure_pct:
                return None
        return self._finding(window, [ranks[place] for place in places], excess, total, lost_s, share)

    def _finding(
        self, window: Window, ranks: Sequence[int], excess: Floats, total: Floats, lost_s: float, share: float
    ) -> Finding:
        lost, took = sorted(excess.max(axis=0).tolist()), sorted(total.tolist())
        slowest = excess.argmax(axis=0)
        different, steps = len(np.unique(slowest)), len(slowest)
        phase, more_s = _uneven_phase(window, ranks, self.steps)
        return self.found(
            "warning" if share >= self.warning_pct else "info",
            cause=phase if phase in ("data", "other") else "",
            since_step=window.at,
            evidence={
                "lost_s": lost_s, "lost_p50_s": lost[steps // 2], "lost_p90_s": p90(lost), "share_pct": share,
                "step_time_s": took[steps // 2], "step_p90_s": p90(took), "steps": steps, "slowest_ranks": different,
                "ranks": len(ranks), "phase": phase, "phase_more_s": more_s,
            },
            gain_pct=share,
        )  # fmt: skip


def _excess(own: Floats) -> Floats:
    """What each rank needs more than a typical one in the same step (the lower median)."""
    excess: Floats = own - lower_median(own, axis=0)
    return excess


def _uneven_phase(window: Window, ranks: Sequence[int], steps: int) -> tuple[str, float]:
    """The phase in which the slowest rank of a step needs most more, and how much more in seconds."""
    most: tuple[str, float] = ("", 0.0)
    for phase in own_work.PHASES:
        known, _, values = window.by_rank.matrix(f"phase/{phase}_s", window.at)
        rows = values[[place for place, rank in enumerate(known) if rank in ranks], -steps:]
        rows = rows[:, ~np.isnan(rows).any(axis=0)]
        if rows.size:
            most = max(most, (phase, float(_excess(rows).max(axis=0).mean())), key=lambda one: one[1])
    return most
