"""Sequences of many lengths put together into rows of one capacity, with almost nothing left empty.

Best-fit decreasing: the longest first, each into the fullest row that still takes it. Never more than 11/9 of the fewest rows
possible plus one (Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms", SIAM J. Comput.
3(4), 1974); with lengths of text it is about the fewest. Rows are found by their free room in a set of integers that keeps one
bit a number and one a block of numbers, so that 50,000 lengths take a fraction of a second in plain Python.

A packed row holds several documents. A model must not attend from one to the next: give it `position_ids` and the lengths
(collating.py makes both), and attend by `perfagent.training.compute.packed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

from perfagent.errors import ConfigError

__all__ = ["checked_lengths", "fill", "pack", "pack_stream"]

Item = TypeVar("Item")
_MOST_ROUNDS = 8


def pack(lengths: Sequence[int] | Any, capacity: int) -> list[list[int]]:
    """Indices of the lengths that go together into one row each, every index once, no row above capacity.

    lengths: tokens of each sequence, 1 or more; a list, a tensor or an array. capacity: tokens of a row. Deterministic: the same
    lengths give the same rows. Raises ConfigError for a length below 1 or above the capacity.
    """
    numbers = checked_lengths(lengths, capacity)
    order = sorted(range(len(numbers)), key=numbers.__getitem__, reverse=True)
    rows: list[list[int]] = []
    free = _Numbers(capacity)
    with_room: dict[int, list[int]] = {}  # rows by free room
    for index in order:
        length = numbers[index]
        room = free.smallest_from(length)
        if room is None:
            row = len(rows)
            rows.append([index])
            room = capacity
        else:
            same = with_room[room]
            row = same.pop()
            rows[row].append(index)
            if not same:
                del with_room[room]
                free.discard(room)
        left = room - length
        if left:
            same = with_room.setdefault(left, [])
            if not same:
                free.add(left)
            same.append(row)
    return rows


def pack_stream(
    items: Iterable[Item], capacity: int, *, length: Callable[[Item], int] | None = None, window: int = 2000
) -> Iterator[list[Item]]:
    """Rows of items from a stream of unknown length, without more than `window` items in hand.

    length: tokens of an item; without it len(item), or the length of its "input_ids". A window is packed, full rows go out,
    and what lies in the emptier ones is packed again with what comes next. A larger window fills better: see docs/data.md.
    Every item comes out once, after eight windows at the latest. Raises ConfigError for an item that is longer than the
    capacity, with its place in the stream.
    """
    if type(window) is not int or window < 1:
        raise ConfigError(f"window is the number of items in hand, 1 or more; got {window!r:.80}")
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
            raise ConfigError(f"a sample with {', '.join(map(str, item))[:200]} has no 'input_ids': say what counts with length=")
        item = item["input_ids"]
    if not isinstance(item, Sized):
        raise ConfigError(f"the length of {type(item).__name__} is not known: say it with length=")
    return len(item)


def checked_lengths(lengths: Any, most: int | None = None) -> list[int]:
    """As a list of plain integers from 1 to most. Raises ConfigError for anything else."""
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"the capacity is a number of tokens, 1 or more; got {most!r:.80}")
    numbers = lengths.tolist() if hasattr(lengths, "tolist") else [*lengths]
    for index, one in enumerate(numbers):
        if type(one) is not int:
            try:
                numbers[index] = one.__index__()
            except AttributeError:
                raise ConfigError(f"lengths are whole numbers of tokens; number {index} is {one!r:.80}") from None
    _refuse(numbers, most)
    return numbers


def _refuse(numbers: list[int], most: int | None, begin: int = 0) -> None:
    if not numbers:
        return
    if min(numbers) < 1:
        index = next(index for index, one in enumerate(numbers) if one < 1)
        raise ConfigError(f"length {begin + index} is {numbers[index]}: leave out what is empty before it is batched or packed")
    if most is not None and max(numbers) > most:
        index = next(index for index, one in enumerate(numbers) if one > most)
        over = sum(1 for one in numbers if one > most)
        raise ConfigError(
            f"length {begin + index} is {numbers[index]}, above the {most} tokens that there is room for ({over} of "
            f"{len(numbers)} are); truncate or split what is longer, or leave it out"
        )


class _Numbers:
    """A set of numbers from 0 to most that finds the smallest one from a given number on."""

    def __init__(self, most: int) -> None:
        self._bits = max(6, (most + 1).bit_length() // 2)  # of a block: as many numbers in it as there are blocks
        self._mask = (1 << self._bits) - 1
        self._blocks = [0] * ((most >> self._bits) + 1)
        self._used = 0  # blocks that hold something

    def add(self, number: int) -> None:
        block = number >> self._bits
        self._blocks[block] |= 1 << (number & self._mask)
        self._used |= 1 << block

    def discard(self, number: int) -> None:
        block = number >> self._bits
        self._blocks[block] &= ~(1 << (number & self._mask))
        if not self._blocks[block]:
            self._used &= ~(1 << block)

    def smallest_from(self, number: int) -> int | None:
        block = number >> self._bits
        here = self._blocks[block] >> (number & self._mask)
        if here:
            return number + (here & -here).bit_length() - 1
        later = self._used >> (block + 1)
        if not later:
            return None
        block += (later & -later).bit_length()
        found = self._blocks[block]
        return (block << self._bits) + (found & -found).bit_length() - 1
