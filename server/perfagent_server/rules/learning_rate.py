"""What the learning rate did, as far as it says from where on the loss may be judged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

__all__ = ["LearningRate"]

_BEFORE = 16  # steps that a new rate is compared with
_QUIET_STEPS = 200


class LearningRate:
    """peak: the highest so far; last_rise: the step at which it last rose to a new peak; quiet_until: the step until
    which the loss is not judged, because the rate was raised again."""

    __slots__ = ("last_rise", "peak", "quiet_until")

    def __init__(self, peak: float = -math.inf, last_rise: int | None = None, quiet_until: int = -1) -> None:
        self.peak, self.last_rise, self.quiet_until = peak, last_rise, quiet_until

    def note(self, step: int, rate: float, before: Sequence[float]) -> None:
        """Takes the rate of a step. before: those of the steps before it, at least 16 if there were so many."""
        if not math.isfinite(rate):
            return
        if rate > self.peak * (1 + 1e-6):
            self.last_rise = step
        self.peak = max(self.peak, rate)
        before = before[-_BEFORE:]
        # A warm restart or a changed schedule: the loss rises with reason until its history is from after the change.
        # A rise without a break since the start is the warm-up, which rules know by last_rise.
        if len(before) == _BEFORE and rate > 1.25 * min(before) and rate - min(before) > 0.02 * self.peak:
            warming_up = all(a < b for a, b in itertools.pairwise(before)) and rate >= self.peak
            if not warming_up:
                self.quiet_until = max(self.quiet_until, step + _QUIET_STEPS)

    def snapshot(self) -> list[Any]:
        return [self.peak, self.last_rise, self.quiet_until]
