"""Puts groups of the tail that have the same names below each other: the steps, times and values of all their rows.

Groups in a row that have as many rows and columns of the same types are taken with one copy. A frame of a live job has
one row, and a question about 512 ranks meets thousands of those: what is done for each group must be little.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from perfagent_server.store.codec.aggregates import Floats, Ints, Values
from perfagent_server.store.codec.tail import TailGroup

__all__ = ["Arrived", "matrices", "row_of", "rows_below_each_other"]

Arrived = tuple[TailGroup, float]
"""A group, and the Unix seconds at which its frame came."""


def rows_below_each_other(groups: Sequence[Arrived]) -> tuple[Ints, Floats]:
    """Steps and times, in the order of the groups."""
    step, time = _steps([group for group, _ in groups]), _times([group for group, _ in groups])
    if not np.isfinite(time).all():  # a clock that says NaN: the time at which the frame came is the next best
        came = np.repeat([received for _, received in groups], [group.rows for group, _ in groups])
        time = np.where(np.isfinite(time), time, came)
    return step, time


def row_of(groups: Sequence[Arrived], at: int) -> list[float]:
    """The values of one of these rows, in the order of the names."""
    for group, _ in groups:
        if at < group.rows:
            return group.row(at)
        at -= group.rows
    raise IndexError(at)


def matrices(groups: Sequence[Arrived], members: Sequence[int]) -> list[tuple[list[int], Values]]:
    """The columns at these places among the names, those that fit float32 apart from the others: (places, values) with
    values (places, rows) in float32 or float64."""
    batches = [_Batch.of(key, alike) for key, alike in itertools.groupby([group for group, _ in groups], _shape)]
    wide = {at for batch in batches for at, width in enumerate(batch.widths) if width == 8}
    found: list[tuple[list[int], Values]] = []
    for width, places in ((4, [at for at in members if at not in wide]), (8, [at for at in members if at in wide])):
        if places:
            parts = [batch.matrix(places, width) for batch in batches]
            found.append((places, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)))
    return found


def _steps(groups: Sequence[TailGroup]) -> Ints:
    if all(group.step for group in groups):
        return np.frombuffer(b"".join([group.step for group in groups]), "<i8")
    return np.concatenate([group.steps for group in groups])


def _times(groups: Sequence[TailGroup]) -> Floats:
    if all(group.ticks is None for group in groups):
        return np.frombuffer(b"".join([group.stamps for group in groups]), "<f8")
    return np.concatenate([group.times for group in groups])


def _shape(group: TailGroup) -> tuple[int, bytes]:
    return group.rows, group.widths


@dataclass(slots=True)
class _Batch:
    """Groups behind each other with as many rows each, whose columns are of the same types: one copy takes them all.
    widths: bytes a value of each column."""

    rows: int
    widths: bytes
    groups: list[TailGroup]

    @classmethod
    def of(cls, shape: tuple[int, bytes], groups: Iterable[TailGroup]) -> _Batch:
        return cls(*shape, list(groups))

    def matrix(self, members: Sequence[int], width: int) -> Values:
        """(members, rows of all groups) of these columns, in float32 (width 4) or float64 (8)."""
        raw = b"".join([group.values for group in self.groups])
        shape = (len(self.groups), len(members), self.rows)
        if len(members) == len(self.widths) == self.widths.count(width):
            found = np.frombuffer(raw, f"<f{width}").reshape(shape)
        else:
            found = np.empty(shape, f"<f{width}")
            words = np.frombuffer(raw, "<u4").reshape(len(self.groups), -1)
            sizes = np.frombuffer(self.widths, np.uint8).astype(np.int64) * self.rows // 4  # words of each column
            starts = np.cumsum(sizes) - sizes
            for each in set(self.widths):
                of = [at for at, member in enumerate(members) if self.widths[member] == each]
                span = np.arange(self.rows * each // 4)
                places = starts[[members[at] for at in of]][:, None] + span
                found[:, of] = words.take(places.ravel(), axis=1).view(f"<f{each}").reshape(shape[0], len(of), shape[2])
        return found.transpose(1, 0, 2).reshape(len(members), -1)
