"""rank_absent: the ranks of a run that hangs wait in a collective that some of them did not join."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import TITLE
from perfagent_server.rules.life.absent_ranks import find_absence
from perfagent_server.rules.life.answers import Answers
from perfagent_server.rules.life.hang import Hang
from perfagent_server.rules.life.stack_groups import groups_of, said_ranks, shown
from perfagent_server.rules.rule import Events, Every, Life, Place, Question, Rule, Words
from perfagent_server.rules.window import Window

__all__ = ["RankAbsent"]


@dataclass(frozen=True, kw_only=True)
class RankAbsent(Rule):
    """While a run hangs: a rank has called fewer collectives of a process group than another one that waits there, and
    waits for nobody itself.

    torch's flight recorder counts the collectives of each process group on every rank, as NVIDIA Resiliency Extension
    reads it. Ranks of other groups, and ranks that are behind because they wait elsewhere, are no culprits.
    """

    answers_s: float = 10.0

    id: ClassVar[str] = "rank_absent"
    severities = ("critical",)
    place = Place(Question.DOES_IT_MOVE, 1)
    reads = (Every(3.0), Events("collectives", keep=1), Events("stacks", keep=1))
    charts = ("step_time_s",)
    life = Life(cooldown_steps=0, restated=True)
    joins = (Hang.id,)
    english = Words(
        name="Rank missing from a collective",
        meaning="Ranks wait in a collective of torch.distributed that another rank of the group did not join.",
        fires=(
            "While `hang` is open, from what every rank answers of torch's flight recorder (gloo and NCCL, without a "
            "setting): a rank has called fewer collectives of a process group than one that waits there, and waits "
            "for nobody itself. It is compared only with ranks of its own groups. Ranks that have not answered "
            "{answers_s:g} s after the first are not waited for. It belongs to the alert of `hang`, which names the "
            "rank, the collective and the line."
        ),
        remedies={
            "": (
                "Look at the line where that rank stands, in the evidence: what it reads or waits for there, and "
                "whether its host is well. If it went past the collective, a branch that depends on the rank or on "
                "the data left it out (`if rank == 0:`, a `continue` or an exception that is caught, loaders of "
                "unequal length: use join() of DDP, or drop_last=True)."
            ),
            "order": (
                "Let all ranks of a group call the same collectives in the same order: look for a branch that depends "
                "on the rank or the data around the ones that the message names, and for groups that are used from "
                "two threads or streams."
            ),
        },
    )
    chinese = Words(
        name="有 rank 未加入集合通信",
        meaning="一些 rank 在 torch.distributed 的集合通信中等待，而组内另一个 rank 没有加入。",
        fires=(
            "`hang` 打开期间，根据每个 rank 报告的 torch flight recorder（gloo 与 NCCL，无需设置）：某个 rank 在一个进程组中"
            "调用的集合通信少于正在其中等待的 rank，且它自己不在等待任何 rank。只与同组的 rank 比较。"
            "首个回答之后 {answers_s:g} 秒仍未回答的 rank 不再等待。它并入 `hang` 的警报，后者指出 rank、集合通信和代码行。"
        ),
        remedies={
            "": (
                "查看证据中该 rank 所停的代码行：它在那里读取或等待什么，主机是否正常。若它越过了该集合通信，"
                "则是依赖 rank 或数据的分支漏掉了它（`if rank == 0:`、`continue`、被捕获的异常、"
                "各 rank 加载器长度不等：用 DDP 的 join() 或 drop_last=True）。"
            ),
            "order": (
                "让同组所有 rank 以相同顺序调用相同的集合通信：在消息指出的集合通信附近查找依赖 rank 或数据的分支，"
                "以及被两个线程或流同时使用的组。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        if window.ended or not window.is_firing(Hang.id):
            return None
        answers = Answers(window, self, self.answers_s)
        absence = find_absence(answers.collectives())
        if absence is None:
            return None
        groups = [group for group in groups_of(answers.stacks()) if set(group.ranks) & set(absence.ranks)]
        where = "".join(
            f" {said_ranks(group.ranks)} {'stand' if len(group.ranks) > 1 else 'stands'} at {group.place}."
            for group in groups[:3]
        )
        who = said_ranks(absence.ranks)
        what = "called another collective than" if absence.kind == "mismatch" else "did not join"
        return self.found(
            "critical",
            f"{who} {what} {absence.operation or 'a collective'} of group {absence.group}"[:TITLE],
            f"{absence.sentence()}{where}",
            cause="" if absence.kind == "absent" else "order",
            cost="all ranks stand still",
            since_step=window.step,
            ranks=absence.ranks,
            evidence={"absent": absence.shown(), "groups": shown(groups), "step": window.step},
        )
