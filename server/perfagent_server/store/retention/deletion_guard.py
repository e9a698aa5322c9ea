"""Says when retention must not delete: a wall clock that is wrong must not cost anybody a run.

Ages are differences of wall clock times, and a clock that is a year ahead makes everything a year old. So nothing is
deleted while the clock has jumped since the last look, while nobody was heard of for two weeks by that clock, and not
before a day has passed when more than a day lies between now and the last time that any server trusted its clock, or
when a large part of all runs would go at once, as after the first `runs_days` of an old database: a person has that day
to look at the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection, select

from perfagent_server.store.statements import put
from perfagent_server.store.tables import cursor

__all__ = ["DeletionGuard", "keep_trusted", "last_trusted", "time_since_boot"]

JUMP_S = 600.0
"""The wall clock has jumped when it differs by more from the clock that nobody sets."""
JUMP_BELIEVED_S = 7 * 86_400.0
"""A jump that lasted so long is the right time: the machine had started with a wrong one."""
AWAY_S = 86_400.0
AWAY_WAITS_S = 86_400.0
"""After a longer time nobody knows whether the server was away for so long or has a wrong clock."""
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
        self._doubted: float | None = None  # uptime at which the clock was far ahead of what it had been first
        self._warned: float | None = None  # uptime at which a large share was to go first

    def distrust(self, now: float, trusted: float | None) -> str | None:
        """Why the wall clock cannot be believed; None if it can. now: what it says; trusted: what last_trusted() says."""
        uptime = self._uptime()
        before, uptime_before = self._trusted
        jump = (now - before) - (uptime - uptime_before)
        if abs(jump) > JUMP_S and uptime - uptime_before < JUMP_BELIEVED_S:
            return f"the clock jumped by {jump:+.0f} s; set it right, or wait 7 days if it is right now"
        self._trusted = now, uptime
        # The time that this server trusted last is compared above, by a clock that nobody sets.
        if trusted is None or trusted == before or now - trusted <= AWAY_S:
            self._doubted = None
            return None
        if self._doubted is None:
            self._doubted = uptime
        left = self._doubted + AWAY_WAITS_S - uptime
        if left > 0:
            return (
                f"the clock is {(now - trusted) / 86_400:.0f} days ahead of when retention looked last; it is believed in "
                f"{left / 3600:.0f} h unless it is set right"
            )
        return None

    @staticmethod
    def is_quiet(now: float, newest: float) -> str | None:
        """Why ages cannot be believed by what is stored. newest: when a run was heard of last."""
        if now - newest <= QUIET_S:
            return None
        days = (now - newest) / 86_400
        return f"by the clock no run was heard of for {days:.0f} days; it is believed again when one sends"

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


_CURSOR = "retention"
"""The row of the table `cursor`: `extra` is the wall time at which a server trusted its clock last."""


def last_trusted(connection: Connection) -> float | None:
    """By whichever server of this database; None before the first look."""
    found = connection.execute(select(cursor.c.extra).where(cursor.c.name == _CURSOR)).scalar()
    return None if found is None else float(found)


def keep_trusted(connection: Connection, now: float) -> None:
    put(connection, cursor, {"name": _CURSOR, "tail_id": 0, "extra": repr(now).encode()})
