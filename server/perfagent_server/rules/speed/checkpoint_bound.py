"""checkpoint_bound: saving takes a large share of wall time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.rule import Life, Place, Question, Rule, Words
from perfagent_server.rules.speed.pauses import pauses, reads
from perfagent_server.rules.window import Window

__all__ = ["CheckpointBound"]


@dataclass(frozen=True, kw_only=True)
class CheckpointBound(Rule):
    """Saves take a large share of wall time, counted over whole intervals from the end of one to the end of the next:
    those of the newest ten minutes, or the newest three where they are rarer. Only what the training waited for counts: a
    save that is written beside the training costs the copy."""

    info_pct: float = 10.0
    warning_pct: float = 25.0
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "checkpoint_bound"
    severities = ("info", "warning")
    place = Place(Question.IS_IT_FAST, 5)
    reads = reads("checkpoint")
    charts = ("phase/checkpoint_s", "step_time_s")
    life = Life(clear_s=30.0, restated=True)
    english = Words(
        name="Saving takes the time",
        meaning="A large share of wall time goes into saving checkpoints, and no step is made meanwhile.",
        fires=(
            "When saves take at least {info_pct:g} % (info) or {warning_pct:g} % (warning) of wall time. The share is "
            "counted over whole intervals, from the end of one save to the end of the next, over the newest ten minutes; "
            "if there were fewer than four saves in them, over the newest four. The longest save counts as long as the "
            "second longest, and the first one not at all. In the first minute of a run the rule judges only saves at "
            "even intervals, and a warning needs at least three. What is written beside the training does not count."
        ),
        remedies={
            "": (
                "Save beside the training: perfagent.Checkpoint(..., asynchronous=True), or "
                "torch.distributed.checkpoint.async_save. Or save more rarely (a larger save_steps or "
                "every_n_train_steps), or to a disk of this machine from which another process copies; save the weights "
                "alone where nothing will be resumed from them."
            ),
        },
    )
    chinese = Words(
        name="保存占用时间",
        meaning="大量墙钟时间花在保存检查点上，其间没有训练步进行。",
        fires=(
            "保存至少占墙钟时间的 {info_pct:g} %（提示）或 {warning_pct:g} %（警告）时触发。占比按完整间隔（从一次保存"
            "结束到下一次结束）计算，取最近十分钟；若其中不足四次，则取最近四次。最长的一次只按第二长的计，"
            "第一次不计。运行的第一分钟内只判断间隔均匀的保存；警告至少需要三次保存。与训练并行写入的部分不计入。"
        ),
        remedies={
            "": (
                "与训练并行保存：perfagent.Checkpoint(..., asynchronous=True) 或 "
                "torch.distributed.checkpoint.async_save。或降低保存频率（增大 save_steps 或 every_n_train_steps），"
                "或先写到本机磁盘再由其他进程复制；不会用来恢复训练的检查点只保存权重。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        found = pauses(window, self, "checkpoint")
        if found is None:
            return None
        share = 100 * found.share
        if share < self.info_pct * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self.found(
            "warning" if share >= self.warning_pct and found.is_settled else "info",
            f"Saving takes {share:.0f} % of wall time",
            f"Saving takes {share:.0f} % of wall time: {spell_s(found.each_s)} each, one every {found.every_steps:,} "
            f"steps ({spell_s(found.every_s)}; the newest {found.count}). Saving half as often, every "
            f"{2 * found.every_steps:,} steps, would save {share / 2:.0f} % of the time.",
            cost=f"{spell_s(found.each_s)} every {spell_s(found.every_s)}, {share:.0f} % of wall time",
            since_step=window.at,
            evidence={
                "share_pct": share, "saves": found.count, "seconds_each": found.each_s, "longest_s": found.longest_s,
                "every_steps": found.every_steps, "every_s": found.every_s, "over_s": found.over_s,
                "share_of_run_pct": 100 * window.wall.whole().share("checkpoint"),
            },
            gain_pct=share / 2,
        )  # fmt: skip
