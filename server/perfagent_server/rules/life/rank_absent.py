"""rank_absent: the ranks of a run that hangs wait in a collective that some of them did not join."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.life.absent_ranks import find_absence
from perfagent_server.rules.life.answers import Answers
from perfagent_server.rules.life.hang import Hang
from perfagent_server.rules.life.stack_groups import groups_of, shown
from perfagent_server.rules.rule import Events, Every, Life, Question, Rule
from perfagent_server.rules.window import Window

__all__ = ["RankAbsent"]


@dataclass(frozen=True, kw_only=True)
class RankAbsent(Rule):
    """Some ranks wait in a collective that another one did not join.

    torch's flight recorder counts the collectives of each process group on every rank; NVIDIA Resiliency Extension reads it
    the same way. Ranks of other groups, and those that are behind because they wait elsewhere, are no culprits.
    """

    id: ClassVar[str] = "rank_absent"
    severities = ("critical",)
    question = Question.DOES_IT_MOVE
    after = ("hang",)
    reads = (Every(3.0), Events("collectives", keep=1), Events("stacks", keep=1))
    charts = ("step_time_s",)
    life = Life(cooldown_steps=0, restated=True)
    joins = (Hang.id,)

    def judge(self, window: Window) -> Finding | None:
        if window.ended:
            return None
        answers = Answers(window, self)  # those that come before the alert, too
        if not window.is_firing(Hang.id):
            return None
        absence = find_absence(answers.collectives())
        if absence is None:
            return None
        groups = [group for group in groups_of(answers.stacks()) if set(group.ranks) & set(absence.ranks)]
        return self.found(
            "critical",
            cause="" if absence.kind == "absent" else "order",
            since_step=window.step,
            ranks=absence.ranks,
            evidence={
                "absent_ranks": absence.ranks, "group": absence.group, "operation": absence.operation, "absent": absence.shown(),
                "groups": shown(groups), "step": window.step, "world_size": window.world_size,
            },
        )  # fmt: skip
