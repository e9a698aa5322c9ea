"""eval_bound: evaluations take a large share of wall time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent_server.rules.rule import Place, Question, Words
from perfagent_server.rules.speed.pauses import PauseRule, reads

__all__ = ["EvalBound"]


@dataclass(frozen=True, kw_only=True)
class EvalBound(PauseRule):
    """Evaluations take a large share of wall time, counted over whole intervals from the end of one to the end of the
    next: those of the newest ten minutes, or the newest four where they are rarer."""

    id: ClassVar[str] = "eval_bound"
    phase, take, doing, counted = "eval", "Evaluations take", "Evaluating", "evaluations"
    place = Place(Question.IS_IT_FAST, 7)
    reads = reads("eval")
    charts = ("phase/eval_s", "step_time_s")
    english = Words(
        name="Evaluations take the time",
        meaning="A large share of wall time goes into evaluations, and no step is made meanwhile.",
        fires=(
            "When evaluations take at least {info_pct:g} % (info) or {warning_pct:g} % (warning) of wall time. The "
            "share is counted over whole intervals, from the end of one evaluation to the end of the next, over the "
            "newest ten minutes; if there were fewer than four evaluations in them, over the newest four. The first "
            "evaluation does not count, because it may compile. The longest one counts only as much as the second "
            "longest, so a single long one raises no alert. In the first minute of a run the rule judges only "
            "evaluations at even intervals. A warning needs at least three."
        ),
        remedies={
            "": (
                "Evaluate more rarely (a larger eval_steps or val_check_interval), or on a fixed sample of the evaluation "
                "data with the whole of it at the end. Use torch.inference_mode() and a larger batch than in training: "
                "no gradients are kept. Give the evaluation's DataLoader workers, too."
            ),
        },
    )
    chinese = Words(
        name="评估占用时间",
        meaning="大量墙钟时间花在评估上，其间没有训练步进行。",
        fires=(
            "评估至少占墙钟时间的 {info_pct:g} %（提示）或 {warning_pct:g} %（警告）时触发。占比按完整间隔（从一次评估"
            "结束到下一次结束）计算，取最近十分钟；若其中不足四次，则取最近四次。第一次不计（可能在编译）；"
            "最长的一次只按第二长的计，因此单独一次很长的评估不会告警。运行的第一分钟内只判断间隔均匀的评估；警告至少需要三次评估。"
        ),
        remedies={
            "": (
                "降低评估频率（增大 eval_steps 或 val_check_interval），或平时只在固定的评估子集上评估、结束时再评估"
                "全部数据。使用 torch.inference_mode() 和比训练更大的批次（不保留梯度），并为评估的 DataLoader 配置 worker。"
            ),
        },
    )
