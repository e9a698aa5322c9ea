"""Rules on whether the run lives: how its processes ended, and how long they have been silent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.alerts.life import Life
from perfagent_server.blame import TOGETHER_S, Failure, first_of, lost_a_peer
from perfagent_server.diagnosis.remedies import PEER_REMEDY, REMEDIES, crash_remedy
from perfagent_server.rules.memory import is_oom
from perfagent_server.rules.window import End, Window

__all__ = ["LostContact", "ProcessCrash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCrash:
    """A process ended that should not have: an exception, a non-zero exit, a signal.

    Preemption and an interrupt from the keyboard are told as info, which no channel sends by default. Running out of
    memory has its own rule. The first failure leads, by the clocks of the ranks and in whatever order they report: what
    the launcher then does to the other ranks is its consequence. So is an error that says that another process is gone,
    where another rank ended at the same time without saying so, or was preempted before.
    """

    id: ClassVar[str] = "process_crash"
    on: ClassVar[tuple[str, ...]] = ("state",)
    urgent: ClassVar[str] = ""
    life: ClassVar[Life] = Life(outlives_run=True)

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
        return Finding(
            rule=self.id,
            severity="critical" if crashes else "info",
            message=f"Rank {first.rank} {what} after step {step}" + (f": {_last_line(said)}" if said else "."),
            since_step=step,
            ranks=sorted({end.rank for end in (crashes or ends)}),
            evidence={
                "state": first.state, "reason": first.reason, "exception": first.exception,
                "traceback": "\n".join(first.traceback.splitlines()[-20:]),
            },
            fix=self._fix(window, first) if crashes else "Start the run again; it goes on from its last checkpoint.",
        )  # fmt: skip

    @staticmethod
    def _leading(ends: list[End]) -> End:
        return ends[first_of([Failure(end.time, end.rank, end.state, _said(end)) for end in ends])]

    @staticmethod
    def _fix(window: Window, first: End) -> str:
        if window.world_size > 1 and lost_a_peer(_said(first)):
            return PEER_REMEDY
        return crash_remedy(first.state, first.reason, first.exception, first.traceback)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostContact:
    """Nothing was heard from a process for after_s seconds. The engine measures the silence by its own monotonic clock,
    and not in the first minute after a start, so that neither a restart nor a jump of the clock looks like a loss."""

    after_s: float = 30.0

    id: ClassVar[str] = "lost_contact"
    on: ClassVar[tuple[str, ...]] = ("contact",)
    urgent: ClassVar[str] = ""
    life: ClassVar[Life] = Life(cooldown_steps=0)

    def judge(self, window: Window) -> Finding | None:
        lost = {rank: silence for rank, silence in window.lost.items() if silence >= self.after_s}
        if not lost or window.ended:
            return None
        ranks = sorted(lost)
        several = f"Rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} of {window.world_size} ranks"
        who = several if window.world_size > 1 else "The training process"
        at = f"after step {window.step:,}" if window.step else "before its first step"
        return Finding(
            rule=self.id,
            severity="critical",
            # The past tense: the sentence stands as long as the alert does, and is not written anew every second.
            message=f"{who} went silent {at}: nothing was heard for {max(lost.values()):.0f} s.",
            since_step=window.step,
            ranks=ranks,
            evidence={"silence_s": max(lost.values()), "step": window.step},
            fix=REMEDIES[self.id],
        )


def _said(end: End) -> str:
    return f"{end.exception}\n{end.reason}"


def _by_hand(end: End) -> bool:
    return "KeyboardInterrupt" in end.exception or "KeyboardInterrupt" in end.reason or "SIGINT" in end.reason


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    line = " ".join(lines[-1].split()) if lines else ""
    return line if len(line) <= 300 else line[:297] + "..."
