"""What a sender writes down in one tick, made of columns."""

from __future__ import annotations

from collections.abc import Sequence

from perfagent.delivery.columns import Columns
from perfagent.delivery.row_packing import Packed, Packer
from perfagent.wire import Event, Group

__all__ = ["tick_of"]


def tick_of(groups: Sequence[Group], events: Sequence[Event] = ()) -> tuple[list[Packed], Sequence[Event]]:
    packer = Packer(Columns())
    for group in groups:
        columns = group.steps(), group.times(), group.monotonics(), *map(group.column, group.values)
        for step, time, monotonic, *values in zip(*columns, strict=True):
            packer.add(step, time, monotonic, (*group.values,), values)
    return packer.take(), events
