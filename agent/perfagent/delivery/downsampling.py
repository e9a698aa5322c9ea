"""Splits and thins the content of a frame that is too large to send or to keep: pure functions of groups and events."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfagent.delivery.columns import is_urgent
from perfagent.wire import Event, Group

__all__ = ["Content", "events_only", "halves", "nothing", "thin"]

THIN_ROWS = 16
Content = tuple[list[Group], list[Event]]


def halves(groups: Sequence[Group], events: Sequence[Event]) -> tuple[Content, Content] | None:
    """Splits the content of a frame into two parts.

    Several rows: half of the rows with all events, and the other half. A single row with events: the row, and the
    events. A single row alone: half of its columns, and the other half. Events alone: half of them, and the other half.
    None for a single value or event, which cannot be split.
    """
    groups = [group for group in groups if group.rows]
    rows = sum(group.rows for group in groups)
    if rows == 0:
        middle = len(events) // 2
        return (([], [*events[:middle]]), ([], [*events[middle:]])) if middle else None
    if rows == 1 and events:
        return (groups, []), ([], [*events])
    if rows == 1:
        (row,) = groups
        names = [*row.values]
        middle = len(names) // 2
        left, right = (
            Group(row.step, row.time, row.monotonic, {name: row.values[name] for name in half})
            for half in (names[:middle], names[middle:])
        )
        return (([left], []), ([right], [])) if middle else None
    first: list[Group] = []
    second: list[Group] = []
    goal = rows // 2
    for group in groups:
        taken = min(goal, group.rows)
        goal -= taken
        first.append(_rows(group, range(taken)))
        second.append(_rows(group, range(taken, group.rows)))
    return ([group for group in first if group.rows], [*events]), ([group for group in second if group.rows], [])


def thin(groups: list[Group], events: list[Event]) -> Content:
    """Keeps a few of every 16 rows: the first, the two with the lowest and the highest finite loss (or first column, in
    a group without a loss), and every row that holds a NaN or an infinity."""
    thinned = []
    for group in groups:
        lead = group.column("loss" if "loss" in group.values else next(iter(group.values)))
        keep = {*range(0, group.rows, THIN_ROWS)}
        for start in range(0, group.rows, THIN_ROWS):
            # a NaN would be both extremes: nothing is less than it
            finite = [row for row in range(start, min(start + THIN_ROWS, group.rows)) if math.isfinite(lead[row])]
            if finite:
                keep |= {min(finite, key=lead.__getitem__), max(finite, key=lead.__getitem__)}
        for name in group.values:
            column = group.column(name)
            if not math.isfinite(sum(column)):
                keep |= {row for row, value in enumerate(column) if not math.isfinite(value)}
        thinned.append(_rows(group, sorted(keep)))
    return thinned, events


def events_only(groups: list[Group], events: list[Event]) -> Content:
    """The events, and the groups that hold a non-finite loss or gradient."""
    return [group for group in groups if is_urgent(group)], events


def nothing(groups: list[Group], events: list[Event]) -> Content:  # noqa: ARG001
    """For when even the events do not fit."""
    return [], []


def _rows(group: Group, rows: Sequence[int]) -> Group:
    def pick(column: bytes) -> bytes:
        width = len(column) // group.rows
        return b"".join(column[row * width : (row + 1) * width] for row in rows)

    values = {name: pick(column) for name, column in group.values.items()}
    return Group(pick(group.step), pick(group.time), pick(group.monotonic), values)
