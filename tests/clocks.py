"""Clocks for tests: one that stands until a test sets it, and one that goes on by itself."""

from __future__ import annotations

import time

__all__ = ["Clock", "SteppedClock"]


class Clock:
    """Is called for the time. at: seconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class SteppedClock:
    """Stands in a module for `time`, and goes on by `step_s` each time it is read: a deadline then falls due after so many
    looks, however long the machine takes for them. now: what was read last."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now = step_s, 0.0

    def monotonic(self) -> float:
        self.now += self.step_s
        return self.now

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)
