"""throttling: heat or power holds the clocks of a GPU back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from perfagent.wire import Finding
from perfagent_server.rules.evidence import where
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series, within
from perfagent_server.rules.window import Window

__all__ = ["Throttling"]

_OVER_S = 60
_REASONS = {
    reason: f"gpu/throttle_{reason}_pct" for reason in ("power_brake", "hw_slowdown", "hw_thermal", "sw_thermal")
}
_HARD = ("power_brake", "hw_slowdown")
_TEMPERATURE, _CLOCK = "gpu/temperature_c", "gpu/sm_clock_mhz"
_SIGNS = (*_REASONS.values(), _TEMPERATURE)


class _Held(NamedTuple):
    """Of a rank's device, over the newest minute. reason: that held it back most; is_hard: by the hardware."""

    rank: int
    reason: str
    is_hard: bool
    pct: float
    hot_c: float | None
    clock: float | None


@dataclass(frozen=True, kw_only=True)
class Throttling(Rule):
    """NVML's clock event reasons other than the power limit: a healthy device under full load runs at that."""

    held_pct: float = 10.0
    hot_c: float = 85.0
    least_s: int = within(30, least=1, most=_OVER_S)
    clear_at: float = 0.8

    id = "throttling"
    severities = ("info", "warning", "critical")
    question = Question.IS_IT_FAST
    after = ("cpu_oversubscribed",)
    reads = (
        Every(5.0),
        *(Series(name, keep=_OVER_S, axis="time", ranks="apart") for name in (*_SIGNS, _CLOCK)),
    )
    needs_card = True
    charts = ("gpu/throttle_hw_thermal_pct", "gpu/throttle_sw_thermal_pct", _TEMPERATURE, _CLOCK)
    life = Life(for_s=10.0, clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | None:
        if window.by_time.keys().isdisjoint(_SIGNS):
            return None
        state = window.state_of(self, {"clocks": {}, "until": 0.0})
        for rank, clock in window.readings(_CLOCK).newest_by_rank().items():  # the highest of each device so far
            state["clocks"][str(rank)] = max(state["clocks"].get(str(rank), 0.0), clock)
        if self._is_any_near(window):
            state["until"] = window.now + _OVER_S
        if window.now > state["until"]:
            return None
        limit = self.clear_at if window.is_firing(self.id) else 1.0
        held = [
            one for one in self._devices(window) if one.pct >= limit * self.held_pct or (one.hot_c or 0.0) >= self.hot_c
        ]
        if not held:
            return None
        worst = max(held, key=lambda one: (one.is_hard, one.pct, one.hot_c or 0.0))
        is_held = worst.pct >= limit * self.held_pct
        ranks = sorted(one.rank for one in held if not is_held or one.pct >= self.clear_at * self.held_pct)
        clock, top = worst.clock or 0.0, state["clocks"].get(str(worst.rank), 0.0)
        slowdown = {
            "reason": worst.reason, "held_pct": worst.pct, "clock_mhz": worst.clock, "highest_clock_mhz": top or None,
            "slower_pct": 100 * (1 - clock / top) if top > clock > 0 else None,
            "waiting_ranks": window.world_size - len(ranks) or None,
        }  # fmt: skip
        cause = "hot" if not is_held else "power" if worst.reason == "power_brake" else ""
        return self.found(
            "info" if not is_held else "critical" if worst.is_hard else "warning",
            cause=cause,
            since_step=window.step,
            ranks=ranks,
            evidence={
                "rank": worst.rank, "temperature_c": worst.hot_c, "over_s": _OVER_S, **where(window, ranks),
                **(slowdown if is_held else {}),
            },
        )  # fmt: skip

    def _devices(self, window: Window) -> list[_Held]:
        found = []
        for rank in {rank for name in _SIGNS for rank in window.readings(name).ranks}:
            pcts = {reason: self._mean(window, name, rank) or 0.0 for reason, name in _REASONS.items()}
            hard = max(_HARD, key=pcts.__getitem__)
            is_hard = pcts[hard] >= self.clear_at * self.held_pct
            reason = hard if is_hard else max(pcts, key=pcts.__getitem__)
            pct = pcts[reason]
            if reason == "hw_slowdown" and 2 * pcts["hw_thermal"] >= pct:
                reason = "hw_thermal"  # the slowdown says that it is, and this why
            hot, clock = self._mean(window, _TEMPERATURE, rank), self._mean(window, _CLOCK, rank)
            found.append(_Held(rank, reason, is_hard, pct, hot, clock))
        return found

    def _is_any_near(self, window: Window) -> bool:
        """Whether a newest reading is worth a look at the minute before it."""
        if any(value > 0 for name in _REASONS.values() for value in window.readings(name).newest_by_rank().values()):
            return True
        temperatures = window.readings(_TEMPERATURE).newest_by_rank().values()
        return max(temperatures, default=-math.inf) >= self.clear_at * self.hot_c

    def _mean(self, window: Window, name: str, rank: int) -> float | None:
        """Of the newest minute; None where there are too few readings."""
        tail = window.readings(name).tail(_OVER_S, rank)
        if not tail or tail[-1][0] - tail[0][0] < self.least_s:
            return None
        since = tail[-1][0] - _OVER_S
        values = [value for second, value in tail if second > since]
        return sum(values) / len(values) if values else None  # of times so large that a minute is nothing
