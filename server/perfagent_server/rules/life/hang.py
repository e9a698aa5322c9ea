"""hang: the processes are heard, but no step ends any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.life.absent_ranks import Absence, find_absence
from perfagent_server.rules.life.answers import Answers
from perfagent_server.rules.life.stack_groups import StackGroup, apart, groups_of, shown
from perfagent_server.rules.rule import UNKNOWN, Events, Every, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["Hang"]

_EVERY_S = 3.0
_MOST_PASSED = 2.0  # periods that count between two judgments


@dataclass(frozen=True, kw_only=True)
class Hang(Rule):
    """No step ends, although the processes report.

    pause_times and least_steps are those of NVIDIA Resiliency Extension's learned timeouts (safety factor 5). Evaluations
    and saves count as pauses; the first steps compile kernels and are not judged.
    """

    for_s: float = 60.0
    pause_times: float = 5.0
    least_steps: int = 5
    answers_s: float = 10.0

    id: ClassVar[str] = "hang"
    severities = ("critical",)
    question = Question.DOES_IT_MOVE
    reads = (
        Every(_EVERY_S), Series("step_time_s", merge="median"), Events("stacks", keep=1), Events("collectives", keep=1),
    )  # fmt: skip
    charts = ("step_time_s",)
    life = Life(cooldown_steps=0, restated=True)
    asks_for = "stacks"
    state_version = 2

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
        cause, told = _told(window, answers)
        return self.found(
            "critical",
            cause=cause,
            since_step=window.step,
            ranks=told.get("awaited_ranks") or sorted(window.heard - window.done - window.lost.keys()),
            evidence={
                "quiet_s": quiet, "longest_pause_s": longest, "step": window.step, "world_size": window.world_size,
                "lost_ranks": sorted(window.lost), **told,
            },
        )  # fmt: skip


def _told(window: Window, answers: Answers) -> tuple[str, dict[str, Any]]:
    """The cause, and the evidence, that the answers of the ranks give."""
    groups, absence = groups_of(answers.stacks()), find_absence(answers.collectives())
    culprits = _culprits(groups, absence)
    # all that were ever heard: one whose interpreter stands still cannot answer, and is called lost by now
    answered = {rank for group in groups for rank in group.ranks}
    silent = sorted(window.heard - window.done - answered) if groups else []
    ranks = absence.ranks if absence is not None else [rank for group in culprits for rank in group.ranks]
    is_silence = bool(silent) and not ranks and all(group.waits for group in groups)
    at = groups if absence is None and len(groups) == 1 else culprits
    found = {
        "groups": shown(groups, culprits),
        "absent": {} if absence is None else absence.shown(),
        "silent_ranks": silent,
        "awaited_ranks": silent if is_silence else sorted(ranks),
        "at": at[0].place.own if len(at) == 1 else "",
    }
    cause = "a rank is silent" if is_silence else _cause(groups, culprits, absence)
    return cause, {name: value for name, value in found.items() if value}


def _culprits(groups: list[StackGroup], absence: Absence | None) -> list[StackGroup]:
    """Whom the others wait for: who did not join a collective, else whose stack says so."""
    if absence is None:
        return apart(groups)
    named = [group for group in groups if set(group.ranks) & set(absence.ranks)]
    return named if len(named) < len(groups) else []


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
