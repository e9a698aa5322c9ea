"""process_crash: a process ended that should not have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.life.crash_causes import cause_by_text
from perfagent_server.rules.life.first_failure import TOGETHER_S, Failure, first_of, lost_a_peer
from perfagent_server.rules.life.oom_observed import is_oom
from perfagent_server.rules.rule import Events, Life, Question, Rule
from perfagent_server.rules.window import End, Window

__all__ = ["ProcessCrash"]

_NATIVE = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")


@dataclass(frozen=True, kw_only=True)
class ProcessCrash(Rule):
    """A process ended that should not have.

    Preemption and Ctrl-C are info, which no channel sends by default. The first failure leads, by the clocks of the ranks and
    in whatever order they report: what the launcher then does to the other ranks is its consequence. So is an error that
    says that another process is gone, where another rank ended at the same time, or was preempted before.
    """

    id: ClassVar[str] = "process_crash"
    severities = ("info", "critical")
    question = Question.IS_IT_DEAD
    after = ("oom_observed",)
    reads = (Events("state"),)
    life = Life(outlives_run=True, restated=True)
    joins = ("oom_observed",)

    def judge(self, window: Window) -> Finding | None:
        ends = [
            end for end in window.ends if end.state in ("failed", "killed", "preempted") and not is_oom(end, window)
        ]
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
        said = first.reason or first.exception
        finished = _finished_before(window, first)
        return self.found(
            "critical" if crashes else "info",
            cause=_cause(window, first, finished) if crashes else "preempted",
            since_step=step,
            ranks=sorted({end.rank for end in (crashes or ends)}),
            evidence={
                "rank": first.rank, "how": first.state if crashes or first.state == "preempted" else "interrupted",
                "step": step, "said": _last_line(said), "state": first.state, "reason": first.reason,
                "exception": first.exception, "traceback": "\n".join(first.traceback.splitlines()[-20:]),
                "unused": first.unused or None, "finished_rank": finished and finished.rank,
                "finished_step": finished and finished.step,
            },
        )  # fmt: skip

    @staticmethod
    def _leading(ends: list[End]) -> End:
        return ends[first_of([Failure(end.time, end.rank, end.state, _said(end)) for end in ends])]


def _finished_before(window: Window, end: End) -> End | None:
    """A rank that had no more to do while this one waited for it."""
    ends = [one for one in window.ends if one.state == "finished" and one.rank != end.rank and one.time <= end.time]
    return min(ends, key=lambda one: one.time, default=None)


def _cause(window: Window, end: End, finished: End | None) -> str:
    """Which remedy fits, by what is known of the end: an exception, a signal or an exit code."""
    if window.world_size > 1 and lost_a_peer(_said(end)):
        return "lost another rank" if finished is None else "uneven inputs"
    if end.exception == "SystemExit" or end.reason.startswith("exit code"):
        return "the script ended itself"
    if end.exception or end.traceback:
        return cause_by_text(_said(end))
    if "SIGBUS" in end.reason:
        return "SIGBUS"
    if any(signal in end.reason for signal in _NATIVE):
        return "native code"
    return "killed" if end.state == "killed" else ""


def _said(end: End) -> str:
    return f"{end.exception}\n{end.reason}"


def _by_hand(end: End) -> bool:
    return "KeyboardInterrupt" in end.exception or "KeyboardInterrupt" in end.reason or "SIGINT" in end.reason


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    line = " ".join(lines[-1].split()).rstrip(".") if lines else ""
    return line if len(line) <= 300 else line[:297] + "..."
