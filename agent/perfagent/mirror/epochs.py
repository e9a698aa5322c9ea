"""Sums over epochs (`perf/epoch_forward_time` and the like).

An epoch ends where the loader that feeds the training does. A loop without a loader has none: what it did is one epoch,
written at the run's end. In the TensorBoard mirror only: the series of a run are of single steps, from which a page
makes any sum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from perfagent.wire import Group

__all__ = ["Epoch", "Epochs"]

_TIMES = {
    "phase/forward_s": "forward_time",
    "phase/backward_s": "backward_time",
    "phase/optimizer_s": "optimizer_time",
    "phase/data_s": "data_loading_time",
}
_COMPUTE = ("phase/forward_s", "phase/backward_s", "phase/optimizer_s")
_STEP = "step_time_s"
_SUMMED = (_STEP, *_TIMES, "phase/comm_s")
_MEMORY = ("cuda/allocated_bytes", "process/rss_bytes")
"""The first of them that there is."""


class Epoch(NamedTuple):
    """step: the last of it; time: Unix time at its end; values: by name, seconds, percent or GB (10^9 bytes)."""

    step: int
    time: float
    values: dict[str, float]


class Epochs:
    """Adds up what is recorded, step after step. The first step has no time, and is in no sum."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._memory: dict[str, list[float]] = {}
        self._last, self._time = 0, 0.0

    def add(self, groups: Iterable[Group], begins: Sequence[int]) -> Iterator[Epoch]:
        """The epochs that end among these groups. begins: ascending, the first steps of new ones."""
        rows = sorted((step, time, name, value) for group in groups for step, time, name, value in _rows(group))
        epoch = 0
        for step, time, name, value in rows:
            ended = bisect_right(begins, step)
            if ended > epoch:
                epoch = ended
                yield from self.end()
            if name == _STEP:
                self._last, self._time = step, time
            if name in _MEMORY:
                total = self._memory.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += 1
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value
        if epoch < len(begins):  # of the next one there is nothing yet
            yield from self.end()

    def end(self) -> Iterator[Epoch]:
        """What was added since the last end is an epoch, if it is anything."""
        sums, memory = self._sums, self._memory
        self._sums, self._memory = {}, {}
        whole = sums.get(_STEP, 0.0)
        if not whole:
            return
        values = {f"perf/epoch_{alias}": sums[name] for name, alias in _TIMES.items() if name in sums}
        values["perf/epoch_time"] = whole
        if "phase/data_s" in sums:
            values["perf/epoch_data_loading_ratio"] = 100 * sums["phase/data_s"] / whole
        if any(name in sums for name in _COMPUTE):
            values["perf/epoch_compute_ratio"] = 100 * sum(sums.get(name, 0.0) for name in _COMPUTE) / whole
        if "phase/comm_s" in sums:
            values["perf/epoch_communication_ratio"] = 100 * sums["phase/comm_s"] / whole
        for total, count in [memory[name] for name in _MEMORY if name in memory][:1]:
            values["perf/epoch_avg_memory_gb"] = total / count / 1e9
        yield Epoch(self._last, self._time, values)


def _rows(group: Group) -> Iterator[tuple[int, float, str, float]]:
    timed = _STEP in group.values
    names = [name for name in group.values if name in _MEMORY or (timed and name in _SUMMED)]
    if not names:
        return
    steps, times = group.steps(), group.times()
    for name in names:
        for step, time, value in zip(steps, times, group.column(name), strict=True):
            if math.isfinite(value):
                yield step, time, name, value
