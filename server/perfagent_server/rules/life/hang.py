"""hang: the processes are heard, but no step ends any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import TITLE, spell_s
from perfagent_server.rules.life.absent_ranks import Absence, find_absence
from perfagent_server.rules.life.answers import Answers
from perfagent_server.rules.life.stack_groups import StackGroup, apart, groups_of, said_ranks, sentence, shown
from perfagent_server.rules.rule import UNKNOWN, Events, Every, Life, Place, Question, Rule, Series, Unknown, Words
from perfagent_server.rules.window import Window

__all__ = ["Hang"]

_EVERY_S = 3.0
_MOST_PASSED = 2.0  # periods that count between two judgments


@dataclass(frozen=True, kw_only=True)
class Hang(Rule):
    """No rank has reported a step for at least for_s seconds, and for pause_times the longest pause between two steps
    of this attempt (evaluations and saves included: the rule learns them).

    The factor and the warm-up of least_steps are those of NVIDIA Resiliency Extension's learned timeouts (safety factor
    5). The first steps, in which kernels are compiled, are not judged. When the alert fires, every rank is asked for its
    stacks and its last collectives; their answers name who holds the others up, and where.
    """

    for_s: float = 60.0
    pause_times: float = 5.0
    least_steps: int = 5
    answers_s: float = 10.0

    id: ClassVar[str] = "hang"
    severities = ("critical",)
    place = Place(Question.DOES_IT_MOVE, 0)
    reads = (
        Every(_EVERY_S), Series("step_time_s", merge="median"), Events("stacks", keep=1), Events("collectives", keep=1),
    )  # fmt: skip
    charts = ("step_time_s",)
    life = Life(cooldown_steps=0, restated=True)
    asks_for = "stacks"
    state_version = 2
    english = Words(
        name="Hang",
        meaning="The processes of the run are in contact, but no step ends any more.",
        fires=(
            "When no rank has reported a step for {for_s:g} s, and for {pause_times:g} times the longest pause "
            "between two steps so far. Evaluations and saves count as pauses, so the rule learns how long they take. "
            "It judges from step {least_steps} on. The server asks every rank for the stacks of its threads when the "
            "alert fires, and groups the ranks by their stacks: a rank in a collective or in the backward pass "
            "waits for others. The rank whose stack differs is the one that they wait for, and the alert shows its source "
            "line. The rule does not wait for ranks that have not answered {answers_s:g} s after the first."
        ),
        remedies={
            "": (
                "Compare the stacks of the ranks (`perfagent stacks RUN`, or the page of the run): of several ranks, "
                "the one whose stack differs is the one that the others wait for; one that waits for its loader has "
                "a worker hanging. If the run evaluates or saves for the first time, wait for the end of that. Else "
                "stop it and start it again from its last checkpoint."
            ),
            "a rank stands apart": (
                "Look at the line where that rank stands, and at what it reads or waits for there (a file system, a "
                "queue, a lock, a service); if the line is harmless, look at its host. A branch that only some ranks "
                "take (`if rank == 0:`) must not hold a collective. If it evaluates or saves for the first time, wait "
                "for the end of that; else stop the run and start it again from its last checkpoint."
            ),
            "it waits for its loader": (
                "A loader worker hangs: `py-spy dump --pid` of the workers shows the line (often a file system or "
                "network read, or a fork with locks held). Give the DataLoader timeout=60, so that it raises instead, "
                "and set num_workers=0 once to see the error itself; start the run again from its last checkpoint."
            ),
            "a rank is silent": (
                "The others wait, and that rank does not answer: its process is gone, stopped, or in native code that "
                "does not let go of the interpreter. Look at it on its host (`py-spy dump --native --pid`, dmesg, "
                "whether the host itself answers), then start the run again from its last checkpoint."
            ),
            "all ranks wait": (
                "All ranks have called the same collective and it does not end: the connection between them is at "
                "fault. Start again with NCCL_DEBUG=INFO (gloo: TORCH_DISTRIBUTED_DEBUG=DETAIL), look for a link or "
                "card that failed (`nvidia-smi nvlink -s`, Xid in the kernel's log), and run nccl-tests on the hosts."
            ),
            "in another order": (
                "The ranks call collectives in different orders, and wait for each other: look for a branch that "
                "depends on the rank or on the data around the collectives that the message names, and make all ranks "
                "of a group call the same ones in the same order. Then start the run again from its last checkpoint."
            ),
        },
    )
    chinese = Words(
        name="挂起",
        meaning="运行的进程仍有消息，但没有任何训练步结束。",
        fires=(
            "{for_s:g} 秒内、且超过迄今最长步间停顿的 {pause_times:g} 倍时间内没有 rank "
            "报告新的步时触发。评估和保存也算停顿，因此规则会学到它们所需的时间。从第 {least_steps} 步开始判断。"
            "触发时，服务器向每个 rank 请求其线程的调用栈，并按所在位置把 rank 分组：处于集合通信或反向传播中的 rank "
            "在等待别人，停在别处的 rank 就是其他 rank 等待的对象，会连同所在代码行一并指出。"
            "首个回答之后 {answers_s:g} 秒仍未回答的 rank 不再等待。"
        ),
        remedies={
            "": (
                "比较各 rank 的调用栈（`perfagent stacks RUN` 或运行页面）：栈不同的那个 rank 正是其他 rank "
                "等待的对象；等待加载器的 rank 多半有 worker 挂起。若是首次评估或保存，请等待其结束；"
                "否则停止并从最后一个检查点重新开始。"
            ),
            "a rank stands apart": (
                "查看该 rank 所停的代码行以及它在那里读取或等待的对象（文件系统、队列、锁、服务）；若该行无害，"
                "检查其主机。只有部分 rank 进入的分支（`if rank == 0:`）中不得有集合通信。若是首次评估或保存，"
                "请等待其结束；否则停止并从最后一个检查点重新开始。"
            ),
            "it waits for its loader": (
                "加载器的 worker 挂起：用 `py-spy dump --pid` 查看 worker 所停的行（多为文件系统或网络读取，"
                "或持锁时 fork）。给 DataLoader 设 timeout=60 使其报错，并用 num_workers=0 运行一次查看错误本身；"
                "然后从最后一个检查点重新开始。"
            ),
            "a rank is silent": (
                "其他 rank 在等待，而该 rank 没有回答：进程已消失、被暂停，或处于不释放解释器的本地代码中。"
                "在其主机上查看（`py-spy dump --native --pid`、dmesg、主机是否响应），然后从最后一个检查点重新开始。"
            ),
            "all ranks wait": (
                "所有 rank 都已进入同一个集合通信而它不结束：问题在它们之间的连接。用 NCCL_DEBUG=INFO"
                "（gloo：TORCH_DISTRIBUTED_DEBUG=DETAIL）重新运行，查找故障链路或显卡"
                "（`nvidia-smi nvlink -s`、内核日志中的 Xid），并在各主机上运行 nccl-tests。"
            ),
            "in another order": (
                "各 rank 以不同顺序调用集合通信并互相等待：在消息指出的集合通信附近查找依赖 rank 或数据的分支，"
                "让同组所有 rank 以相同顺序调用相同的集合通信，然后从最后一个检查点重新开始。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | Unknown | None:
        took = window.series("step_time_s")
        if took is None or window.ended or took.total < self.least_steps:
            return None
        # lost_at: where the run hung when the pauses before it were lost with the server's state
        fresh = {"step": -1, "longest_s": 0.0, "quiet_s": 0.0, "judged": window.now}
        state = window.state_of(self, {**fresh, "lost_at": window.step if window.is_firing(self.id) else -1})
        # Neither a jump of the clock nor a time in which this server was down or behind is the run's pause.
        passed = min(max(0.0, window.now - state["judged"]), _MOST_PASSED * _EVERY_S)
        if window.step == state["step"]:
            state["quiet_s"] += passed
        else:
            state["longest_s"] = max(state["longest_s"], state["quiet_s"])
            state.update(step=window.step, quiet_s=min(passed, window.now - window.stepped))
        state["judged"] = window.now
        answers = Answers(window, self, self.answers_s)
        if window.step == state["lost_at"]:
            return UNKNOWN
        quiet, longest = state["quiet_s"], max(state["longest_s"], *took.last(took.size))
        limit = max(self.for_s, self.pause_times * longest)
        if quiet < limit:
            return None
        known = _Known.of(window, answers)
        return self.found(
            "critical",
            _cut(f"No step has ended since step {window.step:,}{known.title}"),
            f"No step has ended for {spell_s(quiet)} after step {window.step:,}; the longest pause between two steps before "
            f"was {spell_s(longest)}.{known.message}",
            cause=known.cause,
            cost="all ranks stand still",
            since_step=window.step,
            ranks=known.ranks or sorted(window.heard - window.done - window.lost.keys()),
            evidence={
                "quiet_s": quiet,
                "longest_pause_s": longest,
                "step": window.step,
                "lost_ranks": sorted(window.lost),
                **known.evidence,
            },
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """What the answers of the ranks say. title, message: what they add; ranks: those that the others wait for."""

    title: str
    message: str
    cause: str
    ranks: list[int]
    evidence: dict[str, Any]

    @classmethod
    def of(cls, window: Window, answers: Answers) -> _Known:
        groups, absence = groups_of(answers.stacks()), find_absence(answers.collectives())
        culprits = _culprits(groups, absence)
        # all that were ever heard: one whose interpreter stands still cannot answer, and is called lost by now
        answered = {rank for group in groups for rank in group.ranks}
        silent = sorted(window.heard - window.done - answered) if groups else []
        ranks = absence.ranks if absence is not None else [rank for group in culprits for rank in group.ranks]
        is_silence = bool(silent) and not ranks and all(group.waits for group in groups)
        said = [sentence(groups, culprits, len(window.heard)), "" if absence is None else absence.sentence()]
        if silent:
            said.append(f"{said_ranks(silent)} did not answer.")
        return cls(
            title=f": {said_ranks(silent).lower()} did not answer" if is_silence else _title(groups, culprits, absence),
            message="".join(f" {one}" for one in said if one),
            cause="a rank is silent" if is_silence else _cause(groups, culprits, absence),
            ranks=silent if is_silence else sorted(ranks),
            evidence={
                **({"groups": shown(groups)} if groups else {}),
                **({} if absence is None else {"absent": absence.shown()}),
                **({"silent_ranks": silent} if silent else {}),
            },
        )


def _culprits(groups: list[StackGroup], absence: Absence | None) -> list[StackGroup]:
    """Whom the others wait for: who did not join a collective, else whose stack says so."""
    if absence is None:
        return apart(groups)
    named = [group for group in groups if set(group.ranks) & set(absence.ranks)]
    return named if len(named) < len(groups) else []


def _title(groups: list[StackGroup], culprits: list[StackGroup], absence: Absence | None) -> str:
    if culprits:
        ranks = sorted(rank for group in culprits for rank in group.ranks)
        where = f" at {culprits[0].place.own}" if len(culprits) == 1 else ""
        return f": {said_ranks(ranks).lower()} {'stand' if len(ranks) > 1 else 'stands'}{where or ' apart'}"
    if absence is not None:
        return f": {said_ranks(absence.ranks).lower()} did not join {absence.operation or 'a collective'}"
    return f", at {groups[0].place.own}" if len(groups) == 1 else ""


def _cause(groups: list[StackGroup], culprits: list[StackGroup], absence: Absence | None) -> str:
    if absence is not None and absence.kind in ("order", "mismatch"):
        return "in another order"
    stand = culprits or (groups if len(groups) == 1 else [])
    if stand and all(group.in_loader for group in stand):
        return "it waits for its loader"
    if culprits or absence is not None:
        return "a rank stands apart"
    return (
        "all ranks wait"
        if groups and all(group.waits for group in groups) and sum(len(g.ranks) for g in groups) > 1
        else ""
    )


def _cut(title: str) -> str:
    return title if len(title) <= TITLE else f"{title[: TITLE - 3]}..."
