"""Samples one by one, as `perfagent export` gives them, put together again as an agent reported them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from perfagent.wire import Event, Group
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.reported import Reported, in_order_of_time

__all__ = ["EXPORT_COLUMNS", "Exported", "OfAttempt"]

EXPORT_COLUMNS = ("name", "rank", "step", "time", "value")


@dataclass(frozen=True, slots=True)
class OfAttempt:
    """An event, and who reported it in which attempt."""

    attempt: int
    rank: int
    event: Event


@dataclass(slots=True)
class _Column:
    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Exported:
    """add() every sample, then moments()."""

    def __init__(self) -> None:
        self._columns: dict[int, dict[str, _Column]] = {}

    def add(self, name: str, rank: int, step: int, time: float, value: float) -> None:
        column = self._columns.setdefault(rank, {}).setdefault(name, _Column())
        column.steps.append(step)
        column.times.append(time)
        column.values.append(value)

    def moments(self, events: Sequence[OfAttempt]) -> Iterator[Moment]:
        """Samples do not say of which attempt they are: of the newest that had begun."""
        begins = sorted((min(_times(events, attempt)), attempt) for attempt in {one.attempt for one in events})
        reported = [
            Reported(attempt, rank, groups=list(_between(self._columns.get(rank, {}), since, until)), events=told)
            for since, until, attempt in _spans(begins)
            for rank in sorted({*self._columns, *(one.rank for one in events if one.attempt == attempt)})
            for told in [[one.event for one in events if (one.attempt, one.rank) == (attempt, rank)]]
        ]
        return in_order_of_time(reported)


def _times(events: Iterable[OfAttempt], attempt: int) -> list[float]:
    return [one.event.time for one in events if one.attempt == attempt]


def _spans(begins: Sequence[tuple[float, int]]) -> list[tuple[float, float, int]]:
    """(since, until, attempt) that cover all times."""
    if not begins:
        return [(float("-inf"), float("inf"), 1)]
    edges = [float("-inf"), *(time for time, _ in begins[1:]), float("inf")]
    return [(edges[at], edges[at + 1], attempt) for at, (_, attempt) in enumerate(begins)]


def _between(columns: dict[str, _Column], since: float, until: float) -> Iterator[Group]:
    """Groups of the series that share their steps and times."""
    alike: dict[tuple[bytes, bytes], dict[str, bytes]] = {}
    for name, column in columns.items():
        inside = [at for at, time in enumerate(column.times) if since <= time < until]
        if inside:
            steps, times = (
                array("q", (column.steps[at] for at in inside)),
                array("d", (column.times[at] for at in inside)),
            )
            values = array("d", (column.values[at] for at in inside))
            alike.setdefault((steps.tobytes(), times.tobytes()), {})[name] = values.tobytes()
    for (steps_, times_), values_ in alike.items():
        yield Group(steps_, times_, times_, values_)
