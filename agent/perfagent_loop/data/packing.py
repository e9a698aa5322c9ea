"""Sequences of many lengths put together into rows of one capacity, with almost nothing left empty.

Best-fit decreasing: the longest first, each into the fullest row that still takes it. Never more than 11/9 of the fewest
rows plus one (Johnson et al., SIAM J. Comput. 3(4), 1974); with lengths of text it is about the fewest.

Gaps stay empty if no sequence is short enough for them. With lengths from a quarter to a half of the row, the rows are 82 %
full where 100 % is possible. Where more than one part in a hundred is empty, rows are filled one by one as well, and the fewer
are taken: each row takes the longest sequence that is left, draws others at random as long as one more will fit behind
them, and then takes the one that fits best (as in minimum bin slack, Gupta and Ho, Production Planning & Control 10(6),
1999); of a few such rows the fullest is kept. Taking the longest each time would leave lengths that do not fit together
(97.7 % full instead of 99). Rows that are empty in part are filled anew, with some full ones, as long as that gains. The
draws begin from a fixed seed: the same lengths give the same rows.

A packed row holds several documents. A model must not attend from one to the next: give it `position_ids` and the lengths
(collating.py makes both), and attend by `perfagent_loop.compute.packed`."""

from __future__ import annotations

import bisect
import itertools
import operator
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count

__all__ = ["checked_lengths", "fill", "fill_rows", "pack", "pack_stream"]

Item = TypeVar("Item")
_MOST_ROUNDS = 8
_FULL = 0.99
"""Rows that are as full as that are good enough."""


