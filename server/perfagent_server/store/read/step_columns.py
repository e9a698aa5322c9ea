"""Columns by step that grow as ranks are added, so that a question about many ranks holds one row and not one a rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from perfagent_server.store.codec.aggregates import Ints

__all__ = ["StepColumns"]


class StepColumns:
    """fill: what a column holds at a step before anything is put there; its type is the column's."""

    def __init__(self, **fill: float | int) -> None:
        self._fill = fill
        self.step: Ints = np.empty(0, np.int64)
        self._columns = {name: np.full(0, value) for name, value in fill.items()}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def places(self, step: Ints) -> Ints | slice:
        """Where the columns hold these steps (in order, each once), which they do from now on."""
        if np.array_equal(step, self.step):
            return slice(None)
        new = np.setdiff1d(step, self.step, assume_unique=True)
        if len(new):
            steps = np.union1d(self.step, new)
            here = np.searchsorted(steps, self.step)
            for name, column in self._columns.items():
                grown = np.full(len(steps), self._fill[name])
                grown[here] = column
                self._columns[name] = grown
            self.step = steps
        return np.searchsorted(self.step, step)
