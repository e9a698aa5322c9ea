"""Finds where a run was started again: there the steps of its files begin again at a lower one."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from perfagent.wire import LOSS, loss_kind
from perfagent_client.history.old_run import Samples

__all__ = ["Attempts", "loss_of", "start_step"]


def loss_of(series: Mapping[str, Samples]) -> str | None:
    """The loss that is trained on, as the window of the rules chooses it."""
    return LOSS if LOSS in series else next((name for name in series if loss_kind(name) == "whole"), None)


class Attempts:
    """Of a run with these series, of which there must be one: where the steps of the leading one begin again."""

    def __init__(self, series: Mapping[str, Samples]) -> None:
        leading = series[loss_of(series) or max(series, key=lambda name: len(series[name]))]
        again = [at for at, (before, step) in enumerate(pairwise(leading.step), 1) if step < before]
        self._steps = [leading.step[at] for at in again]
        self._times = [leading.time[at] for at in again]
        self._are_times_known = all(map(math.isfinite, self._times))

    @property
    def count(self) -> int:
        return 1 + len(self._steps)

    def of(self, samples: Samples) -> Sequence[int]:
        """The attempt of each sample, from 1: by time where both are known; by how often the series itself goes back, if that
        is as often; else the newest attempt that had begun at or before this step."""
        if not self._steps:
            return [1] * len(samples)
        if self._are_times_known and all(map(math.isfinite, samples.time)):
            return [1 + bisect_right(self._times, time) for time in samples.time]
        own, attempts = 1, [1]
        for before, step in pairwise(samples.step):
            own += step < before
            attempts.append(own)
        if own == self.count:
            return attempts
        return [
            max((at for at, begin in enumerate(self._steps, 2) if step >= begin), default=1) for step in samples.step
        ]


def start_step(steps: Iterable[int]) -> int:
    """The step from which an attempt with these steps goes on; 0 where it begins anew: what logs every tenth step begins with
    the tenth."""
    found = sorted(set(steps))[:20]
    apart = min((after - before for before, after in pairwise(found)), default=found[0])
    return 0 if found[0] <= max(1, apart) else found[0]
