"""lost_contact: nothing is heard from a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import where
from perfagent_server.rules.rule import Events, Life, Question, Rule
from perfagent_server.rules.window import Window

__all__ = ["LostContact"]


@dataclass(frozen=True, kw_only=True)
class LostContact(Rule):
    """Nothing came from a process. The engine measures the silence by its own monotonic clock, and not in the first minute
    after a start: neither a restart nor a jump of the clock looks like a loss."""

    after_s: float = 30.0

    id: ClassVar[str] = "lost_contact"
    severities = ("info", "critical")
    question = Question.DOES_IT_MOVE
    after = ("ecc",)
    reads = (Events("contact"),)
    life = Life(cooldown_steps=0, restated=True)

    def judge(self, window: Window) -> Finding | None:
        lost = {rank: silence for rank, silence in window.lost.items() if silence >= self.after_s}
        if not lost or window.ended:
            return None
        ranks = sorted(lost)
        return self.found(
            "critical",
            since_step=window.step,
            ranks=ranks,
            evidence={"silence_s": max(lost.values()), "step": window.step or None, **where(window, ranks)},
        )
