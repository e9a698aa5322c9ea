"""tokens_wasted: a good part of every batch is padding."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent_server.rules.data.batch_readings import reading_of, readings
from perfagent_server.rules.rule import Life, Question, Rule, Series, within
from perfagent_server.rules.window import Window

__all__ = ["TokensWasted"]

_KEPT = 48


@dataclass(frozen=True, kw_only=True)
class TokensWasted(Rule):
    """Padding in the newest readings (of a minute and a half). Nothing is wrong, but the model computes on it."""

    padding_pct: float = 30.0
    least_steps: int = 100
    least_readings: int = within(2, least=1, most=_KEPT)
    clear_at: float = 0.8  # of the threshold

    id = "tokens_wasted"
    severities = ("info",)
    question = Question.IS_IT_FAST
    after = ("unmeasured_time",)
    reads = (reading_of("batch/padding_pct", keep=_KEPT), Series("step_time_s", merge="median"))
    charts = ("batch/padding_pct", "tokens_per_s")
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        shares = readings(window, "batch/padding_pct", _KEPT)
        took = window.series("step_time_s")
        if len(shares) < self.least_readings or took is None or took.total < self.least_steps:
            return None
        share = sum(shares) / len(shares)
        if share < self.padding_pct * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self.found(
            "info",
            since_step=window.step,
            evidence={
                "padding_pct": share, "readings": len(shares), "lowest_pct": min(shares), "highest_pct": max(shares),
            },
            gain_pct=min(share, 99.0),
        )  # fmt: skip
