"""What the processes of a run reported, moment by moment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from perfagent.wire import Event, Group
from perfagent_server.backtest.moment import Moment

__all__ = ["Reported", "in_order_of_time"]

_SAME_S = 0.5
"""Rows of one rank and step that follow each other so closely are one moment: an agent sends them in one frame."""


@dataclass(slots=True)
class Reported:
    """All that one process reported in one attempt."""

    attempt: int
    rank: int
    groups: list[Group] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def in_order_of_time(reported: Sequence[Reported]) -> Iterator[Moment]:
    """All of it, oldest first, each moment made when it is asked for."""
    held: Moment | None = None
    for moment in _one_by_one(reported):
        if held is not None and _belong_together(held, moment):
            held = replace(held, values={**held.values, **moment.values})
            continue
        if held is not None:
            yield held
        held = moment
    if held is not None:
        yield held


def _belong_together(one: Moment, other: Moment) -> bool:
    return (
        (one.attempt, one.rank, one.step) == (other.attempt, other.rank, other.step)
        and not (one.events or other.events)
        and other.time - one.time < _SAME_S
        and one.values.keys().isdisjoint(other.values)
    )


def _one_by_one(reported: Sequence[Reported]) -> Iterator[Moment]:
    columns = [_Columns(group) for one in reported for group in one.groups]
    owners = [one for one in reported for _ in one.groups]
    order: list[tuple[float, int, int]] = [
        (time, place, row) for place, group in enumerate(columns) for row, time in enumerate(group.times)
    ]
    told = [(one, event) for one in reported for event in one.events]
    order += [(event.time, -1 - place, 0) for place, (_, event) in enumerate(told)]
    # A time that is no number comes first: the state of a process that knows none is that of its start.
    order.sort(key=lambda entry: (entry[0] if math.isfinite(entry[0]) else -math.inf, *entry[1:]))
    first = next((time for time, _, _ in order if math.isfinite(time)), 0.0)
    for at, place, row in order:
        time = at if math.isfinite(at) else first
        if place < 0:
            owner, event = told[-1 - place]
            yield Moment(time, events=(event,), rank=owner.rank, attempt=owner.attempt)
        else:
            owner, group = owners[place], columns[place]
            yield Moment(time, group.steps[row], group.row(row), rank=owner.rank, attempt=owner.attempt)


class _Columns:
    def __init__(self, group: Group) -> None:
        self.steps, self.times = group.steps(), group.times()
        self._values = {name: group.column(name) for name in group.values}

    def row(self, at: int) -> dict[str, float]:
        return {name: column[at] for name, column in self._values.items()}
