"""unmeasured_time: much of the step goes into code that no phase accounts for."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from perfagent.wire import Finding
from perfagent_server.rules.evidence import told_lines
from perfagent_server.rules.rule import UNKNOWN, Events, Every, Life, Question, Rule, Unknown, within
from perfagent_server.rules.speed import step_shares
from perfagent_server.rules.speed.step_shares import UTILIZATION, busy_pct
from perfagent_server.rules.window import Window

__all__ = ["UnmeasuredTime"]


@dataclass(frozen=True, kw_only=True)
class UnmeasuredTime(Rule):
    """phase/other_s takes a large share of the steps. If the GPUs are busy, the host only waits for their work.

    This is a remark, because a simulation in the loop is as unmeasured as a plot that nobody needs. It is a warning if half of
    the time is unmeasured, most of it at one line, and the model does not act between its steps (by playing or generating).
    """

    share_pct: float = 30.0
    warning_pct: float = 50.0
    warning_s: float = 8.0
    steps: int = within(20, least=2, most=64)
    least_s: float = 0.001
    busy_pct: float = 90.0
    clear_at: float = 0.8  # of the threshold

    id = "unmeasured_time"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("step_time_tail",)
    reads = (Every(5.0), Events("lines"), *step_shares.READS, UTILIZATION)
    charts = ("phase/other_s", "step_time_s")
    profile_helps = True
    life = Life(clear_s=30.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        if not window.is_firing(self.id) and self._is_far_off(window):
            return None  # nearly every run ends here
        spent = window.wall.recent()
        other, longest = spent.seconds.get("other", 0.0), spent.longest_s.get("other", 0.0)
        limit = self.share_pct / 100 * (self.clear_at if window.is_firing(self.id) else 1.0)
        if other <= limit * spent.wall_s:
            return None
        if spent.steps < self.steps:
            return UNKNOWN
        share = (other - longest) / (spent.wall_s - longest)
        mean_s = (other - longest) / (spent.steps - 1)
        if share < limit or mean_s < self.least_s or "sync_bound" in window.firing | window.pending:
            return None
        busy = busy_pct(window, window.wall.ended, min(60.0, spent.wall_s))
        if busy is not None and busy >= self.busy_pct:
            return None
        newest = window.series("phase/other_s")
        usual_s = 0.0 if newest is None else median(newest.last(64))  # of the newest steps
        bursts = usual_s < 0.25 * mean_s
        lines = told_lines(window, "lines")
        is_much = share >= self.warning_pct / 100 and spent.wall_s >= self.warning_s
        return self.found(
            "warning" if is_much and _is_at_one_line(lines) and not spent.acts else "info",
            cause="now and then" if bursts else "",
            since_step=window.at,
            evidence={
                "share_pct": 100 * share, "other_s": mean_s, "step_time_s": spent.wall_s / spent.steps,
                "usual_s": usual_s, "longest_s": longest, "steps": spent.steps, "gpu_busy_pct": busy,
                "lines": lines, "line": _named(lines[0]) if lines else None,
            },
        )  # fmt: skip

    def _is_far_off(self, window: Window) -> bool:
        """Whether neither the newest steps nor the whole run come near the threshold: ten minutes cost more to add up."""
        other, took = window.series("phase/other_s"), window.series("step_time_s")
        if other is None or took is None:
            return True
        newest = sum(other.last(64)) / max(sum(took.last(64)), 1e-9)
        return max(newest, window.wall.whole().share("other")) < 0.5 * self.share_pct / 100


def _is_at_one_line(lines: list[dict[str, Any]]) -> bool:
    """Whether most looks found the script there."""
    return bool(lines) and 2 * lines[0]["count"] > sum(line["count"] for line in lines)


def _named(line: dict[str, Any]) -> str:
    function = str(line.get("in", ""))
    return f"{line['line']} ({function})" if function not in ("", "<module>") else str(line["line"])
