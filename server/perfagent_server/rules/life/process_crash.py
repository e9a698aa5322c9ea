"""process_crash: a process, or a thread of it, ended that should not have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.life.crash_causes import cause_by_text
from perfagent_server.rules.life.first_failure import TOGETHER_S, Failure, first_of, lost_a_peer
from perfagent_server.rules.life.oom_observed import is_oom
from perfagent_server.rules.life.stack_groups import place_of
from perfagent_server.rules.rule import Events, Every, Life, Question, Rule
from perfagent_server.rules.window import End, Window

__all__ = ["THREAD_DIED", "ProcessCrash"]

THREAD_DIED = "a thread died"  # the cause of what is no end of the process


@dataclass(frozen=True, kw_only=True)
class ProcessCrash(Rule):
    """A process ended that should not have.

    Preemption and Ctrl-C are info, which no channel sends by default. The first failure leads, by the clocks of the ranks and
    in whatever order they report: what the launcher then does to the other ranks is its consequence. So is an error that
    says that another process is gone, where another rank ended at the same time, or was preempted before.
    A thread that died is told when the training goes on without it; one of a library alone is a remark.
    """

    without_steps: int = 10

    id: ClassVar[str] = "process_crash"
    severities = ("info", "warning", "critical")
    question = Question.IS_IT_DEAD
    after = ("oom_observed",)
    reads = (Every(5.0), Events("state"), Events("thread", keep=8))
    life = Life(outlives_run=True, restated=True)
    joins = ("oom_observed",)

    def judge(self, window: Window) -> Finding | None:
        ends = [
            end for end in window.ends if end.state in ("failed", "killed", "preempted") and not is_oom(end, window)
        ]
        preempted = min((end.time for end in ends if end.state == "preempted"), default=math.inf)
        crashes = [
            end
            for end in ends
            if end.state != "preempted"
            and not any(word in _said(end) for word in ("KeyboardInterrupt", "SIGINT"))
            and not (0.0 < end.time - preempted <= TOGETHER_S and lost_a_peer(_said(end)))
        ]
        died = None if crashes else self._died(window)
        if not ends or (died is not None and died.severity != "info"):
            return died
        among = crashes or ends
        first = among[first_of([Failure(end.time, end.rank, end.state, _said(end)) for end in among])]
        step = first.step if first.step is not None else window.step
        # a rank that had no more to do while this one waited for it
        done = [one for one in window.ends if one.state == "finished" and one.rank != first.rank]
        finished = min((one for one in done if one.time <= first.time), key=lambda one: one.time, default=None)
        return self.found(
            "critical" if crashes else "info",
            cause=_cause(window, first, finished) if crashes else "preempted",
            since_step=step,
            ranks=sorted({end.rank for end in among}),
            evidence={
                "rank": first.rank, "how": first.state if crashes or first.state == "preempted" else "interrupted",
                "step": step, "said": _last_line(first.said or first.exception), "state": first.state,
                "reason": first.said, "reason_facts": first.facts,
                "exception": first.exception, "traceback": "\n".join(first.traceback.splitlines()[-20:]),
                "unused": first.unused or None, "finished_rank": finished and finished.rank,
                "finished_step": finished and finished.step,
            },
        )  # fmt: skip

    def _died(self, window: Window) -> Finding | None:
        for noted in window.events("thread"):
            step, trains, frames = noted.step or 0, noted.data.get("training"), noted.data.get("frames") or []
            if not (trains or window.step - step >= self.without_steps):
                continue
            place = place_of(frames)
            return self.found(
                "critical" if trains else "warning" if place.is_users else "info",
                cause=THREAD_DIED,
                since_step=step,
                ranks=[noted.rank],
                evidence={
                    "thread": noted.data.get("name"), "said": _last_line(noted.data.get("reason") or ""), "step": step,
                    "at": place.own.strip("?"), "went_on": max(0, window.step - step) or None, "frames": frames[-20:],
                },
            )  # fmt: skip
        return None


def _cause(window: Window, end: End, finished: End | None) -> str:
    """Which remedy fits, by what is known of the end: an exception, a signal or an exit code."""
    if window.world_size > 1 and lost_a_peer(_said(end)):
        return "lost another rank" if finished is None else "uneven inputs"
    if end.exception == "SystemExit" or end.said.startswith("exit code"):
        return "the script ended itself"
    cause = cause_by_text(_said(end))
    is_known = cause != "exception" or end.exception or end.traceback
    return cause if is_known else "killed" if end.state == "killed" else ""


def _said(end: End) -> str:
    return f"{end.exception}\n{end.said}"


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    line = " ".join(lines[-1].split()).rstrip(".") if lines else ""
    return line if len(line) <= 300 else line[:297] + "..."
