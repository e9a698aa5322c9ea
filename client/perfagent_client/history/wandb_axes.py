"""Finds the steps of W&B's rows. `_step` counts calls of `log`; Lightning, Transformers and `define_metric` have an axis that
counts steps of training, as a series of its own.
https://docs.wandb.ai/models/track/log/customize-logging-axes
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from itertools import accumulate

from perfagent_client.history.old_run import Samples
from perfagent_client.history.rows import whole_step

__all__ = ["Axes"]

_USUAL = ("trainer/global_step", "train/global_step", "global_step")
"""Of Lightning, of Transformers, and of rows that W&B takes from TensorBoard."""
_COUNTS_STEPS = re.compile(r"(?:^|[/._ -])(?:steps?|iter(?:ation)?s?|updates?)$", re.IGNORECASE)
"""Not epochs, samples or seconds."""


class Axes:
    """own: W&B's step of each row; its first entry stands for what comes before any row. defined: metric, or the beginning of
    some and `*` -> its axis."""

    def __init__(self) -> None:
        self.own, self.defined = array("q", [0]), dict[str, str]()

    def settle(self, series: Mapping[str, Samples]) -> None:
        """Replaces the numbers of rows, which samples have for a step, by steps: those of the series' axis, if each of its rows
        has it. Others get the newest value of the axis that most rows have, 0 before its first, as W&B itself writes them
        (`step_sync`); where less than half of the rows have one, W&B's own steps."""
        names = dict.fromkeys((*_USUAL, *self.defined.values()))
        columns = {axis: self._column(series[axis]) for axis in names if axis in series and _COUNTS_STEPS.search(axis)}
        most = min(columns.values(), key=lambda column: column.count(-1), default=self.own)
        newest = self.own
        if most is not newest and most.count(-1) <= len(most) / 2:
            newest = array("q", accumulate(most, lambda before, step: before if step < 0 else step, initial=0))[1:]
        for name, samples in series.items():
            rows, axis = samples.step, self._axis(name, columns)
            samples.step = array("q", map(columns.get(axis, newest).__getitem__, rows))
            if min(samples.step) < 0:
                samples.step = array("q", map(newest.__getitem__, rows))

    def _axis(self, name: str, columns: Mapping[str, array[int]]) -> str:
        """A whole name comes before beginnings of one, of which the longest counts."""
        defined = [key for key in self.defined if key == name or (key[-1:] == "*" and name.startswith(key[:-1]))]
        own = self.defined[max(defined, key=lambda key: (key == name, len(key)))] if defined else ""
        return next((axis for axis in (own, *_USUAL) if axis in columns), "")

    def _column(self, samples: Samples) -> array[int]:
        """An axis's value in each row; -1 where a row has none that is a step."""
        column = array("q", [-1]) * len(self.own)
        for row, value in zip(samples.step, samples.value, strict=True):
            step = whole_step(value)
            column[row] = -1 if step is None else step
        return column
