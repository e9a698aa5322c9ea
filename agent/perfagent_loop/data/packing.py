"""Sequences of many lengths put together into rows of one capacity, with almost nothing left empty.

Best-fit decreasing: the longest first, each into the fullest row that still takes it. Never more than 11/9 of the
fewest rows plus one (Johnson et al., SIAM J. Comput. 3(4), 1974); with lengths of text it is about the fewest. Where
more than one part in a hundred is empty, rows are filled one by one as well (next_fit.py), and the fewer are taken.
50,000 lengths take a fraction of a second.

A packed row holds several documents. A model must not attend from one to the next: give it `position_ids` and the
lengths (collating.py makes both), and attend by `perfagent_loop.compute.packed`.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count
from perfagent_loop.collectives import rank_of_job, world_of_job
from perfagent_loop.data.collating import join
from perfagent_loop.data.next_fit import fill_rows
from perfagent_loop.kinds import Batch, Loader

__all__ = ["PackedStream", "checked_lengths", "fill", "pack", "pack_stream"]

Item = TypeVar("Item")
_MOST_ROUNDS = 8
_FULL = 0.99
"""Rows that are as full as that are good enough."""


def pack(lengths: Sequence[int] | Any, capacity: int) -> list[list[int]]:
    """Indices of the lengths that go together into one row each, every index once, no row above capacity.

    lengths: tokens of each sequence, 1 or more; a list, a tensor or an array. capacity: tokens of a row. Deterministic:
    the same lengths give the same rows. Raises ConfigError for a length below 1 or above the capacity.
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
    """Rows of items from a stream of unknown length, without more than `window` items in hand.

    length: tokens of an item; without it len(item), or the length of its "input_ids". A window is packed, full rows go
    out, and what lies in the emptier ones is packed again with what comes next. A larger window fills better: see
    docs/data.md. Every item comes out once, after eight windows at the latest. Raises ConfigError for an item that is
    longer than the capacity, with its place in the stream.
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


class PackedStream(IterableDataset[Batch]):
    """Rows packed as the samples come: `DataLoader(PackedStream(samples, 8192), batch_size=None)`.

    source: an IterableDataset, which shares itself among workers and ranks as it always must; or a map-style dataset or
    another iterable that can be read again, of which each worker of each rank takes every n-th sample. length, window:
    see pack_stream. collate: what makes a batch of a row's samples; collating.join by default.

    Raises ConfigError for a source that can be read only once.
    """

    def __init__(
        self,
        source: Loader,
        capacity: int,
        *,
        length: Callable[[Any], int] | None = None,
        window: int = 2000,
        collate: Callable[[list[Any]], Batch] = join,
    ) -> None:
        if isinstance(source, Iterator) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
            raise ConfigError(f"source must be a dataset or list that can be read again, not {type(source).__name__}")
        self.source, self.capacity, self.length, self.window, self.collate = source, capacity, length, window, collate

    def __iter__(self) -> Iterator[Batch]:
        source: Loader = self.source
        samples: Iterable[object] = source
        if not isinstance(source, IterableDataset):
            part, parts = _share()
            if hasattr(source, "__getitem__") and hasattr(source, "__len__"):  # the others' samples are not even made
                samples = (source[index] for index in range(part, len(source), parts))
            else:
                samples = itertools.islice(iter(source), part, None, parts)
        return map(self.collate, pack_stream(samples, self.capacity, length=self.length, window=self.window))


def _share() -> tuple[int, int]:
    """Which share of the samples this process reads, and how many shares there are."""
    worker = get_worker_info()
    number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
    return rank_of_job() * workers + number, world_of_job() * workers
