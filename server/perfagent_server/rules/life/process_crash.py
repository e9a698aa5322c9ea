"""process_crash: a process ended that should not have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.life.first_failure import TOGETHER_S, Failure, first_of, lost_a_peer
from perfagent_server.rules.life.oom_observed import is_oom
from perfagent_server.rules.rule import Events, Life, Place, Question, Rule, Words
from perfagent_server.rules.window import End, Window

__all__ = ["ProcessCrash"]

_NATIVE = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")


@dataclass(frozen=True, kw_only=True)
class ProcessCrash(Rule):
    """A process ended that should not have: an exception, a non-zero exit, a signal.

    Preemption and an interrupt from the keyboard are told as info, which no channel sends by default. Running out of
    memory has its own rule. The first failure leads, by the clocks of the ranks and in whatever order they report: what
    the launcher then does to the other ranks is its consequence. So is an error that says that another process is gone,
    where another rank ended at the same time without saying so, or was preempted before.
    """

    id: ClassVar[str] = "process_crash"
    severities = ("info", "critical")
    place = Place(Question.IS_IT_DEAD, 2)
    reads = (Events("state"),)
    life = Life(outlives_run=True, restated=True)
    joins = ("oom_observed",)
    english = Words(
        name="Process crashed",
        meaning="A process of the run ended that should not have: by an exception, an exit code or a signal.",
        fires=(
            "When a process ended by an exception, a non-zero exit code or (as `perfagent run` reports it) a signal. "
            "Preemption and Ctrl-C are info. "
            "If several ranks failed, the finding describes the earliest failure by the clocks of the ranks, even if "
            "it was reported last. An error that only says that another process is gone is passed over, if another "
            "rank ended within 3 s of it."
        ),
        remedies={
            "": (
                "Look at what the script printed last, fix the cause, and start the run again from its last checkpoint."
            ),
            "preempted": "Start the run again from its last checkpoint.",
            "the script ended itself": (
                "The script ended itself: look at what it printed last, and for sys.exit() in its code; fix the "
                "cause, and start the run again from its last checkpoint."
            ),
            "exception": "Read the exception, fix its cause, and start the run again from its last checkpoint.",
            "KeyError": (
                "The data, or a dict, has no such key: compare the fields of a sample (dataset[0].keys()) with what the "
                "script, its chat template and its collate function read. A file may hold 'messages' where the script reads "
                "'conversations', a line may lack the field, and the Trainer of transformers drops columns unless "
                "remove_unused_columns=False. Fix the cause, and start the run again from its last checkpoint."
            ),
            "IndexError": (
                'An index is beyond the end. In an embedding ("index out of range in self") it is a token or an id that the '
                "table does not have: compare the largest id of the batch with num_embeddings, and call "
                "model.resize_token_embeddings(len(tokenizer)) after tokens were added. Else look at the last line of your "
                "code in the traceback: an empty or short sample, or a __len__ larger than the data. Fix the cause, and "
                "start the run again from its last checkpoint."
            ),
            "SIGBUS": (
                "A file that was mapped into memory could not be read or written: most often /dev/shm is full (start "
                "the container with --shm-size=8g or --ipc=host, or use fewer DataLoader workers), or a mapped data "
                "file was cut short or its disk failed; fix the cause, and start the run again from its last "
                "checkpoint."
            ),
            "native code": (
                "It crashed outside of Python: start it with PYTHONFAULTHANDLER=1 to see the line, look at what it "
                "printed last, and at the versions of torch, driver and compiled extensions; fix the cause, and "
                "start the run again from its last checkpoint."
            ),
            "killed": (
                "It could not say why: look for who sent the signal, such as the kernel when memory ran out (dmesg), "
                "a limit of the container or of the batch system (time, memory), or a person; fix the cause, and "
                "start the run again from its last checkpoint."
            ),
            "lost another rank": (
                "The error says that the process at the other end was gone: look at the other ranks for one that "
                "ended or fell silent before it, at their hosts (a kill, memory) and at the network between them; "
                "fix the cause, and start the run again from its last checkpoint."
            ),
        },
    )
    chinese = Words(
        name="进程崩溃",
        meaning="运行的某个进程因异常、退出码或信号意外结束。",
        fires=(
            "某个进程因异常、非零退出码或信号（由 `perfagent run` 报告）结束时触发；抢占和 Ctrl-C 为提示。多个 rank 失败时，"
            "按各自时钟最早的失败为准。"
        ),
        remedies={
            "": "查看脚本最后的输出，修复原因，然后从最后一个检查点重新开始。",
            "preempted": "从最后一个检查点重新启动运行。",
            "the script ended itself": (
                "脚本自行结束：查看最后的输出以及代码中的 sys.exit()，修复后从最后一个检查点重新开始。"
            ),
            "exception": "阅读异常信息，修复原因，然后从最后一个检查点重新开始。",
            "KeyError": (
                "数据或字典中没有这个键：把一个样本的字段（dataset[0].keys()）与脚本、聊天模板和 collate 函数读取的字段比较。"
                "文件中可能是 'messages' 而脚本读取 'conversations'，某一行可能缺少该字段；transformers 的 Trainer 会丢弃列，"
                "除非设置 remove_unused_columns=False。修复后从最后一个检查点重新开始。"
            ),
            "IndexError": (
                '下标超出范围。若在 embedding 中（"index out of range in self"），则是表中没有的 token 或 id：比较批次中最大的 '
                "id 与 num_embeddings，添加 token 之后调用 model.resize_token_embeddings(len(tokenizer))。"
                "否则查看回溯中你的代码的最后一行：空的或过短的样本，或大于数据量的 __len__。修复后从最后一个检查点重新开始。"
            ),
            "SIGBUS": (
                "映射到内存的文件无法读写：多半是 /dev/shm 已满（用 --shm-size=8g 或 --ipc=host 启动容器，或减少 "
                "worker），或数据文件被截断、磁盘故障。"
            ),
            "native code": (
                "崩溃发生在 Python 之外：用 PYTHONFAULTHANDLER=1 启动以查看代码行，并检查 torch、驱动和编译扩展的版本。"
            ),
            "killed": (
                "进程无法说明原因：查找信号来源，例如内存耗尽时的内核（dmesg）、容器或作业系统的时间/内存限制，"
                "或某个人。"
            ),
            "lost another rank": (
                "错误表明另一端的进程已消失：查看其他 rank 中更早结束或失联的那个，以及它们的主机和网络。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        ends = [end for end in window.ends if end.state in ("failed", "killed", "preempted") and not is_oom(end)]
        if not ends:
            return None
        preempted = min((end.time for end in ends if end.state == "preempted"), default=math.inf)
        crashes = [
            end
            for end in ends
            if end.state != "preempted"
            and not _by_hand(end)
            and not (0.0 < end.time - preempted <= TOGETHER_S and lost_a_peer(_said(end)))
        ]
        first = self._leading(crashes or ends)
        step = first.step if first.step is not None else window.step
        if not crashes:
            what = "was preempted (SIGTERM)" if first.state == "preempted" else "was interrupted from the keyboard"
        else:
            what = "failed" if first.state == "failed" else "was killed"
        said = first.reason or first.exception
        return self.found(
            "critical" if crashes else "info",
            f"Rank {first.rank} {what} after step {step:,}",
            f"Rank {first.rank} {what} after step {step}" + (f": {_last_line(said)}" if said else "."),
            cause=_cause(window, first) if crashes else "preempted",
            since_step=step,
            ranks=sorted({end.rank for end in (crashes or ends)}),
            evidence={
                "state": first.state, "reason": first.reason, "exception": first.exception,
                "traceback": "\n".join(first.traceback.splitlines()[-20:]),
            },
        )  # fmt: skip

    @staticmethod
    def _leading(ends: list[End]) -> End:
        return ends[first_of([Failure(end.time, end.rank, end.state, _said(end)) for end in ends])]


def _cause(window: Window, end: End) -> str:
    """Which remedy fits, by what is known of the end: an exception, a signal or an exit code."""
    if window.world_size > 1 and lost_a_peer(_said(end)):
        return "lost another rank"
    if end.exception == "SystemExit" or end.reason.startswith("exit code"):
        return "the script ended itself"
    if end.exception or end.traceback:
        name = _kind(end)
        return name if name in ("KeyError", "IndexError") else "exception"
    if "SIGBUS" in end.reason:
        return "SIGBUS"
    if any(signal in end.reason for signal in _NATIVE):
        return "native code"
    return "killed" if end.state == "killed" else ""


def _kind(end: End) -> str:
    """The name of its exception, without module and message."""
    return (end.exception or end.reason).partition(":")[0].rpartition(".")[2].strip()


def _said(end: End) -> str:
    return f"{end.exception}\n{end.reason}"


def _by_hand(end: End) -> bool:
    return "KeyboardInterrupt" in end.exception or "KeyboardInterrupt" in end.reason or "SIGINT" in end.reason


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    line = " ".join(lines[-1].split()) if lines else ""
    return line if len(line) <= 300 else line[:297] + "..."
