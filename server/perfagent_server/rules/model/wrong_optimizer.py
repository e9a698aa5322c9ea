"""wrong_optimizer: parameters get gradients, and no optimizer has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent.wire.limits import whole
from perfagent_server.rules.model.parameter_events import PARAMETERS, fraction, names_in, newest
from perfagent_server.rules.rule import Life, Question, Rule
from perfagent_server.rules.window import Noted, Window

__all__ = ["WrongOptimizer"]


@dataclass(frozen=True, kw_only=True)
class WrongOptimizer(Rule):
    """The agent compares the model's parameters with those of the optimizers, also of those whose turn has not come, and
    says so every half a minute; this rule weighs the share. Frozen parameters get no gradients and do not count. The
    other way round, an optimizer whose parameters all go without a gradient in 20 steps has others than are trained. And
    gradients that are still there when the next backward pass begins are added up for ever.
    """

    share_pct: float = 1.0

    id: ClassVar[str] = "wrong_optimizer"
    severities = ("warning",)
    question = Question.DOES_IT_LEARN
    after = ("data_bug",)
    reads = (PARAMETERS,)
    charts = ("params/unoptimized_share",)
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        for what, cause in (("without_gradient", "no gradient"), ("uncleared", "never cleared")):
            of_all = newest(window, what)
            if of_all is not None and fraction(of_all, "share"):
                return self._of_all(window, of_all, cause)
        told = newest(window, "unoptimized")
        if told is None:
            return None
        share = 100 * fraction(told, "share")
        if share < self.share_pct:
            return None
        step, steps = told.step or window.step, whole(told.data.get("steps")) or 0
        return self.found(
            "warning",
            since_step=max(window.start_step, step - steps),
            evidence={
                "share_pct": share, "parameters": names_in(told), "count": whole(told.data.get("count")),
                "numbers": whole(told.data.get("numbers")), "step": step, "steps": steps,
            },
        )  # fmt: skip

    def _of_all(self, window: Window, told: Noted, cause: str) -> Finding:
        step, steps = told.step or window.step, whole(told.data.get("steps")) or 0
        numbers = whole(told.data.get("numbers"))
        return self.found(
            "warning",
            cause=cause,
            since_step=max(window.start_step + 1, step - steps),
            evidence={"share_pct": 100.0, "numbers": numbers, "step": step, "steps": steps},
        )
