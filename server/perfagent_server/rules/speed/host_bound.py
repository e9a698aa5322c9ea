"""host_bound: the device waits for the host to launch its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import bounds
from perfagent_server.rules.speed.bounds import what_bounds
from perfagent_server.rules.speed.while_stepping import Typical, while_stepping
from perfagent_server.rules.window import Window

__all__ = ["HostBound"]

_UTILIZATION, _SM = "gpu/utilization_pct", "gpu/sm_active_pct"


@dataclass(frozen=True, kw_only=True)
class HostBound(Rule):
    """The GPU is idle while forward, backward and optimizer run: between its kernels it waits for the next launch.

    A trace shows the gaps themselves (Holistic Trace Analysis calls them host wait). Without a trace this is what is
    left once waits, copies, communication and calls that wait for the device are excluded.
    """

    info_below_pct: float = 70.0
    warning_below_pct: float = 30.0
    sm_below_pct: float = 25.0
    most_wait_pct: float = 20.0
    for_s: float = within(60.0, least=1, most=120)
    clear_at: float = 1.1  # times the threshold

    id = "host_bound"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("low_gpu_utilization",)
    reads = (
        Every(15.0),
        *bounds.READS,
        Series(_UTILIZATION, keep=120, axis="time"),
        Series(_SM, keep=120, axis="time"),
        Series("sync/calls_per_step", keep=8, merge="max"),
    )
    needs_card = True
    charts = (_UTILIZATION, "step_time_s")
    profile_helps = True
    level = "for_s"
    life = Life(clear_s=30.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        if not {_UTILIZATION, _SM} & window.by_time.keys():
            return None
        runs, works = while_stepping(window, _UTILIZATION, self.for_s), while_stepping(window, _SM, self.for_s)
        if runs is None and works is None:
            return UNKNOWN
        slack = self.clear_at if window.is_firing(self.id) else 1.0
        if not (_is_below(runs, self.info_below_pct * slack) or _is_below(works, self.sm_below_pct * slack)):
            return None
        if window.value("sync/calls_per_step"):
            return None  # sync_bound
        bound = what_bounds(window)
        if bound is None:
            return UNKNOWN
        waits = 100.0 - bound.shares_pct.get("compute", 0.0)
        if waits >= self.most_wait_pct:
            return None
        seen = runs if _is_below(runs, self.info_below_pct * slack) else works
        assert seen is not None
        return self.found(
            "warning" if _is_below(runs, self.warning_below_pct) else "info",
            since_step=window.at,
            evidence={
                "idle_pct": 100.0 - seen.mean, "utilization_pct": None if runs is None else runs.mean,
                "sm_active_pct": None if works is None else works.mean, "compute_pct": 100 - waits, "over_s": seen.over_s,
                "shares_pct": bound.shares_pct, "step_time_s": bound.step_p50_s, "mfu_pct": bound.roofline.mfu_pct,
            },
        )  # fmt: skip


def _is_below(typical: Typical | None, limit: float) -> bool:
    return typical is not None and typical.mean < limit
