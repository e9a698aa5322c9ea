"""init_slow: the job was started, and no step has ended yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.rule import Every, Place, Question, Rule, Series, Words
from perfagent_server.rules.window import Window

__all__ = ["InitSlow"]


@dataclass(frozen=True, kw_only=True)
class InitSlow(Rule):
    """The processes are heard for for_s, and no step has ended. 20 minutes are SageMaker's MaxInitializationTime, and what
    DLRover gives the first step.

    Only where an agent reads its process: a script that sends rows of its own may have nothing that is a step.
    """

    for_s: float = 1200.0

    id: ClassVar[str] = "init_slow"
    severities = ("warning",)
    place = Place(Question.DOES_IT_MOVE, 6)
    reads = (
        Every(15.0),
        Series("process/rss_bytes", keep=2, axis="time", ranks="apart"),
        Series("loss"),
        # The first step has phases, and no step time: it began before there was anything to time it from.
        *(Series(name, merge="median") for name in ("step_time_s", "phase/forward_s", "phase/backward_s")),
    )
    charts = ("step_time_s",)
    asks_for = "stacks"
    english = Words(
        name="No first step",
        meaning="The job runs for long, and its first step has not ended.",
        fires=(
            "When the processes of an attempt have been heard for {for_s:g} s, and no step, loss or logged value has come. "
            "It is resolved by the first step. The server asks every rank for the stacks of its threads when the alert "
            "fires."
        ),
        remedies={
            "": (
                "Look at the stacks (`perfagent stacks RUN`, or the page of the run): they show whether it downloads or "
                "tokenizes data, reads a checkpoint from a slow disk, waits for a rank that never came (look at the "
                "launcher, the network and MASTER_ADDR), or compiles. Prepare data once and keep it on disk; keep "
                "compiled code between starts (TORCHINDUCTOR_CACHE_DIR on a disk that stays)."
            ),
        },
    )
    chinese = Words(
        name="迟迟没有第一步",
        meaning="作业已运行很久，但第一个训练步还没有结束。",
        fires=(
            "某次启动的进程已有消息达 {for_s:g} 秒，但没有任何训练步、损失或记录的数值到来时触发。第一步到来后即解除。"
            "触发时，服务器向每个 rank 请求其线程的调用栈。"
        ),
        remedies={
            "": (
                "查看调用栈（`perfagent stacks RUN` 或运行页面）：它们会显示作业是在下载或分词数据、从慢速磁盘读取检查点、"
                "等待始终没有到来的 rank（检查启动器、网络和 MASTER_ADDR），还是在编译。数据只准备一次并保存在磁盘上；"
                "在多次启动之间保留编译结果（把 TORCHINDUCTOR_CACHE_DIR 设在持久磁盘上）。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        waited = window.now - window.started
        # Before the first step, readings carry the step in progress: the one after start_step, or what log() has counted.
        moves = window.step > window.start_step + 1 or bool(window.by_step)
        if waited < self.for_s or moves or "process/rss_bytes" not in window.by_time:
            return None
        return self.found(
            "warning",
            f"No step has ended in {waited / 60:.0f} minutes",
            f"No step has ended in the {waited / 60:.0f} minutes since this attempt was first heard "
            f"({len(window.heard)} of {window.world_size} ranks are heard).",
            cost=f"{spell_s(waited)} so far, on all ranks",
            since_step=window.step,
            ranks=sorted(window.heard - window.done - window.lost.keys()),
            evidence={
                "waited_s": waited, "heard_ranks": len(window.heard), "world_size": window.world_size,
                "lost_ranks": sorted(window.lost),
            },
        )  # fmt: skip
