"""Series side by side over the same steps, as rules see them: of each rank, or of each layer of a family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["FamilyRows", "Floats", "RankRows"]

Floats = NDArray[np.float64]


Key = TypeVar("Key", int, str)


class _Rows(Generic[Key]):
    """A table of the newest `keep` steps: float64 (rows, ..., keep), one row per key (a rank or a layer), one column per
    step. A missing value is NaN."""

    def __init__(self, *shape: int) -> None:
        self._keep, self._values = shape[-1], np.full((0, *shape), np.nan)
        self._rows: dict[Key, int] = {}
        self._columns: dict[int, int] = {}
        self._newest = -1  # step, also when it is no longer kept

    def _row(self, key: Key) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            if row >= len(self._values):
                more = np.full((max(8, row), *self._values.shape[1:]), np.nan)
                self._values = np.concatenate([self._values, more])
        return row

    def _column(self, step: int) -> int | None:
        """The column of a step, emptied if it was an older step's; None for a step older than all."""
        column = self._columns.get(step)
        if column is not None:
            return column
        self._newest = max(self._newest, step)
        column = len(self._columns)
        if column >= self._keep:
            oldest = min(self._columns)
            if step < oldest:
                return None
            column = self._columns.pop(oldest)
            self._values[..., column] = np.nan
        self._columns[step] = column
        return column

    def _until(self, step: float) -> tuple[list[int], list[int]]:
        """The steps that are kept up to one, ascending, and their columns."""
        steps = sorted(one for one in self._columns if one <= step)
        return steps, [self._columns[one] for one in steps]


class RankRows(_Rows[int]):
    """The newest steps of some series, each rank apart. keep: series -> how many steps; the largest counts for all.

    A frame costs the same however many ranks and series there are.
    """

    def __init__(self, keep: Mapping[str, int]) -> None:
        super().__init__(len(keep), max(keep.values(), default=0))
        self._series = {name: place for place, name in enumerate(keep)}
        self._places: dict[tuple[str, ...], NDArray[np.intp]] = {}

    def take(self, rank: int, names: tuple[str, ...], steps: Sequence[int], values: Sequence[Sequence[float]]) -> None:
        """values: of each name, of each step."""
        places = self._places.get(names)
        if places is None:
            places = self._places[names] = np.array([self._series[name] for name in names], np.intp)
        row = self._row(rank)
        for at, step in enumerate(steps):
            column = self._column(step)
            if column is not None:
                self._values[row, places, column] = [of_name[at] for of_name in values]

    def __len__(self) -> int:
        """How many steps are kept."""
        return len(self._columns)

    def kept_until(self, step: int) -> int:
        """How many steps are kept up to one. Of a long frame that may be none: its first steps are judged when only the
        last ones are still kept."""
        return len(self._until(step)[0])

    def matrix(self, name: str, until: float = math.inf) -> tuple[list[int], list[int], Floats]:
        """The ranks in the order in which they came, the steps up to `until`, and the values: float64 (ranks, steps),
        NaN where a rank has no value."""
        steps, columns = self._until(until)
        return list(self._rows), steps, self._values[: len(self._rows), self._series[name]][:, columns]


class FamilyRows(_Rows[str]):
    """The newest `keep` steps of the layers of a family, ranks put together: of several values of a step the largest
    counts."""

    def __init__(self, keep: int) -> None:
        super().__init__(keep)
        self._newest_names: tuple[str, ...] = ()
        self._newest_rows = np.empty(0, np.intp)

    def take(self, names: tuple[str, ...], steps: Sequence[int], values: Sequence[Sequence[float]]) -> bool:
        """Whether a step is newer than all before. values: of each name, of each step."""
        newest = self._newest
        if names is not self._newest_names:
            self._newest_names, self._newest_rows = names, np.array([self._row(name) for name in names], np.intp)
        for at in range(max(0, len(steps) - self._keep), len(steps)):
            column = self._column(steps[at])
            if column is not None:
                known = self._values[self._newest_rows, column]
                self._values[self._newest_rows, column] = np.fmax(known, [of_name[at] for of_name in values])
        return self._newest > newest

    def matrix(self, until: float = math.inf) -> tuple[list[str], list[int], Floats]:
        """The layers in the order in which they came, the steps up to `until`, and the values: float64 (layers,
        steps), NaN where a layer has no value."""
        steps, columns = self._until(until)
        return list(self._rows), steps, self._values[: len(self._rows), columns]

    def snapshot(self) -> list[Any]:
        return [list(self._rows), list(self._columns.items()), self._values[: len(self._rows)].tobytes()]

    def restore(self, state: Sequence[Any]) -> None:
        names, columns, values = state
        self._rows = {name: row for row, name in enumerate(names)}
        self._columns = dict(columns)
        self._newest = max(self._columns, default=-1)
        self._values = np.frombuffer(values, np.float64).reshape(len(names), self._keep).copy()
