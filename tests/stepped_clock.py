"""A clock that goes on by itself each time it is read: a deadline then falls due after so many looks at the clock,
however long the machine takes for them."""

from __future__ import annotations

import time


class SteppedClock:
    """Stands in a module for `time`. now: what was read last."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now = step_s, 0.0

    def monotonic(self) -> float:
        self.now += self.step_s
        return self.now

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)
