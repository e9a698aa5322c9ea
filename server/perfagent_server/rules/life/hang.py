"""hang: the processes are heard, but no step ends any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Place, Question, Rule, Series, Unknown, Words
from perfagent_server.rules.window import Window

__all__ = ["Hang"]

_EVERY_S = 3.0
_MOST_PASSED = 2.0  # periods that count between two judgements


@dataclass(frozen=True, kw_only=True)
class Hang(Rule):
    """No rank has reported a step for at least for_s seconds, and for pause_times the longest pause between two steps
    of this attempt (evaluations and saves included: the rule learns them).

    The factor and the warm-up of least_steps are those of NVIDIA Resiliency Extension's learned timeouts (safety factor
    5). The first steps, in which kernels are compiled, are not judged.
    """

    for_s: float = 60.0
    pause_times: float = 5.0
    least_steps: int = 5

    id: ClassVar[str] = "hang"
    severities = ("critical",)
    place = Place(Question.DOES_IT_MOVE, 1)
    reads = (Every(_EVERY_S), Series("step_time_s", merge="median"))
    charts = ("step_time_s",)
    life = Life(cooldown_steps=0, restated=True)
    asks_for = "stacks"
    english = Words(
        name="Hang",
        meaning="The processes of the run are heard, but no step ends any more.",
        fires=(
            "When no rank has reported a step for {for_s:g} s, and for {pause_times:g} times the longest pause "
            "between two steps so far. Evaluations and saves count as pauses, so the rule learns how long they take. "
            "It judges from step {least_steps} on. The server asks every rank for the stacks of its threads when the "
            "alert fires."
        ),
        remedies={
            "": (
                "Compare the stacks of the ranks (`perfagent stacks RUN`, or the page of the run): of several ranks, "
                "the one whose stack differs is the one that the others wait for; one that waits for its loader has "
                "a worker hanging. If the run evaluates or saves for the first time, wait for the end of that. Else "
                "stop it and start it again from its last checkpoint."
            ),
        },
    )
    chinese = Words(
        name="挂起",
        meaning="运行的进程仍有消息，但没有任何训练步结束。",
        fires=(
            "{for_s:g} 秒内、且超过迄今最长步间停顿的 {pause_times:g} 倍时间内没有 rank "
            "报告新的步时触发。评估和保存也算停顿，因此规则会学到它们所需的时间。从第 {least_steps} 步开始判断。"
            "触发时，服务器向每个 rank 请求其线程的调用栈。"
        ),
        remedies={
            "": (
                "比较各 rank 的调用栈（`perfagent stacks RUN` 或运行页面）：栈不同的那个 rank 正是其他 rank "
                "等待的对象；等待加载器的 rank 多半有 worker 挂起。若是首次评估或保存，请等待其结束；"
                "否则停止并从最后一个检查点重新开始。"
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
        if window.step == state["lost_at"]:
            return UNKNOWN
        quiet, longest = state["quiet_s"], max(state["longest_s"], *took.last(took.size))
        limit = max(self.for_s, self.pause_times * longest)
        if quiet < limit:
            return None
        return self.found(
            "critical",
            f"No step has ended since step {window.step:,}",
            f"No step has ended for {spell_s(quiet)} after step {window.step:,}; the longest pause between two steps before "
            f"was {spell_s(longest)}.",
            cost="all ranks stand still",
            since_step=window.step,
            ranks=sorted(window.heard - window.done - window.lost.keys()),
            evidence={
                "quiet_s": quiet,
                "longest_pause_s": longest,
                "step": window.step,
                "lost_ranks": sorted(window.lost),
            },
        )
