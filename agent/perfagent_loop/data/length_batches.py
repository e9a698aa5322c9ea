"""The common part of the samplers that group samples by length: epochs, ranks, and when their batches are made.

The batches of an epoch follow from the lengths, the seed and the epoch alone, so that every rank finds the same ones
without a word to the others, and a resumed training goes on in the middle of an epoch: the loop gives the sampler its
epoch and passes over what was seen. Samples of like length lie in the same batch, batches of like length in the same
step of all ranks, and apart from that the order is random.
"""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count
from perfagent_loop.collectives import rank_of_job, world_of_job
from perfagent_loop.data.packing import checked_lengths

__all__ = ["LengthBatchSampler", "longest_first_windows"]


class LengthBatchSampler(Sampler[list[int]]):
    """A batch sampler (`DataLoader(dataset, batch_sampler=...)`) over samples whose lengths are known.

    lengths: of each sample of the dataset, in tokens. shuffle: other batches in every epoch (the loop calls
    `set_epoch`), or the same ones, longest first. seed: the same on all ranks. drop_last: leave out what does not fill
    a batch or a step of all ranks. rank, world_size: this process's part; of the process group by default.

    Ranks get equally many batches. Where these do not go round, the largest are halved, so that every sample comes
    exactly once; with fewer samples than ranks some come twice.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Any,
        *,
        most: int | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
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
        """Which epoch's batches come next. `perfagent.loop` calls it; in a loop of your own, call it before each
        epoch."""
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
        """Tokens of this epoch over what its batches hold of tokens and padding, on all ranks together; from 0 to 1."""
        plan = self._plan()
        return sum(self.lengths[index] for batch in plan for index in batch) / sum(map(self.size_of, plan))

    def size_of(self, batch: Sequence[int]) -> int:
        """Tokens and padding of a batch."""
        return len(batch) * max(self.lengths[index] for index in batch)

    @abstractmethod
    def make_batches(self, order: list[int]) -> list[list[int]]:
        """The batches of an epoch. order: the samples, in random order or as they are."""

    # ---- one epoch's batches, of all ranks

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
                raise ConfigError(
                    f"drop_last leaves no batch of {len(self.lengths)} samples for {world} ranks; leave it out"
                )
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


def longest_first_windows(order: list[int], lengths: Sequence[int], window: int) -> Iterator[list[int]]:
    """Windows of the order, each sorted by length, longest first: what is near has nearly one length, what is far is
    random."""
    for begin in range(0, len(order), window):
        yield sorted(order[begin : begin + window], key=lengths.__getitem__, reverse=True)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return rank_of_job(), world_of_job()
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank and world_size must be 0 <= rank < world_size; got {rank!r:.40} and {world_size!r:.40}"
        )
    return rank, world_size
