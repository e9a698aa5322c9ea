"""Keeps the agent within its share of the training time, and reports how large that share is.

The hooks' time on the training thread is counted (step/costs.py); the sender's thread adds the CPU time of the agent's
threads. The rest of the budget goes to work that can run less often: measuring gradients, comparing weights, looking
for dead units. The fixed part (15 to 80 µs a step in the hooks, 10 to 25 µs in the sender's thread) cannot be reduced: it
is counted, and shows in `agent/overhead_pct` even where it alone exceeds the budget, as in short steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Governor"]

_MOST_STEPS = 1000
"""Gradients are measured at least once in so many steps, whatever that costs."""
_LEAST_SHARE = 0.1
"""Share of the budget that is kept for gradients even when the rest uses all of it: at steps of 6 ms, one or two
passes a second."""
_WINDOW_S = 1.0


class Governor:
    """Decides the period of gradient measurements and reports the agent's share of the time.

    budget_pct: the share of the step time that the agent may take. step_ns: the mean time of a step between the last
    two reports between which a step ended; 0 before there were two.
    """

    __slots__ = ("_left", "_started", "_stepped", "_totals", "budget", "clock", "step_ns")

    def __init__(self, budget_pct: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget_pct / 100.0
        self._left = self.budget
        self.clock = clock
        self._started = clock()
        self._totals = 0.0, 0.0, 0.0
        self.step_ns = 0
        self._stepped: tuple[int, float] | None = None  # steps completed at a report, and the time of that report

    def set_budget(self, budget_pct: float) -> None:
        """Sets another share of the step time, from the next report on."""
        self.budget = budget_pct / 100.0

    def period(self, pass_ns: float, step_ns: int) -> int:
        """Returns every how many steps a pass may run, if a step takes step_ns. Called on the training thread.

        pass_ns: the cost of a pass on all threads.
        """
        if step_ns <= 0:
            return 1
        return min(_MOST_STEPS, max(1, math.ceil(pass_ns / (self._left * step_ns))))

    def report(self, own_ns: float, pass_ns: float, threads_s: float, completed: int = 0) -> float | None:
        """Returns the agent's share of the time since the last report, in percent; None when it is too
        early for the next.

        own_ns: total time of the hooks on the training thread, gradient passes included; threads_s: total CPU time of
        the agent's threads; pass_ns: the part of both that the passes cost; completed: the newest step. Called on the
        sender's thread.
        """
        elapsed = self.clock() - self._started
        if elapsed < _WINDOW_S:
            return None
        self._time_steps(completed)
        totals = own_ns / 1e9, pass_ns / 1e9, threads_s
        # a total falls where a thread is replaced, or what counted a part of it ends
        own, passes, threads = (max(0.0, new - old) for new, old in zip(totals, self._totals, strict=True))
        self._totals, self._started = totals, self.clock()
        fixed = max(0.0, own + threads - passes) / elapsed  # part of the passes' cost is an estimate
        self._left = max(self.budget - fixed, _LEAST_SHARE * self.budget)
        return 100.0 * (own + threads) / elapsed

    def _time_steps(self, completed: int) -> None:
        before, at = self._stepped or (completed, self.clock())
        if completed > before:
            self.step_ns = int((self.clock() - at) * 1e9 / (completed - before))
            before, at = completed, self.clock()
        self._stepped = before, at
