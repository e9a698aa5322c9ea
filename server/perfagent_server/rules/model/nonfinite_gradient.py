"""nonfinite_gradient: a gradient is NaN or infinite, and the step was taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.evidence import surroundings, where
from perfagent_server.rules.model import grad_scaler
from perfagent_server.rules.model.exploding import exploded
from perfagent_server.rules.model.grad_scaler import was_skipped
from perfagent_server.rules.rule import Life, Question, Rule, Series
from perfagent_server.rules.window import Window

__all__ = ["NonfiniteGradient"]


@dataclass(frozen=True, kw_only=True)
class NonfiniteGradient(Rule):
    """With a GradScaler, overflow is how it looks for its scale: a step that it skipped is no fault, while the scale is
    above lowest_scale and not more than excused_steps in a row are skipped (its search from 65536 takes 16 halvings
    at most). The counter of skipped steps may follow one step later, so that such a run is judged wait_steps behind
    its newest step.
    """

    excused_steps: int = 20
    lowest_scale: float = 1.0
    wait_steps: int = 1

    id: ClassVar[str] = "nonfinite_gradient"
    severities = ("critical",)
    question = Question.ARE_ITS_NUMBERS_FINITE
    after = ("nonfinite_loss",)
    reads = (
        Series("grad/norm", merge="max", judged=True),
        Series("grad/nonfinite", merge="sum", judged=True),
        Series("grad/local_square_sum", merge="root of sum", part_of="grad/norm"),
        Series(LOSS),
        Series("lr", merge="max"),
        *grad_scaler.READS,
    )
    urgent = "gradient"
    charts = ("grad/norm", "grad/nonfinite")
    life = Life(clear_steps=50, outlives_run=True)
    joins = ("nonfinite_loss",)
    same_step = True

    def judge(self, window: Window) -> Finding | None:
        bad = window.nonfinite_at("gradient", window.at)
        if bad is None:
            return None
        scale = window.by_step.get("amp/scale")
        if scale is not None and scale.values and was_skipped(window, window.at, later=self.wait_steps):
            row = 0
            while row <= self.excused_steps and window.nonfinite_at("gradient", window.at - row) is not None:
                row += 1
            if row <= self.excused_steps and scale.values[-1] >= self.lowest_scale:
                return None
        counts = window.by_step.get("grad/nonfinite")
        count = (
            next((value for step, value in zip(counts.steps, counts.values, strict=True) if step == window.at), None)
            if counts
            else None
        )
        losses = window.by_step["loss"].before(window.at, 20) if "loss" in window.by_step else []
        norms = exploded(window, window.at)
        return self.found(
            "critical",
            cause="the gradient grew before" if norms else "",
            since_step=window.at,
            ranks=list(bad.ranks),
            evidence={
                "step": window.at, "tensors": int(count) if count and math.isfinite(count) else None, **norms,
                **where(window, bad.ranks), **surroundings(window), "last_losses": losses,
            },
        )  # fmt: skip
