"""Series side by side over the same steps, as rules see them: of each rank, or of each layer of a family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FamilyRows", "Floats", "RankRows"]

Floats = NDArray[np.float64]


class _Columns:
    """The columns of the newest `keep` steps. newest: the newest step there ever was."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.of_step: dict[int, int] = {}
        self.newest = -1

    def of(self, step: int, values: Floats) -> int | None:
        """The column of a step in `values`, emptied if it was an older step's; None for a step older than all."""
        found = self.of_step.get(step)
        return self._new(step, values) if found is None else found

    def _new(self, step: int, values: Floats) -> int | None:
        self.newest = max(self.newest, step)
        if len(self.of_step) < self.keep:
            column = self.of_step[step] = len(self.of_step)
            return column
        oldest = min(self.of_step)
        if step < oldest:
            return None
        column = self.of_step[step] = self.of_step.pop(oldest)
        values[..., column] = np.nan
        return column

    def until(self, step: float) -> tuple[list[int], list[int]]:
        """The steps that are kept up to one, ascending, and their columns."""
        steps = sorted(one for one in self.of_step if one <= step)
        return steps, [self.of_step[one] for one in steps]


class RankRows:
    """The newest steps of some series, each rank apart. keep: series -> how many steps; the largest counts for all.

    A frame costs the same however many ranks and series there are.
    """

    def __init__(self, keep: Mapping[str, int]) -> None:
        self._series = {name: place for place, name in enumerate(keep)}
        self._ranks: dict[int, int] = {}
        self._columns = _Columns(max(keep.values(), default=0))
        self._values = self._empty(0)
        self._places: dict[tuple[str, ...], NDArray[np.intp]] = {}

    def take(self, rank: int, names: tuple[str, ...], steps: Sequence[int], values: Sequence[Sequence[float]]) -> None:
        """values: of each name, of each step."""
        places = self._places.get(names)
        if places is None:
            places = self._places[names] = np.array([self._series[name] for name in names], np.intp)
        row = self._row(rank)
        for at, step in enumerate(steps):
            column = self._columns.of(step, self._values)
            if column is not None:
                self._values[row, places, column] = [of_name[at] for of_name in values]

    def __len__(self) -> int:
        """How many steps are kept."""
        return len(self._columns.of_step)

    def kept_until(self, step: int) -> int:
        """How many steps are kept up to one. Of a long frame that may be none: its first steps are judged when only the
        last ones are still kept."""
        return len(self._columns.until(step)[0])

    def matrix(self, name: str, until: float = math.inf) -> tuple[list[int], list[int], Floats]:
        """The ranks in the order in which they came, the steps up to `until`, and the values: float64 (ranks, steps),
        NaN where a rank has no value."""
        steps, columns = self._columns.until(until)
        return list(self._ranks), steps, self._values[: len(self._ranks), self._series[name]][:, columns]

    def _row(self, rank: int) -> int:
        row = self._ranks.get(rank)
        if row is None:
            row = self._ranks[rank] = len(self._ranks)
            if row >= len(self._values):
                self._values = np.concatenate([self._values, self._empty(max(8, len(self._values)))])
        return row

    def _empty(self, ranks: int) -> Floats:
        return np.full((ranks, len(self._series), self._columns.keep), np.nan)


class FamilyRows:
    """The newest `keep` steps of the layers of a family, ranks put together: of several values of a step the largest
    counts."""

    def __init__(self, keep: int) -> None:
        self._layers: dict[str, int] = {}
        self._columns = _Columns(keep)
        self._values = np.full((0, keep), np.nan)
        self._newest_names: tuple[str, ...] = ()
        self._newest_rows = np.empty(0, np.intp)

    def take(self, names: tuple[str, ...], steps: Sequence[int], values: Sequence[Sequence[float]]) -> bool:
        """Whether a step is newer than all before. values: of each name, of each step."""
        newest = self._columns.newest
        if names is not self._newest_names:
            self._newest_names, self._newest_rows = names, np.array([self._row(name) for name in names], np.intp)
        for at in range(max(0, len(steps) - self._columns.keep), len(steps)):
            column = self._columns.of(steps[at], self._values)
            if column is not None:
                known = self._values[self._newest_rows, column]
                self._values[self._newest_rows, column] = np.fmax(known, [of_name[at] for of_name in values])
        return self._columns.newest > newest

    def matrix(self, until: float = math.inf) -> tuple[list[str], list[int], Floats]:
        """The layers in the order in which they came, the steps up to `until`, and the values: float64 (layers,
        steps), NaN where a layer has no value."""
        steps, columns = self._columns.until(until)
        return list(self._layers), steps, self._values[: len(self._layers), columns]

    def snapshot(self) -> list[Any]:
        return [list(self._layers), list(self._columns.of_step.items()), self._values[: len(self._layers)].tobytes()]

    def restore(self, state: Sequence[Any]) -> None:
        names, columns, values = state
        self._layers = {name: row for row, name in enumerate(names)}
        self._columns.of_step = dict(columns)
        self._columns.newest = max(self._columns.of_step, default=-1)
        self._values = np.frombuffer(values, np.float64).reshape(len(names), self._columns.keep).copy()

    def _row(self, name: str) -> int:
        row = self._layers.get(name)
        if row is None:
            row = self._layers[name] = len(self._layers)
            if row >= len(self._values):
                more = np.full((max(8, len(self._values)), self._columns.keep), np.nan)
                self._values = np.concatenate([self._values, more])
        return row
