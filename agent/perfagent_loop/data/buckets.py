"""Batches of a fixed number of samples of like length."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count
from perfagent_loop.data.length_batches import LengthBatchSampler, longest_first_windows

__all__ = ["LengthBucketBatchSampler"]

_BATCHES_A_WINDOW = 50


class LengthBucketBatchSampler(LengthBatchSampler):
    """Batches of batch_size samples each, whose lengths are nearly the same, so that little is padding.

    Without boundaries, a window of 50 batches drawn at random is sorted by length and cut. boundaries: the upper
    lengths of buckets, as [128, 512]; a batch then holds samples of one bucket, which gives few different shapes when
    each is padded to its bucket's upper length (`bound_of`): torch.compile makes one graph a shape. Every bucket's last
    batch may be smaller.

    lengths, shuffle, seed, drop_last, rank, world_size: see LengthBatchSampler. Raises ConfigError for a length above
    the last boundary.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Any,
        batch_size: int,
        *,
        boundaries: Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_count("batch_size", batch_size, "a number of samples")
        self.boundaries = None if boundaries is None else [*boundaries]
        if self.boundaries is not None and (not self.boundaries or self.boundaries != sorted(set(self.boundaries))):
            raise ConfigError(
                f"boundaries are the rising upper lengths of buckets, as [128, 512]; got {boundaries!r:.80}"
            )
        most = self.boundaries[-1] if self.boundaries else None
        super().__init__(
            lengths, most=most, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
        )
        self.batch_size = batch_size

    def bound_of(self, batch: Sequence[int]) -> int:
        """To what length a batch is padded: its bucket's upper one, or that of its longest sample."""
        longest = max(self.lengths[index] for index in batch)
        return longest if self.boundaries is None else self.boundaries[bisect.bisect_left(self.boundaries, longest)]

    def size_of(self, batch: Sequence[int]) -> int:
        return len(batch) * self.bound_of(batch)

    def make_batches(self, order: list[int]) -> list[list[int]]:
        if self.boundaries is None:
            window = _BATCHES_A_WINDOW * self.batch_size if self.shuffle else len(order)
            groups = [*longest_first_windows(order, self.lengths, window)]
        else:
            buckets: dict[int, list[int]] = defaultdict(list)
            for index in order:
                buckets[bisect.bisect_left(self.boundaries, self.lengths[index])].append(index)
            groups = [buckets[number] for number in sorted(buckets)]
        size = self.batch_size
        cut = [group[begin : begin + size] for group in groups for begin in range(0, len(group), size)]
        return [batch for batch in cut if len(batch) == size] if self.drop_last else cut
