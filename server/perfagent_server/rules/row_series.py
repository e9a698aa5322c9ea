"""Series side by side over the same steps, as rules see them: a row for each rank, or for each layer of a family."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowSeries"]

Key = TypeVar("Key", bound=Hashable)


class RowSeries(Generic[Key]):
    """The newest `keep` steps of several rows. A step costs the same however many rows there are."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._rows: dict[Key, int] = {}
        self._columns: dict[int, int] = {}  # step -> column
        self._values = np.full((0, keep), np.nan)
        self._newest_keys: tuple[Key, ...] = ()
        self._newest_rows = np.empty(0, np.intp)

    def take(self, key: Key, steps: Sequence[int], values: Sequence[float]) -> None:
        """Sets values of a row."""
        row = self._row(key)
        for step, value in zip(steps, values, strict=True):
            column = self._column(step)
            if column is not None:  # else it is older than all that are kept
                self._values[row, column] = value

    def take_largest(self, keys: tuple[Key, ...], steps: Sequence[int], values: NDArray[np.float64]) -> None:
        """Sets values of several rows: float64 (keys, steps). Of several values for one step (those of several ranks)
        the largest counts; of more steps than are kept the newest are taken."""
        if keys is not self._newest_keys:
            self._newest_keys, self._newest_rows = keys, np.array([self._row(key) for key in keys])
        for place in range(max(0, len(steps) - self.keep), len(steps)):
            column = self._column(steps[place])
            if column is not None:
                known = self._values[self._newest_rows, column]
                self._values[self._newest_rows, column] = np.fmax(known, values[:, place])

    def __len__(self) -> int:
        return len(self._rows)

    def matrix(self, until: float = math.inf) -> tuple[list[Key], list[int], NDArray[np.float64]]:
        """The rows in the order in which they came, the steps up to `until`, and the values: float64 (rows, steps), NaN
        where a row has no value."""
        steps = sorted(step for step in self._columns if step <= until)
        columns = [self._columns[step] for step in steps]
        return list(self._rows), steps, self._values[: len(self._rows), columns]

    def snapshot(self) -> list[Any]:
        return [list(self._rows), list(self._columns.items()), self._values[: len(self._rows)].tobytes()]

    def restore(self, state: Sequence[Any]) -> None:
        keys, columns, values = state
        self._rows = {key: row for row, key in enumerate(keys)}
        self._columns = dict(columns)
        self._values = np.frombuffer(values, np.float64).reshape(len(keys), self.keep).copy()

    def _row(self, key: Key) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            if row >= len(self._values):
                more = np.full((max(8, len(self._values)), self.keep), np.nan)
                self._values = np.concatenate([self._values, more])
        return row

    def _column(self, step: int) -> int | None:
        """The column of a step; None for one that is older than all that are kept."""
        found = self._columns.get(step)
        return self._new_column(step) if found is None else found

    def _new_column(self, step: int) -> int | None:
        if len(self._columns) < self.keep:
            column = self._columns[step] = len(self._columns)
            return column
        oldest = min(self._columns)
        if step < oldest:
            return None
        column = self._columns[step] = self._columns.pop(oldest)
        self._values[:, column] = np.nan
        return column
