"""Keeps the agent within its share of the training time, and says how large that share is.

The hooks' time on the training thread is counted (step/costs.py); the sender's thread adds the CPU of the agent's
threads. What is left of the budget goes to what can be stretched: how often gradients are measured, weights compared
and dead units looked for. The fixed part cannot: it is counted, and shows in `agent/overhead_pct` even where it alone
exceeds the budget, as it does in short steps. (A step takes 15 to 25 µs in the hooks, 50 to 80 with a loader, clipping
and log(), and 10 to 25 in the sender's thread; a second of that one takes 2 to 4 ms besides. That is a budget of 0.5 %
at steps of 10 to 20 ms, twice of it at 5 ms, and a seventh of the time at 0.3 ms.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Governor"]

_MOST_STEPS = 1000
"""Gradients are measured at least this often, whatever they cost."""
_LEAST_SHARE = 0.1
"""Of the budget, kept for gradients even when the rest uses all of it: at steps of 6 ms a look or two each second."""
_WINDOW_S = 1.0


class Governor:
    """Decides the period of gradient measurements; reports the agent's share of the time.

    budget_pct: the share of the step time that the agent may take. step_ns: how long steps took between the last two reports
    that a step ended before; 0 before there were two.
    """

    __slots__ = ("_budget", "_left", "_own_ns", "_pass_ns", "_started", "_stepped", "_threads_s", "clock", "step_ns")

    def __init__(self, budget_pct: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget_pct / 100.0
        self._left = self._budget
        self.clock = clock
        self._started = clock()
        self._own_ns = self._pass_ns = 0.0
        self._threads_s = 0.0
        self.step_ns = 0
        self._stepped: tuple[int, float] | None = None  # steps completed at a report, and when that was

    def set_budget(self, budget_pct: float) -> None:
        """Another share of the step time, from the next report on."""
        self._budget = budget_pct / 100.0

    def period(self, pass_ns: float, step_ns: int) -> int:
        """Every how many steps a pass of that cost may run, when a step takes step_ns. Called on the training thread.

        pass_ns: what it costs all threads.
        """
        if step_ns <= 0:
            return 1
        return min(_MOST_STEPS, max(1, math.ceil(pass_ns / (self._left * step_ns))))

    def report(self, own_ns: float, pass_ns: float, threads_s: float, completed: int = 0) -> float | None:
        """Share of the time in percent since the last report; None when it is too early for the next.

        own_ns: total time of the hooks on the training thread, gradient passes included; threads_s: total CPU of the agent's
        threads; pass_ns: of both, what the passes cost; completed: the newest step. Called on the sender's thread.
        """
        elapsed = self.clock() - self._started
        if elapsed < _WINDOW_S:
            return None
        self._time_steps(completed)
        own, passes, threads = (own_ns - self._own_ns) / 1e9, (pass_ns - self._pass_ns) / 1e9, threads_s - self._threads_s
        self._own_ns, self._pass_ns, self._threads_s, self._started = own_ns, pass_ns, threads_s, self.clock()
        fixed = max(0.0, own + threads - passes) / elapsed  # part of what the passes cost is an estimate
        self._left = max(self._budget - fixed, _LEAST_SHARE * self._budget)
        return 100.0 * (own + threads) / elapsed

    def _time_steps(self, completed: int) -> None:
        before, at = self._stepped or (completed, self.clock())
        if completed > before:
            self.step_ns = int((self.clock() - at) * 1e9 / (completed - before))
            before, at = completed, self.clock()
        self._stepped = before, at
