"""eval_bound: evaluations take a large share of wall time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent_server.rules.rule import Question
from perfagent_server.rules.speed.pauses import PauseRule, reads

__all__ = ["EvalBound"]


@dataclass(frozen=True, kw_only=True)
class EvalBound(PauseRule):
    """What evaluations cost; pauses.py has the method."""

    id: ClassVar[str] = "eval_bound"
    phase, counted = "eval", "evaluations"
    question = Question.IS_IT_FAST
    after = ("comm_bound",)
    reads = reads("eval")
    charts = ("phase/eval_s", "step_time_s")
