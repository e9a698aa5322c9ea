"""checkpoint_bound: saving takes a large share of wall time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent_server.rules.rule import Question
from perfagent_server.rules.speed.pauses import PauseRule, reads

__all__ = ["CheckpointBound"]


@dataclass(frozen=True, kw_only=True)
class CheckpointBound(PauseRule):
    """What the training waited for counts: a save that is written beside the training costs only the copy."""

    id: ClassVar[str] = "checkpoint_bound"
    phase, counted = "checkpoint", "saves"
    question = Question.IS_IT_FAST
    after = ("h2d_bound",)
    reads = reads("checkpoint")
    charts = ("phase/checkpoint_s", "step_time_s")
