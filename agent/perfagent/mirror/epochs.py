"""Sums over epochs (`perf/epoch_forward_time` and the like) for the TensorBoard mirror.

An epoch ends where the loader that feeds the training does. A loop without a loader has none: what it did is one epoch,
written at the run's end. The first step has no time, and is in no sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from perfagent.wire import Group

__all__ = ["Epoch", "Epochs"]

_STEP = "step_time_s"
_COMPUTE = {
    "phase/forward_s": "forward_time",
    "phase/backward_s": "backward_time",
    "phase/optimizer_s": "optimizer_time",
}
_TIMES = _COMPUTE | {"phase/data_s": "data_loading_time", _STEP: "time"}
_RATIOS = {"data_loading": ("phase/data_s",), "compute": tuple(_COMPUTE), "communication": ("phase/comm_s",)}
_MEMORY = ("cuda/allocated_bytes", "process/rss_bytes")
"""The first of them that there is."""
Epoch = tuple[int, float, dict[str, float]]
"""The last step, Unix time at its end, and values by name, in seconds, percent or GB (10^9 bytes)."""


class Epochs:
    """Adds up what is recorded, step after step."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._last, self._time = 0, 0.0

    def add(self, groups: Iterable[Group], begins: deque[int]) -> Iterator[Epoch]:
        """The epochs that end among these groups. begins: ascending, the first steps of new ones; they are taken out."""
        for step, time, name, value in sorted(row for group in groups for row in _rows(group)):
            while begins and begins[0] <= step:
                begins.popleft()
                yield from self.end()
            if name == _STEP:
                self._last, self._time = step, time
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1
        if begins:  # of the next one there is nothing yet
            begins.clear()
            yield from self.end()

    def end(self) -> Iterator[Epoch]:
        """What was added since the last end is an epoch, if it is anything."""
        sums, self._sums = self._sums, {}
        seconds = {name: total for name, (total, _) in sums.items()}
        whole = seconds.get(_STEP, 0.0)
        if not whole:
            return
        values = {f"perf/epoch_{alias}": seconds[name] for name, alias in _TIMES.items() if name in seconds}
        for alias, names in _RATIOS.items():
            if any(name in seconds for name in names):
                values[f"perf/epoch_{alias}_ratio"] = 100 * sum(seconds.get(name, 0.0) for name in names) / whole
        for total, count in [sums[name] for name in _MEMORY if name in sums][:1]:
            values["perf/epoch_avg_memory_gb"] = total / count / 1e9
        yield self._last, self._time, values


def _rows(group: Group) -> Iterator[tuple[int, float, str, float]]:
    wanted = (*_TIMES, "phase/comm_s", *_MEMORY) if _STEP in group.values else _MEMORY
    for name in [name for name in wanted if name in group.values]:
        for step, time, value in zip(group.steps(), group.times(), group.column(name), strict=True):
            if math.isfinite(value):
                yield step, time, name, value