def pack(lengths: Sequence[int] | Any, capacity: int) -> list[list[int]]:
    """Packs sequences into rows, by their lengths. The same lengths always give the same rows.

    Args:
        lengths: Tokens of each sequence, 1 or more: a list, tensor or array.
        capacity: Tokens of a row.

    Returns:
        For each row, the indices of its sequences. Every index comes once.

    Raises:
        ConfigError: A length is below 1 or above the capacity.

    Source: best-fit decreasing, at most 11/9 of the fewest rows plus one (Johnson et al., SIAM J. Comput. 3(4), 1974),
    with minimum bin slack (Gupta and Ho, Production Planning & Control 10(6), 1999) where rows stay empty in part.
    """
    numbers = checked_lengths(lengths, capacity)
    rows = _best_fit_decreasing(numbers, capacity)
    fewest = max(-(-sum(numbers) // capacity), sum(1 for one in numbers if 2 * one > capacity))
    wanted = max(fewest, int(sum(numbers) / _FULL / capacity))
    if len(rows) > wanted:
        rows = min(rows, fill_rows(numbers, capacity, wanted), key=len)
    return rows


def _best_fit_decreasing(numbers: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # rows by free room
    rooms: list[int] = []  # rising, each once
    for index in sorted(range(len(numbers)), key=numbers.__getitem__, reverse=True):
        length = numbers[index]
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([index])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            rows[row].append(index)
            if not with_room[room]:
                del rooms[place]
        left = room - length
        if left:
            if not with_room[left]:
                bisect.insort(rooms, left)
            with_room[left].append(row)
    return rows


def pack_stream(
    items: Iterable[Item], capacity: int, *, length: Callable[[Item], int] | None = None, window: int = 2000
) -> Iterator[list[Item]]:
    """Packs the items of a stream of unknown length into rows, with at most `window` items in memory.

    A window is packed and full rows are yielded. Items of emptier rows are packed again with the items that come next.
    Every item is yielded once, after eight windows at the latest.

    Args:
        items: The stream.
        capacity: Tokens of a row.
        length: Returns the tokens of an item; `len(item)` or the length of its "input_ids" by default.
        window: How many items are packed together. A larger window fills rows better.

    Yields:
        The items of one row.

    Raises:
        ConfigError: An item is longer than the capacity. The message has its position in the stream.
    """
    check_count("window", window, "a number of items in hand")
    check_count("capacity", capacity, "a number of tokens")
    measure = length_of if length is None else length
    source = iter(items)
    held: list[Item] = []
    rounds: list[int] = []  # how often each of them was packed and kept
    read = 0
    while True:
        new = [*itertools.islice(source, window - len(held))]
        held += new
        rounds += [0] * len(new)
        lengths = [measure(item) for item in held]
        _refuse(lengths, capacity, begin=read + len(new) - len(held))
        read += len(new)
        rows = pack(lengths, capacity)
        if not new or len(held) < window:
            for row in rows:
                yield [held[index] for index in row]
            return
        full = [sum(lengths[index] for index in row) for row in rows]
        late = [any(rounds[index] >= _MOST_ROUNDS for index in row) for row in rows]
        gone = 0
        kept: list[int] = []
        for place in sorted(range(len(rows)), key=lambda place: (late[place], full[place]), reverse=True):
            if late[place] or full[place] == capacity or gone < max(1, window // 2):
                yield [held[index] for index in rows[place]]
                gone += len(rows[place])
            else:
                kept += rows[place]
        kept.sort()
        held, rounds = [held[index] for index in kept], [rounds[index] + 1 for index in kept]


def fill(rows: Iterable[Sequence[int]], lengths: Sequence[int], capacity: int) -> float:
    """How much of the rows is tokens, from 0 to 1."""
    used = [sum(lengths[index] for index in row) for row in rows]
    return sum(used) / (len(used) * capacity) if used else 1.0


def length_of(item: Any) -> int:
    """Tokens of a sample: of its "input_ids" where it is a mapping, else its own length."""
    if hasattr(item, "keys"):
        if "input_ids" not in item:
            names = ", ".join(map(str, item))[:200]
            raise ConfigError(f"a sample with {names} has no 'input_ids': say what counts with length=")
        item = item["input_ids"]
    if not isinstance(item, Sized):
        raise ConfigError(f"the length of {type(item).__name__} is not known: say it with length=")
    return len(item)


def checked_lengths(lengths: Any, most: int | None = None) -> list[int]:
    """As a list of plain integers from 1 to most. Raises ConfigError for anything else."""
    check_count("capacity", most, "a number of tokens", or_none=True)
    numbers = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    if not isinstance(numbers, Iterable):
        raise ConfigError(f"lengths are a list, tensor or array of whole numbers, one a sample; got {lengths!r:.80}")
    numbers = [*numbers]
    for index, one in enumerate(numbers):
        try:
            numbers[index] = operator.index(one)
        except TypeError:
            raise ConfigError(f"lengths are whole numbers of tokens; number {index} is {one!r:.80}") from None
    _refuse(numbers, most)
    return numbers


def _refuse(numbers: list[int], most: int | None, begin: int = 0) -> None:
    over = [index for index, one in enumerate(numbers) if most is not None and one > most]
    if numbers and min(numbers) < 1:
        index = next(index for index, one in enumerate(numbers) if one < 1)
        raise ConfigError(f"length {begin + index} is {numbers[index]}: leave out empty samples")
    if over:
        raise ConfigError(
            f"length {begin + over[0]} is {numbers[over[0]]}, above the {most} tokens that there is room for ({len(over)} of "
            f"{len(numbers)} are); truncate or split what is longer, or leave it out"
        )


_TRIES = 20
"""Rows that are drawn before the fullest is taken."""
_ENOUGH = 1024
"""A row is full when less than this part of it is empty."""
_FULL_ONES = 0.15
"""So many of the full rows are filled anew in a round, beside all that are not."""
_MOST_DRAWN = 3
"""Lengths that are drawn in all, for each that there is: 50,000 stay below a second."""


def fill_rows(lengths: Sequence[int], capacity: int, wanted: int) -> list[list[int]]:
    """Indices of the lengths (1 to capacity each) by row, every index once. Stops at `wanted` rows."""
    draw = _Draw(_MOST_DRAWN * len(lengths))
    rows = _filled(range(len(lengths)), lengths, capacity, draw)
    while len(rows) > wanted and draw.left > 0:
        again: list[list[int]] = []  # the rows that are not full, and some that are
        others: list[list[int]] = []
        for row in rows:
            empty = capacity - sum([lengths[index] for index in row])
            (again if empty * 100 > capacity or draw.random() < _FULL_ONES else others).append(row)
        better = _filled((index for row in again for index in row), lengths, capacity, draw)
        if len(better) <= len(again):
            rows = others + better
    return rows


class _Draw(random.Random):
    """left: how often a length may still be drawn before the first row that comes is taken."""

    def __init__(self, left: int) -> None:
        super().__init__(0)
        self.left = left


def _filled(indices: Iterable[int], lengths: Sequence[int], capacity: int, draw: _Draw) -> list[list[int]]:
    at: dict[int, list[int]] = defaultdict(list)
    for index in indices:
        at[lengths[index]].append(index)
    left = _Left({length: len(those) for length, those in at.items()}, draw)
    rows: list[list[int]] = []
    while left.lengths:
        row = left.row_from(left.lengths[-1], capacity)
        again = min(len(at[length]) // row.count(length) for length in {*row})  # as often as there are such lengths
        for length in {*row}:
            left.take(length, again * row.count(length))
        rows += [[at[length].pop() for length in row] for _ in range(again)]
    return rows


class _Left:
    """The lengths that no row has yet, rising, each once."""

    def __init__(self, counts: dict[int, int], draw: _Draw) -> None:
        self._counts, self._draw = counts, draw
        self.lengths = sorted(counts)

    def take(self, length: int, count: int = 1) -> None:
        self._counts[length] -= count
        if not self._counts[length]:
            del self.lengths[bisect.bisect_left(self.lengths, length)]

    def _back(self, length: int) -> None:
        if not self._counts[length]:
            bisect.insort(self.lengths, length)
        self._counts[length] += 1

    def row_from(self, longest: int, capacity: int) -> list[int]:
        """The fullest of some rows that begin with this length. Takes nothing."""
        self.take(longest)
        best: list[int] = []
        empty = capacity - longest + 1
        for _ in range(_TRIES):
            chosen, room = self._drawn(capacity - longest)
            if room < empty:
                best, empty = chosen, room
            if empty <= capacity // _ENOUGH or self._draw.left < 0:
                break
        self._back(longest)
        return [longest, *best]

    def _drawn(self, room: int) -> tuple[list[int], int]:
        """Lengths that go into the room, and what is left of it."""
        chosen: list[int] = []
        lengths = self.lengths
        while lengths and (smallest := lengths[0]) <= room:
            last = lengths[bisect.bisect_right(lengths, room) - 1]
            if last != room and room >= 2 * smallest:  # as long as another will fit
                last = lengths[int(bisect.bisect_right(lengths, room - smallest) * self._draw.random())]
            self.take(last)
            chosen.append(last)
            room -= last
        for length in chosen:
            self._back(length)
        self._draw.left -= len(chosen) + 1
        return chosen, room
