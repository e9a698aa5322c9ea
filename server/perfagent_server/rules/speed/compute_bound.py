"""compute_bound: the model's own work takes nearly all of the step."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Unknown
from perfagent_server.rules.speed import bounds
from perfagent_server.rules.speed.bounds import what_bounds
from perfagent_server.rules.window import Window

__all__ = ["ComputeBound"]

_WORK = ("compute", "memory bandwidth")


@dataclass(frozen=True, kw_only=True)
class ComputeBound(Rule):
    """Forward, backward and optimizer take compute_pct of the steady steps, and no other rule on speed has an alert open.
    As in TraceML, it is no fault: it says that the loop around the model has nothing left to gain."""

    compute_pct: float = 90.0
    clear_at: float = 0.95  # of the threshold

    id = "compute_bound"
    severities = ("info",)
    question = Question.IS_IT_FAST
    after = ("tokens_wasted",)
    reads = (Every(30.0), *bounds.READS)
    charts = ("phase/forward_s", "step_time_s")
    profile_helps = True
    life = Life(for_s=300.0, clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        if self._has_another_cause(window):
            return None
        bound = what_bounds(window)
        if bound is None:
            return UNKNOWN
        share = bound.shares_pct.get("compute", 0.0)
        limit = self.compute_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        if bound.kind not in _WORK or share < limit:
            return None
        return self.found("info", cause=bound.cause, since_step=window.at, evidence=bound.figures())

    def _has_another_cause(self, window: Window) -> bool:
        rules = window.plan.rules
        return any(
            rules[one].question is Question.IS_IT_FAST for one in window.firing if one in rules and one != self.id
        )
