"""checkpoint_bound: saving takes a large share of wall time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent_server.rules.rule import Place, Question, Words
from perfagent_server.rules.speed.pauses import PauseRule, reads

__all__ = ["CheckpointBound"]


@dataclass(frozen=True, kw_only=True)
class CheckpointBound(PauseRule):
    """Saves take a large share of wall time, counted over whole intervals from the end of one to the end of the next:
    those of the newest ten minutes, or the newest four where they are rarer. Only what the training waited for counts: a
    save that is written beside the training costs the copy."""

    id: ClassVar[str] = "checkpoint_bound"
    phase, take, doing, counted = "checkpoint", "Saving takes", "Saving", "saves"
    place = Place(Question.IS_IT_FAST, 5)
    reads = reads("checkpoint")
    charts = ("phase/checkpoint_s", "step_time_s")
    english = Words(
        name="Saving takes the time",
        meaning="A large share of wall time goes into saving checkpoints, and no step is made meanwhile.",
        fires=(
            "When saves take at least {info_pct:g} % (info) or {warning_pct:g} % (warning) of wall time. The share "
            "is counted over whole intervals, from the end of one save to the end of the next, over the newest ten "
            "minutes; if there were fewer than four saves in them, over the newest four. The first save does not "
            "count. The longest one counts only as much as the second longest, so a single long one raises no alert. "
            "In the first minute of a run the rule judges only saves at even intervals. A warning needs at least "
            "three. What is written beside the training does not count."
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
            "结束到下一次结束）计算，取最近十分钟；若其中不足四次，则取最近四次。第一次不计；"
            "最长的一次只按第二长的计，因此单独一次很长的保存不会告警。运行的第一分钟内只判断间隔均匀的保存；警告至少需要三次保存。与训练并行写入的部分不计入。"
        ),
        remedies={
            "": (
                "与训练并行保存：perfagent.Checkpoint(..., asynchronous=True) 或 "
                "torch.distributed.checkpoint.async_save。或降低保存频率（增大 save_steps 或 every_n_train_steps），"
                "或先写到本机磁盘再由其他进程复制；不会用来恢复训练的检查点只保存权重。"
            ),
        },
    )
