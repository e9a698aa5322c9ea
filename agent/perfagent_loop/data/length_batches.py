"""Batch samplers that group samples by length: so many samples, so many tokens, or one packed row a batch.

The batches of an epoch follow from the lengths, the seed and the epoch alone, so that every rank finds the same ones
and a resumed training goes on in the middle of an epoch. Samples of like length lie in the same batch, batches of like
length in the same step of all ranks, and apart from that the order is random."""

from __future__ import annotations

import bisect
import itertools
import random
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

from torch.utils.data import Sampler

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count
from perfagent_loop.collectives import rank_of_job, world_of_job
from perfagent_loop.data.packing import checked_lengths, pack

__all__ = ["LengthBatchSampler", "LengthBucketBatchSampler", "PackedBatchSampler", "TokenBudgetBatchSampler"]

Lengths: TypeAlias = Sequence[int] | Any
_BUCKETS_WINDOW, _BUDGET_WINDOW = 50, 100
"""Batches in one window sorted by length: enough that neighbors are alike, few enough that epochs differ."""


class Common(TypedDict, total=False):
    """Settings of every sampler here: see LengthBatchSampler."""

    shuffle: bool
    seed: int
    drop_last: bool
    rank: int | None
    world_size: int | None


class LengthBatchSampler(Sampler[list[int]]):
    """A batch sampler (`DataLoader(dataset, batch_sampler=...)`) over samples whose lengths are known.

    Ranks get the same number of batches. Where batches cannot be divided evenly, the largest are halved, so that every
    sample comes exactly once. With fewer samples than ranks, some samples come twice.

    Args:
        lengths: The length of each sample of the dataset, in tokens.
        most: The largest length that is allowed, or None.
        shuffle: True makes other batches in every epoch (the loop calls `set_epoch`). False makes the same batches,
            longest first.
        seed: The seed; the same on all ranks.
        drop_last: True leaves out what does not fill a batch, or a step of all ranks.
        rank: The number of this process; that of the process group by default.
        world_size: The number of processes; that of the process group by default.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        most: int | None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.lengths = checked_lengths(lengths, most)
        if not self.lengths:
            raise ConfigError("there are no lengths: the sampler needs that of each sample of the dataset")
        if type(seed) is not int:
            raise ConfigError(f"seed must be a whole number, the same on all ranks, not {seed!r:.80}")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.rank, self.world_size = _place(rank, world_size)
        self.epoch = 0
        self._planned: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch's batches come next. `perfagent.loop` calls it before each epoch."""
        check_count("epoch", epoch, least=0)
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches of this rank in this epoch."""
        return len(self._plan()) // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._plan()
        return iter([plan[number] for number in range(self.rank, len(plan), self.world_size)])

    @property
    def fill(self) -> float:
        """The share of tokens that are not padding, over the batches of this epoch and all ranks; from 0 to 1."""
        plan = self._plan()
        return sum(self.lengths[index] for batch in plan for index in batch) / sum(map(self.size_of, plan))

    def size_of(self, batch: Sequence[int]) -> int:
        """Tokens and padding of a batch."""
        return len(batch) * max(self.lengths[index] for index in batch)

    @abstractmethod
    def make_batches(self, order: list[int]) -> list[list[int]]:
        """The batches of an epoch. order: the samples, in random order or as they are."""

    def _plan(self) -> list[list[int]]:
        epoch = self.epoch if self.shuffle else 0
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._made(random.Random(f"{self.seed}:{epoch}"))  # noqa: S311 - an order, no secret
        return self._planned[1]

    def _made(self, draw: random.Random) -> list[list[int]]:
        order = [*range(len(self.lengths))]
        if self.shuffle:
            draw.shuffle(order)
        batches = self._for_all_ranks(self.make_batches(order))
        batches.sort(key=lambda batch: max(self.lengths[index] for index in batch), reverse=True)
        world = self.world_size
        steps = [batches[begin : begin + world] for begin in range(0, len(batches), world)]
        if self.shuffle:
            # The longest stay first: what runs out of memory does so at once. And no rank has the longest of each step.
            later = steps[1:]
            draw.shuffle(later)
            steps[1:] = later
            for step in steps:
                draw.shuffle(step)
        return [batch for step in steps for batch in step]

    def _for_all_ranks(self, batches: list[list[int]]) -> list[list[int]]:
        world = self.world_size
        over = len(batches) % world
        if self.drop_last:
            if len(batches) == over:
                raise ConfigError(f"drop_last leaves no batch of {len(self.lengths)} samples for {world} ranks")
            return batches[: len(batches) - over]
        again = itertools.cycle([*batches])
        while len(batches) % world:
            largest = max(range(len(batches)), key=lambda number: len(batches[number]))
            batch = batches[largest]
            if len(batch) > 1:
                batches[largest : largest + 1] = [batch[::2], batch[1::2]]
            else:
                batches = [*batches, next(again)]
        return batches


class LengthBucketBatchSampler(LengthBatchSampler):
    """A batch sampler of `batch_size` samples of nearly the same length, so that little is padding.

    Without boundaries, a random window of 50 batches is sorted by length and cut into batches.

    Args:
        lengths: The length of each sample, in tokens.
        batch_size: Samples of a batch.
        boundaries: The upper lengths of buckets, such as [128, 512]. A batch then has samples of one bucket. Padded to
            `bound_of(batch)`, there are few shapes, and `torch.compile` compiles once for each.
        **common: `shuffle`, `seed`, `drop_last`, `rank` and `world_size`: see `LengthBatchSampler`.

    Raises:
        ConfigError: A length is above the last boundary.
    """

    def __init__(
        self, lengths: Lengths, batch_size: int, *, boundaries: Sequence[int] | None = None, **common: Unpack[Common]
    ) -> None:
        check_count("batch_size", batch_size, "a number of samples")
        self.boundaries = None if boundaries is None else [*boundaries]
        if self.boundaries is not None and (not self.boundaries or self.boundaries != sorted(set(self.boundaries))):
            raise ConfigError(f"boundaries are the rising upper lengths of buckets, [128, 512]; got {boundaries!r:.80}")
        most = self.boundaries[-1] if self.boundaries else None
        super().__init__(lengths, most=most, **common)
        self.batch_size = batch_size

    def bound_of(self, batch: Sequence[int]) -> int:
        """The length to pad a batch to: the upper length of its bucket, or that of its longest sample."""
        longest = max(self.lengths[index] for index in batch)
        return longest if self.boundaries is None else self.boundaries[bisect.bisect_left(self.boundaries, longest)]

    def size_of(self, batch: Sequence[int]) -> int:
        return len(batch) * self.bound_of(batch)

    def make_batches(self, order: list[int]) -> list[list[int]]:
        if self.boundaries is None:
            window = _BUCKETS_WINDOW * self.batch_size if self.shuffle else len(order)
            groups = [*_longest_first(order, self.lengths, window)]
        else:
            buckets: dict[int, list[int]] = defaultdict(list)
            for index in order:
                buckets[bisect.bisect_left(self.boundaries, self.lengths[index])].append(index)
            groups = [buckets[number] for number in sorted(buckets)]
        size = self.batch_size
        cut = [group[begin : begin + size] for group in groups for begin in range(0, len(group), size)]
        return [batch for batch in cut if len(batch) == size] if self.drop_last else cut


class TokenBudgetBatchSampler(LengthBatchSampler):
    """A batch sampler with a budget of tokens: a batch padded to its longest sample has at most `max_tokens`.

    Memory and time of a step depend on the padded size. Batches have different numbers of samples: give `loop.backward`
    its `num_items`.

    Args:
        lengths: The length of each sample, in tokens.
        max_tokens: Samples of a batch times the length of the longest.
        max_samples: Also limits the samples of a batch.
        multiple_of: Lengths are padded to a multiple of this (8 or 64 for tensor cores).
        **common: `shuffle`, `seed`, `drop_last`, `rank` and `world_size`: see `LengthBatchSampler`.

    Raises:
        ConfigError: One sample alone is above the budget.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        multiple_of: int = 1,
        **common: Unpack[Common],
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("multiple_of", multiple_of), ("max_samples", max_samples)):
            check_count(name, value, or_none=name == "max_samples")
        most = max_tokens // multiple_of * multiple_of
        if not most:
            raise ConfigError(f"max_tokens {max_tokens} is less than multiple_of {multiple_of}: no sample would fit")
        super().__init__(lengths, most=most, **common)
        self.max_tokens, self.max_samples, self.multiple_of = max_tokens, max_samples, multiple_of
        self._padded = [-(-length // multiple_of) * multiple_of for length in self.lengths]
        average = max(1, max_tokens * len(self._padded) // sum(self._padded))
        self._window = _BUDGET_WINDOW * min(average, max_samples or average)

    def size_of(self, batch: Sequence[int]) -> int:
        return len(batch) * max(self._padded[index] for index in batch)

    def make_batches(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        window = self._window if self.shuffle else len(order)
        for samples in _longest_first(order, self.lengths, window):
            begin = 0
            while begin < len(samples):
                fits = self.max_tokens // self._padded[samples[begin]]  # the first is the longest
                end = begin + (fits if self.max_samples is None else min(fits, self.max_samples))
                if end <= len(samples) or not self.drop_last:
                    batches.append(samples[begin:end])
                begin = end
        return batches


class PackedBatchSampler(LengthBatchSampler):
    """A batch sampler that packs samples: each batch has the samples of one row of at most `capacity` tokens.

        DataLoader(dataset, batch_sampler=PackedBatchSampler(lengths, 8192), collate_fn=join)

    `join` is `perfagent_loop.data.collating.join`.

    Args:
        lengths: The length of each sample, in tokens.
        capacity: Tokens of a row.
        window: How many samples, drawn at random each epoch, are packed together. More fill rows better, fewer mix
            samples better.
        **common: `shuffle`, `seed`, `drop_last`, `rank` and `world_size`: see `LengthBatchSampler`.

    Raises:
        ConfigError: A sample is longer than a row.
    """

    def __init__(self, lengths: Lengths, capacity: int, *, window: int = 10_000, **common: Unpack[Common]) -> None:
        check_count("window", window, "a number of samples that are packed together")
        super().__init__(lengths, most=capacity, **common)
        self.capacity, self.window = capacity, window

    def size_of(self, batch: Sequence[int]) -> int:  # noqa: ARG002 - a row, however much of it is filled
        return self.capacity

    def make_batches(self, order: list[int]) -> list[list[int]]:
        window = self.window if self.shuffle else len(order)
        windows = [order[begin : begin + window] for begin in range(0, len(order), window)]
        return [
            [samples[place] for place in row]
            for samples in windows
            for row in pack([self.lengths[index] for index in samples], self.capacity)
        ]


def _longest_first(order: list[int], lengths: Sequence[int], window: int) -> Iterator[list[int]]:
    """Windows of the order, each sorted by length, longest first."""
    for begin in range(0, len(order), window):
        yield sorted(order[begin : begin + window], key=lengths.__getitem__, reverse=True)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return rank_of_job(), world_of_job()
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise ConfigError(f"ranks are numbers with 0 <= rank < world_size; got {rank!r:.40} and {world_size!r:.40}")
    return rank, world_size
