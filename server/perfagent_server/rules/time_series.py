"""Series over time, as rules see them: what samplers send, which belongs to no step."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Seconds", "TimeSeries"]

_JUDGED_EVERY_S = 5.0  # rules on readings look at minutes of them


@dataclass(frozen=True, slots=True)
class Seconds:
    """A series by the second, oldest first. second: float64 (n,), Unix seconds; total, count: float64 (n,), of the
    readings of all ranks; stepping: bool (n,), whether steps were made."""

    second: NDArray[np.float64]
    total: NDArray[np.float64]
    count: NDArray[np.float64]
    stepping: NDArray[np.bool_]


class _Readings:
    """The newest `keep` seconds, column by column."""

    __slots__ = ("count", "keep", "second", "stepping", "total")

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.second, self.total = array("d"), array("d")
        self.count, self.stepping = array("d"), array("b")

    def add(self, second: float, value: float, stepping: bool) -> None:
        # Ranks send in turn, and their clocks differ: a reading may belong to a second before the newest.
        at = len(self.second) if not self.second or second > self.second[-1] else bisect_left(self.second, second)
        if at < len(self.second) and self.second[at] == second:
            self.total[at] += value
            self.count[at] += 1
            self.stepping[at] |= stepping
        else:
            for column, new in zip(self._columns(), (second, value, 1.0, stepping), strict=True):
                column.insert(at, new)

    def trim(self, most: int) -> None:
        if len(self.second) > most:
            for column in self._columns():
                del column[: -self.keep]

    def mean(self, since: float, until: float) -> float | None:
        within = [at for at, second in enumerate(self.second) if since <= second <= until]
        count = sum(self.count[at] for at in within)
        return sum(self.total[at] for at in within) / count if count else None

    def tail(self, count: int) -> list[tuple[float, float]]:
        columns = (self.second[-count:], self.total[-count:], self.count[-count:])
        return [(second, total / readings) for second, total, readings in zip(*columns, strict=True)]

    def newest(self) -> Seconds:
        second, total, count, stepping = (np.array(column[-self.keep :]) for column in self._columns())
        return Seconds(second, total, count, stepping.astype(bool))

    def snapshot(self) -> list[bytes]:
        return [column[-self.keep :].tobytes() for column in self._columns()]

    def restore(self, columns: Sequence[bytes]) -> None:
        for column, saved in zip(self._columns(), columns, strict=True):
            column.frombytes(saved)

    def _columns(self) -> tuple[array[Any], ...]:
        return self.second, self.total, self.count, self.stepping


_NO_READINGS = _Readings(1)


def _put_together(ranks: Sequence[Seconds]) -> Seconds:
    """The readings of several ranks, second by second."""
    seconds = np.concatenate([one.second for one in ranks])
    second, places = np.unique(seconds, return_inverse=True)
    total, count, stepping = np.zeros(len(second)), np.zeros(len(second)), np.zeros(len(second), bool)
    np.add.at(total, places, np.concatenate([one.total for one in ranks]))
    np.add.at(count, places, np.concatenate([one.count for one in ranks]))
    np.logical_or.at(stepping, places, np.concatenate([one.stepping for one in ranks]))
    return Seconds(second, total, count, stepping)


class TimeSeries:
    """The newest `keep` seconds of a series, ranks put together; with ranks apart, of each rank."""

    def __init__(self, keep: int, *, apart: bool) -> None:
        self.keep, self.apart = keep, apart
        self._of_rank: dict[int, _Readings] = {}

    def take(self, rank: int, times: Sequence[float], values: Sequence[float], is_stepping: Sequence[bool]) -> bool:
        """Adds readings; those that are no numbers, or have no time, are left out. Whether it is time to judge the series."""
        readings = self._of(rank if self.apart else 0)
        began = readings.second[-1] // _JUDGED_EVERY_S if readings.second else None
        for time, value, stepping in zip(times, values, is_stepping, strict=True):
            if math.isfinite(value) and math.isfinite(time):
                readings.add(float(math.floor(time)), value, stepping)
        readings.trim(self.keep + self.keep // 4)
        return bool(readings.second) and (began is None or readings.second[-1] // _JUDGED_EVERY_S > began)

    @property
    def ranks(self) -> list[int]:
        """Those that sent a reading that is a number."""
        return sorted(rank for rank, readings in self._of_rank.items() if readings.second)

    def seconds(self, rank: int | None = None) -> Seconds:
        """rank: where ranks are apart; None: of all ranks together."""
        chosen = [readings.newest() for readings in self._chosen(rank)]
        if len(chosen) == 1:
            return chosen[0]
        return _put_together(chosen)

    def newest(self, rank: int | None = None) -> float | None:
        """Mean of the readings of the newest second, of each rank; None if there were none."""
        newest = [one.total[-1] / one.count[-1] for one in self._chosen(rank) if one.second]
        return sum(newest) / len(newest) if newest else None

    def newest_by_rank(self) -> dict[int, float]:
        """Mean of the readings of each rank's newest second."""
        return {rank: one.total[-1] / one.count[-1] for rank, one in sorted(self._of_rank.items()) if one.second}

    def tail(self, count: int, rank: int = 0) -> list[tuple[float, float]]:
        """The newest seconds and the mean of their readings, oldest first."""
        return self._chosen(rank)[0].tail(count)

    def mean(self, since: float, until: float, rank: int | None = None) -> float | None:
        """Mean of the readings between two times (Unix seconds, both included); None if there were none."""
        means = [found for one in self._chosen(rank) if (found := one.mean(since, until)) is not None]
        return sum(means) / len(means) if means else None

    def _chosen(self, rank: int | None) -> list[_Readings]:
        """Asking for a rank that sent nothing makes none of it."""
        found = self._of_rank.values() if rank is None else filter(None, [self._of_rank.get(rank)])
        return [*found] or [_NO_READINGS]

    def snapshot(self) -> list[Any]:
        return [[rank, readings.snapshot()] for rank, readings in self._of_rank.items()]

    def restore(self, state: Sequence[Any]) -> None:
        for rank, columns in state:
            self._of(rank).restore(columns)

    def _of(self, rank: int) -> _Readings:
        found = self._of_rank.get(rank)
        if found is None:
            found = self._of_rank[rank] = _Readings(self.keep)
        return found
