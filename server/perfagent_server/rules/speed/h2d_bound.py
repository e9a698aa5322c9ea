"""h2d_bound: the stream that computes waits for copies to the device."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from perfagent.wire import Finding
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.steady_steps import steady_steps
from perfagent_server.rules.window import Window

__all__ = ["H2dBound"]


@dataclass(frozen=True, kw_only=True)
class H2dBound(Rule):
    """Copies to the device take warning_pct of the step on the stream that computes (medians over the newest steady
    steps; TraceML's H2D_BOUND). Their time is the device's own: to the host an asynchronous copy takes none.
    """

    warning_pct: float = 10.0
    steps: int = within(20, least=2, most=64)
    least_s: float = 0.001
    clear_at: float = 0.8  # of the threshold

    id = "h2d_bound"
    severities = ("warning",)
    question = Question.IS_IT_FAST
    after = ("data_bound",)
    reads = (Every(5.0), Series("phase/h2d_s", merge="median"), Series("step_time_s", merge="median"))
    needs_card = True
    charts = ("phase/h2d_s", "step_time_s")
    profile_helps = True
    level = "steps"
    life = Life(clear_s=15.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        copies = window.series("phase/h2d_s")
        if copies is None:
            return None
        copied = dict(copies.rows())
        rows = [(copied[step], took) for step, took in zip(*steady_steps(window, 64), strict=True) if step in copied]
        if len(rows) < self.steps:
            return UNKNOWN if copies.total < 2 * self.steps else None
        copy_s, step_s = median(row[0] for row in rows), median(row[1] for row in rows)
        share = 100 * median(copy / took for copy, took in rows)
        if copy_s < self.least_s or share < self.warning_pct * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self.found(
            "warning",
            since_step=window.at,
            evidence={
                "copy_s": copy_s, "step_time_s": step_s, "share_pct": share, "copy_p90_s": p90(sorted(row[0] for row in rows)),
                "steps": len(rows),
            },
            gain_pct=share,
        )  # fmt: skip
