"""sync_bound: the loop reads values of tensors one by one, and the step waits for that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from perfagent.wire import Finding
from perfagent_server.rules.evidence import p90, told_lines
from perfagent_server.rules.rule import UNKNOWN, Events, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import step_shares
from perfagent_server.rules.speed.step_shares import UTILIZATION, share_elsewhere
from perfagent_server.rules.speed.while_stepping import while_stepping
from perfagent_server.rules.steady_steps import steady_steps
from perfagent_server.rules.window import Window

__all__ = ["SyncBound"]

_CALLS, _READS, _READING = "sync/calls_per_step", "sync/reads_per_step", "sync/reading_s"


@dataclass(frozen=True, kw_only=True)
class SyncBound(Rule):
    """Calls that make the host wait for the device (.item(), .cpu(), a tensor in an `if`) cost info_pct of the step.

    The agent finds these calls and their lines in a sampled step. On a GPU each empties the queue of kernels, and the
    device then waits for the host: what that costs is the time in no phase (TraceML's residual), or, where such calls are
    many, the time in which no kernel runs. Without a GPU nothing is waited for, but a loop over single values takes
    microseconds for each: the agent measures the time of these loops itself.
    """

    info_pct: float = 10.0
    warning_pct: float = 20.0
    many_calls: int = 5
    least_s: float = 0.001
    for_s: float = within(30.0, least=1, most=60)
    steps: int = within(64, least=1, most=64)
    clear_at: float = 0.8  # of the threshold

    id = "sync_bound"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("eval_bound",)
    reads = (
        Every(5.0),
        Events("sync"),
        Series(_CALLS, keep=8, merge="max"),
        Series(_READS, keep=8, merge="max"),
        Series(_READING, keep=8, merge="max"),
        *step_shares.READS,
        UTILIZATION,
    )
    charts = (_CALLS, _READS, "step_time_s")
    profile_helps = True
    level = "steps"
    life = Life(clear_s=30.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        calls = window.value(_CALLS) or window.value(_READS)
        if not calls:
            return None
        times = steady_steps(window, self.steps)[1]
        if not times:  # where each makes a rollout, none is a steady one
            times = [value for value in window.track("step_time_s").last(64) if 0 < value < math.inf]
        if not times:
            return UNKNOWN
        step_s, step_p90_s, reading_s = median(times), p90(sorted(times)), window.value(_READING)
        lost = self._lost_on_device(window, calls) if reading_s is None else _lost_in_loops(window, reading_s, step_s)
        if lost is None:
            return None
        lost_s, share, elsewhere = lost * step_s, 100 * lost, share_elsewhere(window)
        limit = self.info_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        if share < limit or lost_s < self.least_s:
            return None
        lines = told_lines(window, "sync")
        return self.found(
            "warning" if share >= self.warning_pct else "info",
            cause="" if reading_s is None else "single values",
            since_step=window.at,
            evidence={
                "calls_per_step": calls, "lost_s": lost_s, "step_time_s": step_s, "step_p90_s": step_p90_s,
                "share_pct": share, "lines": lines, "line": lines[0]["line"] if lines else None,
                "calls_of_line": lines[0]["count"] if lines else None,
                "other_share_pct": None if elsewhere is None else 100 * elsewhere, "steps": len(times),
            },
            gain_pct=share,
        )  # fmt: skip

    def _lost_on_device(self, window: Window, calls: float) -> float | None:
        """What part of the step the device has nothing to do, as far as such calls may be why; None: nothing says so."""
        elsewhere = share_elsewhere(window)
        runs = while_stepping(window, UTILIZATION.name, self.for_s) if calls >= self.many_calls else None
        known = [one for one in (elsewhere, None if runs is None else 1.0 - runs.mean / 100) if one is not None]
        return max(known, default=None)


def _lost_in_loops(window: Window, reading_s: float, step_s: float) -> float:
    """What part of a usual step they take: no more than the part that they are in, the script's own code or the model's.
    (They were timed in a step that was slower by the timing.)"""
    parts = (window.series(f"phase/{part}_s") for part in ("other", "forward"))
    longest_s = max((median(part.last(64)) for part in parts if part is not None), default=0.0)
    return min(reading_s, longest_s) / step_s
