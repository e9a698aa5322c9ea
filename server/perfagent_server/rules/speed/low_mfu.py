"""low_mfu: the devices do little of the arithmetic that they could, or less than before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import bounds
from perfagent_server.rules.speed.bounds import bound_figures, what_bounds
from perfagent_server.rules.speed.level_shift import LevelShift, Shift, middle
from perfagent_server.rules.steady_steps import SKIPPED_STEPS
from perfagent_server.rules.window import Window

__all__ = ["LowMfu"]

_MFU, _FLOPS, _STEP_TIME = "mfu", "flops_per_s", "step_time_s"
_SAME_WORK = 0.02  # by which the arithmetic of a step may change
_LOOKED_EVERY = 20  # steps
_TYPICAL_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class LowMfu(Rule):
    """Model FLOPs utilization fell (level_shift.py has the method), or is low.

    The peak is known for some devices, for dense arithmetic in the type that the model computes in. Other shapes reach
    another utilization, so a fall with other arithmetic per step is info. So is a low level: small models cannot fill a
    large device.
    """

    drop_pct: float = 5.0
    info_below_pct: float = 20.0
    steps: int = within(64, least=2, most=64)
    clear_at: float = 1.1  # times the level

    id: ClassVar[str] = "low_mfu"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("load_imbalance",)
    reads = (Series(_MFU, judged=True), Series(_FLOPS, merge="sum"), *bounds.READS)
    charts = (_MFU,)
    profile_helps = True
    life = Life(clear_steps=20, restated=True)
    joins = ("throughput_regression",)
    needs_card = True
    seen_on = "an NVIDIA H200"

    def judge(self, window: Window) -> Finding | Unknown | None:
        series, step = window.by_step[_MFU], window.at
        value, time = series.value, series.time
        took = window.by_step.get(_STEP_TIME)
        before = took.before(step, 1) if took is not None else []
        if value is None or time is None or not 0 < value < math.inf or not before or not before[0] > 0:
            return UNKNOWN
        if step <= window.start_step + SKIPPED_STEPS or window.wall.was_interrupted(step):
            return UNKNOWN
        # work: arithmetic of a typical step before the fall, in FLOPs
        state = window.state_of(self, {"track": LevelShift.fresh(), "work": 0.0, "until_look": 0})
        detector = LevelShift(rise_times=1 / (1 - self.drop_pct / 100))
        if not detector.take(state["track"], step, time, 1 / value, before[0]):
            return UNKNOWN
        shift = detector.look(state["track"])
        if shift is not None:
            return self._fell(window, state, shift)
        state["until_look"] -= 1
        if state["until_look"] >= 0:
            return UNKNOWN
        state["until_look"], state["work"] = _LOOKED_EVERY - 1, _work(window)
        return self._low(window, series.last(self.steps))

    def _fell(self, window: Window, state: dict[str, Any], shift: Shift) -> Finding:
        bound, work = what_bounds(window), _work(window, shift.groups * shift.size)
        is_same = bool(state["work"]) and abs(work / state["work"] - 1) <= _SAME_WORK
        lost = 100 * (1 - 1 / shift.times)
        changed = None if is_same or not state["work"] else 100 * (work / state["work"] - 1)
        return self.found(
            "warning" if is_same else "info",
            cause="fell",
            since_step=shift.step,
            evidence={
                "step": shift.step, "mfu_pct": 100 / shift.level, "before_pct": 100 / shift.before, "lost_pct": lost,
                "work_flops": work, "work_before_flops": state["work"], "work_changed_pct": changed,
                "steps": shift.groups * shift.size, **bound_figures(bound),
            },
            gain_pct=lost,
        )  # fmt: skip

    def _low(self, window: Window, values: list[float]) -> Finding | Unknown | None:
        known = [value for value in values if math.isfinite(value)]
        if len(known) < self.steps // 2:
            return UNKNOWN
        limit = self.info_below_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        mfu = 100 * middle(known)
        if mfu >= limit:
            return None
        return self.found(
            "info",
            since_step=window.at,
            evidence={"mfu_pct": mfu, "steps": len(known), **bound_figures(what_bounds(window))},
        )


def _work(window: Window, newest: int = _TYPICAL_STEPS) -> float:
    """Arithmetic of a typical one of the newest steps, all ranks together; 0.0 where it is not known."""
    steps = min(newest, _TYPICAL_STEPS)
    rates, took = window.by_step.get(_FLOPS), window.by_step.get(_STEP_TIME)
    known = [one for one in rates.before(window.at, steps) if math.isfinite(one)] if rates is not None else []
    times = [one for one in took.before(window.at, steps) if one > 0] if took is not None else []
    return middle(known) * middle(times) if known and times else 0.0
