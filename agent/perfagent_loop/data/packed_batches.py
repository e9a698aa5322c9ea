"""Batches that are one packed row each: every epoch packs other samples together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfagent_loop.checks import check_count
from perfagent_loop.data.length_batches import LengthBatchSampler
from perfagent_loop.data.packing import pack

__all__ = ["PackedBatchSampler"]


class PackedBatchSampler(LengthBatchSampler):
    """Each batch holds the samples of one row of at most `capacity` tokens; `collating.join` makes that row of them.

        DataLoader(dataset, batch_sampler=PackedBatchSampler(lengths, 8192), collate_fn=join)

    lengths: of each sample. capacity: tokens of a row. window: samples that are packed together, drawn at random each
    epoch; more fill better, fewer mix better. shuffle, seed, drop_last, rank, world_size: see LengthBatchSampler.

    Raises ConfigError for a sample that is longer than a row.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Any,
        capacity: int,
        *,
        window: int = 10_000,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_count("window", window, "a number of samples that are packed together")
        super().__init__(
            lengths, most=capacity, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
        )
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
