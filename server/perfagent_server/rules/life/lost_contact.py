"""lost_contact: nothing is heard from a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.rule import Events, Life, Place, Question, Rule, Words
from perfagent_server.rules.window import Window

__all__ = ["LostContact"]


@dataclass(frozen=True, kw_only=True)
class LostContact(Rule):
    """Nothing was heard from a process for after_s seconds. The engine measures the silence by its own monotonic clock,
    and not in the first minute after a start, so that neither a restart nor a jump of the clock looks like a loss."""

    after_s: float = 30.0

    id: ClassVar[str] = "lost_contact"
    severities = ("info", "critical")
    place = Place(Question.DOES_IT_MOVE, 4)
    reads = (Events("contact"),)
    life = Life(cooldown_steps=0, restated=True)
    english = Words(
        name="Contact lost",
        meaning="The server hears nothing from a training process.",
        fires=(
            "When the server heard nothing from a process for {after_s:g} s. A process that was not heard since the "
            "server started is not called lost in the server's first minute. If a run without an agent fell silent, "
            "no alert is raised; only the verdict shows the silence, as info. Data from the spool of a dead process "
            "may arrive later; this data does not resolve the alert."
        ),
        remedies={
            "": (
                "Look whether the process and its host are alive, then at the network between them and this server. If a "
                "signal ended the process (SIGTERM of a scheduler, kill -9), start it with `perfagent run`, which "
                "reports such an end at once; perfagent.attach() alone cannot."
            ),
        },
    )
    chinese = Words(
        name="失去联系",
        meaning="服务器收不到某个训练进程的任何消息。",
        fires="{after_s:g} 秒内没有收到某个进程的任何消息时触发（服务器启动后的第一分钟内，未曾联系过的进程除外）。",
        remedies={
            "": (
                "检查该进程及其主机是否存活，然后检查它们与服务器之间的网络。如果进程是被信号结束的（调度器的 SIGTERM、"
                "kill -9），请用 `perfagent run` 启动它，它会立即报告这种结束；单独的 perfagent.attach() 做不到。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        lost = {rank: silence for rank, silence in window.lost.items() if silence >= self.after_s}
        if not lost or window.ended:
            return None
        ranks = sorted(lost)
        several = f"Rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} of {window.world_size} ranks"
        who = several if window.world_size > 1 else "The training process"
        at = f"after step {window.step:,}" if window.step else "before its first step"
        return self.found(
            "critical",
            f"{who} went silent {at}",
            # The past tense: the sentence stands as long as the alert does, and is not written anew every second.
            f"{who} went silent {at}: nothing was heard for {max(lost.values()):.0f} s.",
            since_step=window.step,
            ranks=ranks,
            evidence={"silence_s": max(lost.values()), "step": window.step},
        )
