"""Series over time, as rules see them: what samplers send, which belongs to no step."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Second", "TimeSeries"]


class Second:
    """One second of one series. total, count: of the readings of all ranks; stepping: whether steps were made."""

    __slots__ = ("count", "second", "stepping", "total")

    def __init__(self, second: float, total: float, count: int, stepping: bool) -> None:
        self.second, self.total, self.count, self.stepping = second, total, count, stepping


class TimeSeries:
    """The newest `keep` seconds of a series, ranks put together; with ranks apart, of each rank."""

    def __init__(self, keep: int, *, apart: bool) -> None:
        self.keep, self.apart = keep, apart
        self._of_rank: dict[int, list[Second]] = {}

    def take(self, rank: int, times: Sequence[float], values: Sequence[float], is_stepping: Sequence[bool]) -> None:
        """Adds readings; those that are no numbers, or have no time, are left out."""
        seconds = self._of_rank.setdefault(rank if self.apart else 0, [])
        for time, value, stepping in zip(times, values, is_stepping, strict=True):
            if math.isfinite(value) and math.isfinite(time):
                _add(seconds, float(math.floor(time)), value, stepping)
        if len(seconds) > self.keep + self.keep // 4:
            del seconds[: -self.keep]

    @property
    def ranks(self) -> list[int]:
        return sorted(self._of_rank)

    def seconds(self, rank: int = 0) -> list[Second]:
        """Oldest first. rank: where ranks are apart."""
        return self._of_rank.get(rank, [])

    def mean(self, since: float, until: float, rank: int = 0) -> float | None:
        """Mean of the readings between two times (Unix seconds, both included); None if there were none."""
        found = [one for one in self.seconds(rank) if since <= one.second <= until]
        count = sum(one.count for one in found)
        return sum(one.total for one in found) / count if count else None

    def snapshot(self) -> list[list[object]]:
        return [
            [rank, [[one.second, one.total, one.count, one.stepping] for one in seconds[-self.keep :]]]
            for rank, seconds in self._of_rank.items()
        ]

    def restore(self, state: Sequence[Sequence[object]]) -> None:
        self._of_rank = {rank: [Second(*entry) for entry in seconds] for rank, seconds in state}  # type: ignore[attr-defined,misc]


def _add(seconds: list[Second], second: float, value: float, stepping: bool) -> None:
    if not seconds or second > seconds[-1].second:
        seconds.append(Second(second, value, 1, stepping))
        return
    # Ranks send in turn, so a reading may belong to a second that another rank began.
    known = next((one for one in reversed(seconds) if one.second <= second), None)
    if known is not None and known.second == second:
        known.total += value
        known.count += 1
        known.stepping = known.stepping or stepping
