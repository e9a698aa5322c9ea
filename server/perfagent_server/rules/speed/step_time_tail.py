"""step_time_tail: a few steps take far longer than the others, and more of them than before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from perfagent.wire import TIMED_PHASES, Finding
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.speed import cpu_load, step_shares
from perfagent_server.rules.speed.level_shift import middle
from perfagent_server.rules.speed.step_shares import PAUSES
from perfagent_server.rules.steady_steps import SKIPPED_STEPS
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["StepTimeTail"]

_TYPICAL_STEPS, _RENEWED_EVERY = 63, 16  # steps whose median is typical, and how long it is good for
_IN_OCTAVE, _BINS = 8, 48  # of the baseline's histogram
_BLOCK_STEPS, _BLOCKS = 100, 10
_APART_STEPS = 3  # slow steps that follow each other so closely are one
_MOST_SLOW = 64
_REGULAR = 0.7  # of the intervals, to be called regular


@dataclass(frozen=True, kw_only=True)
class StepTimeTail(Rule):
    """Slow steps, against a threshold that is learned from the first baseline_steps.

    P99/P50 of single-node research runs is 1.67 in the median and up to 6.3, of MLPerf submissions 1.002 to 1.03. Three
    standard deviations flag ten steps of any thousand. Slow steps that follow each other count as one, because a slow
    stretch is no tail.
    """

    tail_times: float = 2.0
    outliers_per_1000: int = 10
    warning_pct: float = 5.0
    baseline_steps: int = 400
    clear_at: float = 0.8  # of the outliers

    id = "step_time_tail"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("throughput_regression",)
    reads = (Series("step_time_s", merge="median", judged=True), *step_shares.READS[1:], *cpu_load.READS)
    charts = ("step_time_s",)
    profile_helps = True
    life = Life(clear_steps=1, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        took = window.by_step["step_time_s"]
        value, step = took.value, window.at
        if value is None or not 0 < value < math.inf or step <= window.start_step + SKIPPED_STEPS:
            return UNKNOWN
        if window.wall.was_interrupted(step):
            return UNKNOWN
        # typical: median of the steps around; counts: of the baseline, by times of that; limit: from which on a step is
        # slow, 0.0 while that is not known; seen, usual: steps before the newest, and slow ones among them; blocks of the
        # newest: steps, slow ones, seconds lost, seconds; slow: steps; longer: seconds by phase
        fresh: dict[str, Any] = {
            "typical": 0.0, "typical_for": 0, "counts": [0] * _BINS, "seen": 0, "limit": 0.0, "usual": 0,
            "blocks": [], "slow": [], "longer": {},
        }  # fmt: skip
        state = window.state_of(self, fresh)
        state["typical_for"] -= 1
        if state["typical_for"] < 0:
            around = [one for one in took.last(_TYPICAL_STEPS) if 0 < one < math.inf]
            state["typical"], state["typical_for"] = middle(around), _RENEWED_EVERY - 1
        times = value / state["typical"]
        if not state["limit"]:
            self._learn(state, times)
            return UNKNOWN
        if not self._count(window, state, step, times, value):
            return UNKNOWN if window.is_firing(self.id) and step % _BLOCK_STEPS else None
        slow = sum(block[1] for block in state["blocks"])
        # of as many slow steps as before, at most so many come: three standard deviations of both counts
        parts = sum(block[0] for block in state["blocks"]) / state["seen"]
        expected = (state["usual"] + 0.5) * parts
        least = max(self.outliers_per_1000, expected + 3 * math.sqrt(expected * (1 + parts)))
        if slow < least * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self._finding(window, took, state, slow)

    def _learn(self, state: dict[str, Any], times: float) -> None:
        counts = state["counts"]
        counts[max(0, min(_BINS - 1, math.ceil(_IN_OCTAVE * math.log2(times))))] += 1
        state["seen"] += 1
        if state["seen"] < self.baseline_steps:
            return
        rest, place = 0.01 * self.baseline_steps, _BINS - 1
        while place and counts[place] <= rest:
            rest -= counts[place]
            place -= 1
        beyond = sum(counts[place + math.ceil(_IN_OCTAVE * math.log2(self.tail_times)) :])
        state["usual"] = beyond
        state["limit"], state["counts"] = self.tail_times * 2 ** (place / _IN_OCTAVE), []

    def _count(self, window: Window, state: dict[str, Any], step: int, times: float, value: float) -> bool:
        """Whether there is something to say: the step was a slow one, or the alert is open and it is time to look."""
        blocks, slow = state["blocks"], state["slow"]
        if not blocks or blocks[-1][0] >= _BLOCK_STEPS:
            blocks.append([0, 0, 0.0, 0.0])
            for older in blocks[:-_BLOCKS]:
                if not window.is_firing(self.id):  # it says what is usual
                    state["seen"] += older[0]
                    state["usual"] += older[1]
            del blocks[:-_BLOCKS]
        block = blocks[-1]
        block[0] += 1
        block[3] += value
        if times <= state["limit"]:
            return window.is_firing(self.id) and step % _BLOCK_STEPS == 0
        block[2] += value - state["typical"]
        block[1] += not slow or step - slow[-1][0] > _APART_STEPS
        slow.append([step, times])
        del slow[:-_MOST_SLOW]
        for phase, seconds in _longer(window, step).items():
            state["longer"][phase] = 0.9 * state["longer"].get(phase, 0.0) + seconds
        return True

    def _finding(self, window: Window, took: StepSeries, state: dict[str, Any], slow: int) -> Finding:
        blocks, typical = state["blocks"], state["typical"]
        steps, lost_s, total_s = (sum(block[at] for block in blocks) for at in (0, 2, 3))
        share, each = 100 * lost_s / total_s, typical * middle([times for _, times in state["slow"]])
        every = _interval([step for step, _ in state["slow"]])
        phase = max(state["longer"], key=lambda name: state["longer"][name], default="")
        is_crowded = cpu_load.is_crowded(window, took.time or 0.0)
        return self.found(
            "warning" if share >= self.warning_pct and not is_crowded else "info",
            cause="regular" if every else "data" if phase == "data" else "",
            since_step=state["slow"][0][0],
            evidence={
                "slow_steps": [step for step, _ in state["slow"]][-20:], "slow": slow, "steps": steps, "share_pct": share,
                "times": each / typical, "typical_s": typical, "step_p90_s": p90(sorted(took.last(took.size))), "slow_s": each,
                "usual_most_s": typical * state["limit"] / self.tail_times, "limit_times": state["limit"],
                "every_steps": every or None, "phase": phase, "longer_s": dict(state["longer"]),
                "meanwhile": "crowded" if is_crowded else None,
            },
            gain_pct=share,
        )  # fmt: skip


def _longer(window: Window, step: int) -> dict[str, float]:
    """By how much the phases of a step are longer than those of the steps before it."""
    found = {}
    for phase in TIMED_PHASES:
        values = window.track(f"phase/{phase}_s").before(step, 33) if phase not in PAUSES else []
        if len(values) > 8 and math.isfinite(values[-1]):
            found[phase] = max(0.0, values[-1] - middle(values[:-1]))
    return found


def _interval(steps: Sequence[int]) -> int:
    """Steps between two slow ones, where that is nearly always the same; else 0."""
    apart = [later - earlier for earlier, later in pairwise(steps)]
    if len(apart) < 5:
        return 0
    usual = int(middle(apart))
    regular = sum(abs(one - usual) <= max(1, 0.05 * usual) for one in apart)
    return usual if usual > 1 and regular >= _REGULAR * len(apart) else 0
