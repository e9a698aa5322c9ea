"""Says when retention must not delete: a wall clock that is wrong must not cost anybody a run.

Ages are differences of wall clock times, and a clock that is a year ahead makes everything a year old. So nothing is
deleted while the clock has jumped since the last look, while nobody was heard of for two weeks by that clock, and not
before a day has passed when a large part of all runs would go at once, as after the first `runs_days` of an old
database: a person has that day to look at the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["DeletionGuard", "time_since_boot"]

JUMP_S = 600.0
"""The wall clock has jumped when it differs by more from the clock that nobody sets."""
JUMP_BELIEVED_S = 7 * 86_400.0
"""A jump that lasted so long is the right time: the machine had started with a wrong one."""
QUIET_S = 14 * 86_400.0
LARGE_SHARE = 0.5
FEW_RUNS = 20
"""Fewer than these are never a large part."""
LARGE_SHARE_WAITS_S = 86_400.0


def time_since_boot() -> float:
    """Seconds of a clock that nobody sets and that goes on while the machine sleeps: on Linux and on macOS they have
    different names, and time.monotonic() stands still meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class DeletionGuard:
    def __init__(self, *, clock: Callable[[], float], uptime: Callable[[], float] = time_since_boot) -> None:
        self._uptime = uptime
        self._trusted = clock(), uptime()  # when both clocks agreed the last time
        self._warned: float | None = None  # uptime at which a large share was to go first

    def distrust(self, now: float, newest: float) -> str | None:
        """Why ages cannot be believed; None if they can. now: by the wall clock; newest: when a run was heard of
        last."""
        uptime = self._uptime()
        before, uptime_before = self._trusted
        jump = (now - before) - (uptime - uptime_before)
        if abs(jump) > JUMP_S and uptime - uptime_before < JUMP_BELIEVED_S:
            return f"the clock jumped by {jump:+.0f} s; set it right, or wait 7 days if it is right now"
        self._trusted = now, uptime
        if now - newest > QUIET_S:
            days = (now - newest) / 86_400
            return f"by the clock no run was heard of for {days:.0f} days; it is believed again when one sends"
        return None

    def too_many(self, going: int, all_runs: int) -> str | None:
        """Why so many of all runs must not go now; None if they may."""
        if going < FEW_RUNS or going <= LARGE_SHARE * all_runs:
            self._warned = None
            return None
        uptime = self._uptime()
        if self._warned is None:
            self._warned = uptime
        left = self._warned + LARGE_SHARE_WAITS_S - uptime
        if left <= 0:
            return None
        return (
            f"{going} of {all_runs} runs would go at once; they go in {left / 3600:.0f} h unless runs_days is raised, "
            "or the clock set right"
        )
