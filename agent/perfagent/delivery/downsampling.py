"""Splits and thins the content of a frame that is too large to send or to keep: pure functions of groups and events."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfagent.delivery.columns import is_urgent
from perfagent.wire import Event, Group

__all__ = ["Content", "events_only", "halves", "nothing", "raw_size", "thin"]

THIN_ROWS = 16
Content = tuple[list[Group], list[Event]]


def raw_size(group: Group) -> int:
    """Bytes of a group's columns."""
    return 3 * len(group.step) + sum(map(len, group.values.values()))


def halves(groups: Sequence[Group], events: Sequence[Event]) -> tuple[Content, Content] | None:
    """Splits the content of a frame into two parts.

    Several rows: half of the rows with all events, and the other half. A single row with events: the row, and the
    events. A single row alone: half of its columns, and the other half. Events alone: half of them, and the other half.
    None for a single value or event, which cannot be split.
    """
    rows = sum(group.rows for group in groups)
    if rows + len(events) <= 1:
        return _halves_of_row(groups) if rows else None
    if rows == 1 and events:
        return (list(groups), []), ([], list(events))
    goal = rows // 2
    left: list[Group] = []
    right: list[Group] = []
    for group in groups:
        take = min(goal, group.rows)
        goal -= take
        if take:
            left.append(_rows(group, range(take)))
        if take < group.rows:
            right.append(_rows(group, range(take, group.rows)))
    middle = len(events) if rows else len(events) // 2
    return (left, list(events[:middle])), (right, list(events[middle:]))


def _halves_of_row(groups: Sequence[Group]) -> tuple[Content, Content] | None:
    (row,) = (group for group in groups if group.rows)
    names = list(row.values)
    if len(names) == 1:
        return None
    middle = len(names) // 2
    left, right = (
        Group(step=row.step, time=row.time, monotonic=row.monotonic, values={name: row.values[name] for name in half})
        for half in (names[:middle], names[middle:])
    )
    return ([left], []), ([right], [])


def thin(groups: list[Group], events: list[Event]) -> Content:
    """Keeps a few of every 16 rows: the first, the two with the lowest and the highest finite loss (or first column, in
    a group without a loss), and every row that holds a NaN or an infinity."""
    thinned = []
    for group in groups:
        lead = group.column("loss" if "loss" in group.values else next(iter(group.values)))
        keep: set[int] = set()
        for start in range(0, group.rows, THIN_ROWS):
            rows = range(start, min(start + THIN_ROWS, group.rows))
            keep.add(rows[0])
            # a NaN would be both extremes: nothing is less than it
            finite = [row for row in rows if math.isfinite(lead[row])]
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
        if isinstance(rows, range):
            return column[rows.start * width : rows.stop * width]
        return b"".join(column[row * width : (row + 1) * width] for row in rows)

    return Group(
        step=pick(group.step),
        time=pick(group.time),
        monotonic=pick(group.monotonic),
        values={name: pick(column) for name, column in group.values.items()},
    )
