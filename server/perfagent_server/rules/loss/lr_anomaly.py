"""lr_anomaly: the learning rate is invalid, stays at zero, or jumped."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding, Severity
from perfagent_server.rules.loss import zero_rate
from perfagent_server.rules.loss.loss_series import recent
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["LrAnomaly"]

_BEFORE = 48  # values of the loss before a jump of the rate
_AFTER = 9
_NEWEST = 10  # values over which the loss grows until it is NaN


@dataclass(frozen=True, kw_only=True)
class LrAnomaly(Rule):
    """A rate that decayed to zero, or to a millionth of its peak, has 5 % of the run for that: schedules end so. It is
    the rate of the first parameter group, so a measurement that says that weights moved outweighs it. A high rate at
    a loss that grew by grown_times until it was NaN is a remark.

    Schedules jump with reason: down at milestones, up to a rate they had before at warm restarts, and in the large
    steps of a warm-up by epochs. So a jump counts only when it goes to a new peak, and is a warning only when the
    loss got worse by it: the median of nine of the worse_steps values after it stands loss_pct and loss_spreads of
    their spread above the 48 before. Else it is a remark if the rate had been lowered before, and nothing in a
    warm-up. Where a run goes on from a checkpoint, the rate of the attempt before at the same step, or at the last one
    before it, is what it must not jump from: no restart of a schedule falls on such a step by chance.
    """

    zero_steps: int = 50
    zero_share: float = 1e-6
    jump_times: float = 2.0
    skip_steps: int = 20
    worse_steps: int = 200
    loss_pct: float = within(5.0, most=10_000)
    loss_spreads: float = 2.0
    high_rate: float = 1e-3
    grown_times: float = 2.0

    id: ClassVar[str] = "lr_anomaly"
    severities = ("info", "warning", "critical")
    question = Question.DOES_IT_LEARN
    after = ("poor_init",)
    reads = (
        Series("lr", merge="max", judged=True), Series(LOSS, keep=64, judged=True), Series("update/ratio", keep=16),
    )  # fmt: skip
    charts = ("lr", LOSS)
    life = Life(clear_steps=20, restated=True)
    state_version = 2
    joins = ("frozen_training", "loss_divergence", "nonfinite_loss")

    def judge(self, window: Window) -> Finding | Unknown | None:
        rates = window.series("lr")
        if rates is None or rates.value is None or rates.step is None:
            return UNKNOWN
        # zero: see zero_rate; last, peak: the newest rate, the highest; fell: whether it was ever lowered; jump: the last
        # one: [step, from, to, the loss above which it got worse, whether it did, whether it is told anyway, cause];
        # resumed: whether it may jump where the run went on
        fresh = {
            "step": -1, "peak": 0.0, "last": 0.0, "fell": False, "jump": None, "zero": dict(zero_rate.FRESH),
            "resumed": "lr" in window.before,
        }  # fmt: skip
        state = window.state_of(self, fresh)
        rate = rates.value
        if not math.isfinite(rate) or rate < 0:
            return self._found(window, "critical", "", rates.step, rate=rate, before=state["last"])
        if rates.step != state["step"]:
            self._follow(window, state, rate, rates.step)
        if state["peak"] > 0 and zero_rate.stays_zero(window, state["zero"], self.zero_steps):
            return self._found(window, "warning", "zero", state["zero"]["since"], rate=rate, peak=state["peak"])
        jumped = self._jumped(window, state) if state["jump"] is not None else None
        if jumped is not None:
            return jumped
        if rate >= self.high_rate and window.is_firing("nonfinite_loss") and self._grew(window):
            return self._found(window, "info", "NaN", window.at, rate=rate, peak=state["peak"])
        return None

    def _grew(self, window: Window) -> bool:
        """Whether the newest finite losses grew beyond all before, which neither a bad sample nor noise makes them do."""
        known, _ = _losses(window)
        return len(known) > 1 and known[-1] > self.grown_times * max(0.0, *(known[:-_NEWEST] or known[:1]))

    def _follow(self, window: Window, state: dict[str, Any], rate: float, step: int) -> None:
        last, peak, begun = state["last"], state["peak"], window.start_step
        is_early = step <= begun + self.skip_steps or state["step"] < 0
        if not is_early and peak > 0 and rate > self.jump_times * peak * (1 + 1e-6):
            state["jump"] = [step, last, rate, self._limit(window, window.by_step, step), False, state["fell"], "jump"]
        state["resumed"] = state["resumed"] and (begun > 0 or step <= begun)
        before = window.before["lr"].before(step, 1) if state["resumed"] and step > begun else []
        if before and math.isfinite(before[0]):
            state["resumed"] = False
            if rate > self.jump_times * before[0] > 0:
                limit = self._limit(window, window.before, begun)
                state["jump"] = [begun + 1, before[0], rate, limit, False, True, "resume"]
        state["fell"] = state["fell"] or rate < last * (1 - 1e-6)
        state.update(step=step, last=rate, peak=max(peak, rate))
        zero_rate.follow(state["zero"], rate, step, zero_share=self.zero_share)

    def _jumped(self, window: Window, state: dict[str, Any]) -> Finding | None:
        step, before, after, limit, is_worse, is_told, cause = state["jump"]
        losses, steps = _losses(window)
        since = losses[bisect_right(steps, step) :]
        is_worse = state["jump"][4] = is_worse or (len(since) >= _AFTER and median(since[-_AFTER:]) > limit)
        if window.at > step + self.worse_steps * (5 if is_worse or cause == "resume" else 1):
            state["jump"] = None
            return None
        waits = cause == "resume" and len(since) < 2 * _AFTER and window.loss_name is not None
        if not is_worse and (waits or not is_told):
            return None
        return self._found(
            window, "warning" if is_worse else "info", cause, step, before=before, rate=after, jump_times=self.jump_times,
            worse_series=window.loss_name if is_worse else None,
        )  # fmt: skip

    def _limit(self, window: Window, series: Mapping[str, StepSeries], step: int) -> float:
        """Above which the loss is worse than before this step; infinite if too little came before it."""
        track = series.get(window.loss_name or LOSS)
        before = sorted(value for value in track.before(step, _BEFORE) if math.isfinite(value)) if track else []
        if len(before) < _BEFORE // 2:
            return math.inf
        level, quarter = median(before), len(before) // 4
        spread = (before[-1 - quarter] - before[quarter]) / 1.349
        return level + max(self.loss_pct / 100 * abs(level), self.loss_spreads * spread)

    def _found(self, window: Window, severity: Severity, cause: str, since: int, **figures: Any) -> Finding:
        figures |= {"step": window.at, "since_step": since, "last_lrs": window.by_step["lr"].last(50)}
        return self.found(severity, cause=cause, since_step=since, evidence={**recent(window), **figures})


def _losses(window: Window) -> tuple[list[float], list[int]]:
    """Those that are kept and are numbers, and their steps."""
    track = window.series(window.loss_name or LOSS)
    if track is None:
        return [], []
    kept = zip(track.last(track.size), track.last_steps(track.size), strict=True)
    known = [(value, step) for value, step in kept if math.isfinite(value)]
    return [value for value, _ in known], [step for _, step in known]
