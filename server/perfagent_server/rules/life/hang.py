"""hang: the processes are heard, but no step ends any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.life.absent_ranks import Absence, find_absence
from perfagent_server.rules.life.answers import Answers, Look
from perfagent_server.rules.life.stack_groups import StackGroup, apart, groups_of, shown, waits_for
from perfagent_server.rules.rule import UNKNOWN, Events, Every, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["Hang"]

_EVERY_S = 3.0
_MOST_PASSED = 2.0  # periods that count between two judgments
_RUNS_TIMES = 10.0  # code that runs is no hang: it has so many times the time of code that waits
_STRAGGLES_S = 2.0  # after the looks of the others, a rank that sends none is no straggler


@dataclass(frozen=True, kw_only=True)
class Hang(Rule):
    """No step ends, although the processes report.

    Two looks of every rank tell at once what cannot go on: all wait in collectives for a rank that itself waits, is stopped
    or gone, or they called different ones. Everything else has the time of NVIDIA Resiliency Extension's learned timeouts
    (safety factor 5): evaluations and saves count as pauses; the first steps compile kernels and are not judged.
    """

    for_s: float = 10.0
    longest_times: float = 2.0
    pause_s: float = 60.0
    pause_times: float = 5.0
    least_steps: int = 5

    id: ClassVar[str] = "hang"
    severities = ("critical",)
    question = Question.DOES_IT_MOVE
    reads = (
        Every(_EVERY_S), Series("step_time_s", merge="median"), Events("stacks", keep=1), Events("collectives", keep=1),
    )  # fmt: skip
    charts = ("step_time_s",)
    life = Life(cooldown_steps=0, restated=True)
    asks_for = "stacks"
    state_version = 3

    def judge(self, window: Window) -> Finding | Unknown | None:
        took = window.series("step_time_s")
        if took is None or window.ended or took.total < self.least_steps:
            return None
        # lost_at: where the run hung when the pauses before it were lost with the server's state
        fresh = {"step": -1, "longest_s": 0.0, "quiet_s": 0.0, "judged": window.now}
        state = window.state_of(self, {})  # a verdict before this look (`so_far`) leaves only answers in it
        state.update({**fresh, "lost_at": window.step if window.is_firing(self.id) else -1, **state})
        # Neither a jump of the clock nor a time in which this server was down or behind is the run's pause.
        passed = min(max(0.0, window.now - state["judged"]), _MOST_PASSED * _EVERY_S)
        if window.step == state["step"]:
            state["quiet_s"] += passed
        else:
            state["longest_s"] = max(state["longest_s"], state["quiet_s"])
            state.update(step=window.step, quiet_s=min(passed, window.now - window.stepped))
        state["judged"] = window.now
        answers = Answers(window, self)
        if window.step == state["lost_at"]:
            return UNKNOWN
        looks = answers.looks()
        most = window.now - window.stepped + _STRAGGLES_S  # a look of a slow rank may be of an earlier step
        quiet = max(state["quiet_s"], min((min(most, one.quiet_s) for one in looks.values()), default=0.0))
        longest = max(state["longest_s"], *took.last(took.size), *(one.longest_s for one in looks.values()))
        least = min(self.for_s, self.pause_s)
        if quiet < least or quiet < self._limit_s(seen := Seen(window, answers), longest):
            return None
        cause, told = _told(seen)
        return self.found(
            "critical",
            cause=cause or ("one process" if window.world_size == 1 else ""),
            since_step=window.step,
            ranks=told.get("awaited_ranks") or sorted(window.heard - window.done - window.lost.keys()),
            evidence={
                "quiet_s": quiet, "longest_pause_s": longest, "step": window.step, "world_size": window.world_size,
                "lost_ranks": sorted(window.lost), **told,
            },
        )  # fmt: skip

    def so_far(self, window: Window, standing_s: float) -> Finding:
        """What is known of a run that stands, be it a hang or not."""
        seen = Seen(window, Answers(window, self))
        told = _told(seen)[1] | {"goes_on": "runs" if seen.goes_on else ""} if seen.groups else {}
        return self.found(
            "info",
            cause="stands at a line" if told else "stands still",
            since_step=window.step,
            ranks=told.get("awaited_ranks") or [],
            evidence={"standing_s": standing_s, "step": window.step, "world_size": window.world_size, **told},
        )

    def _limit_s(self, seen: Seen, longest: float) -> float:
        if seen.is_stuck:
            return max(self.for_s, self.longest_times * longest)
        return max(self.pause_s * (_RUNS_TIMES if seen.goes_on else 1.0), self.pause_times * longest)


class Seen:
    """What the answers of the ranks show. groups: of ranks at one place; culprits: whom the others wait for; silent: who
    does not answer; awaited: the ranks that do not wait for others."""

    def __init__(self, window: Window, answers: Answers) -> None:
        self.looks, called = answers.looks(), answers.collectives()
        self.groups, self.absence = groups_of(answers.stacks()), find_absence(called)
        self.culprits = _culprits(self.groups, self.absence)
        # all that were ever heard: one whose interpreter stands still cannot answer, and is called lost by now
        alive = window.heard - window.done
        answered = {rank for group in self.groups for rank in group.ranks}
        self.silent = sorted(alive - answered) if self.groups else []
        waits = {rank for group in self.groups if group.waits for rank in group.ranks}
        absent = set() if self.absence is None or self.absence.kind != "absent" else set(self.absence.ranks)
        in_collective = {rank for rank, groups, _ in called if any(one.get("waits") for one in groups)}
        self.awaited = answered - ((waits | in_collective) - absent)
        self._is_waited_for = bool(answered - self.awaited)
        near = [item for one in self.looks.values() for item in one.others.items()]
        self.others = {int(rank): state for rank, state in near if rank.isdigit()}
        self._alive, self._now = alive, window.now
        waited = [one for _, those, _ in called for one in those if one.get("waits")]
        names = {dict(map(tuple, one["recent"])).get(one["seq"], "") for one in waited}
        self.operation = names.pop() if len(names) == 1 else ""  # the collective in which ranks wait, if it is one

    @property
    def goes_on(self) -> bool:
        """Whether something runs that may end. Waiting for other ranks may cost a core, too."""
        silent = any(self.others.get(rank) == "runs" for rank in self._alive - self.looks.keys())
        return silent or any(
            one.goes_on == "hooks" or (rank in self.awaited and one.goes_on not in ("", "unsure"))
            for rank, one in self.looks.items()
        )

    @property
    def is_stuck(self) -> bool:
        """Whether what the ranks wait for cannot come, as two looks of each have shown."""
        looked = {rank: one for rank, one in self.looks.items() if one.number > 1}
        if not self._is_waited_for or not looked or self.goes_on:
            return False
        still = all(self.looks[rank].is_still for rank in self.awaited if rank in self.looks)
        pauses = any(group.pauses for group in self.groups if self.awaited & set(group.ranks))
        missing = self._alive - looked.keys()
        if not still or pauses or not all(self._cannot_answer(rank, looked) for rank in missing):
            return False
        return bool(missing or self.awaited or self.absence)

    def _cannot_answer(self, rank: int, looked: dict[int, Look]) -> bool:
        state, last = self.others.get(rank), self.looks.get(rank)
        if last is not None:  # it looks again after as long, and five seconds at least
            return state in ("stopped", "gone") and self._now - last.came > max(5.0, last.quiet_s) + _STRAGGLES_S
        straggles = self._now - min(one.came for one in looked.values()) < _STRAGGLES_S
        return state in ("stopped", "gone") or (state == "stands" and not straggles)


def _told(seen: Seen) -> tuple[str, dict[str, Any]]:
    """The cause, and the evidence, that the answers of the ranks give."""
    groups, culprits, absence = seen.groups, seen.culprits, seen.absence
    dead = {rank: state for rank, state in seen.others.items() if rank in seen.silent and state in ("stopped", "gone")}
    ranks = absence.ranks if absence is not None else [rank for group in culprits for rank in group.ranks]
    is_silence = bool(seen.silent) and (bool(dead) or (not ranks and all(group.waits for group in groups)))
    at = groups if absence is None and len(groups) == 1 else culprits
    stands = [rank for group in at for rank in group.ranks if not group.waits and rank in seen.looks]
    found = {
        "groups": shown(groups, culprits),
        "absent": {} if absence is None or dead else absence.shown(),
        "silent_ranks": seen.silent,
        "stopped_ranks": sorted(rank for rank, state in dead.items() if state == "stopped"),
        "awaited_ranks": sorted(dead) or (seen.silent if is_silence else sorted(ranks)),
        "operation": seen.operation if absence is None or dead else "",
        "waiting_ranks": stands,
        "waits_for": waits_for(seen.looks[stands[0]].waits_in) if len(stands) == 1 and not is_silence else "",
        "at": at[0].place.own if len(at) == 1 and not is_silence else "",
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
    all_wait = all(group.waits for group in groups) and sum(len(group.ranks) for group in groups) > 1
    return "all ranks wait" if all_wait else ""
