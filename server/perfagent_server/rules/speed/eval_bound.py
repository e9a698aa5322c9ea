"""eval_bound: evaluations take a large share of wall time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.rule import Life, Place, Question, Rule, Words
from perfagent_server.rules.speed.pauses import pauses, reads
from perfagent_server.rules.window import Window

__all__ = ["EvalBound"]


@dataclass(frozen=True, kw_only=True)
class EvalBound(Rule):
    """Evaluations take a large share of wall time, counted over whole intervals from the end of one to the end of the
    next: those of the newest ten minutes, or the newest three where they are rarer."""

    info_pct: float = 10.0
    warning_pct: float = 25.0
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "eval_bound"
    severities = ("info", "warning")
    place = Place(Question.IS_IT_FAST, 7)
    reads = reads("eval")
    charts = ("phase/eval_s", "step_time_s")
    life = Life(clear_s=30.0, restated=True)
    english = Words(
        name="Evaluations take the time",
        meaning="A large share of wall time goes into evaluations, and no step is made meanwhile.",
        fires=(
            "When evaluations take at least {info_pct:g} % (info) or {warning_pct:g} % (warning) of wall time. The share "
            "is counted over whole intervals, from the end of one evaluation to the end of the next, over the newest ten "
            "minutes; if there were fewer than four evaluations in them, over the newest four. The longest evaluation "
            "counts as long as the second longest, and the first one not at all. In the first minute of a run the rule "
            "judges only evaluations at even intervals, and a warning needs at least three."
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
            "结束到下一次结束）计算，取最近十分钟；若其中不足四次，则取最近四次。最长的一次只按第二长的计，"
            "第一次不计。运行的第一分钟内只判断间隔均匀的评估；警告至少需要三次评估。"
        ),
        remedies={
            "": (
                "降低评估频率（增大 eval_steps 或 val_check_interval），或平时只在固定的评估子集上评估、结束时再评估"
                "全部数据。使用 torch.inference_mode() 和比训练更大的批次（不保留梯度），并为评估的 DataLoader 配置 worker。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        found = pauses(window, self, "eval")
        if found is None:
            return None
        share = 100 * found.share
        if share < self.info_pct * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self.found(
            "warning" if share >= self.warning_pct and found.is_settled else "info",
            f"Evaluations take {share:.0f} % of wall time",
            f"Evaluations take {share:.0f} % of wall time: {spell_s(found.each_s)} each, one every {found.every_steps:,} "
            f"steps ({spell_s(found.every_s)}; the newest {found.count}). Evaluating half as often, every "
            f"{2 * found.every_steps:,} steps, would save {share / 2:.0f} % of the time.",
            cost=f"{spell_s(found.each_s)} every {spell_s(found.every_s)}, {share:.0f} % of wall time",
            since_step=window.at,
            evidence={
                "share_pct": share, "evaluations": found.count, "seconds_each": found.each_s,
                "longest_s": found.longest_s, "every_steps": found.every_steps, "every_s": found.every_s,
                "over_s": found.over_s, "share_of_run_pct": 100 * window.wall.whole().share("eval"),
            },
            gain_pct=share / 2,
        )  # fmt: skip
