"""Batches of as many samples as fit into a number of tokens, padding included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count
from perfagent_loop.data.length_batches import LengthBatchSampler, longest_first_windows

__all__ = ["TokenBudgetBatchSampler"]

_BATCHES_A_WINDOW = 100
"""How many batches lie in one window sorted by length: enough that neighbors are alike, few enough that epochs
differ."""


class TokenBudgetBatchSampler(LengthBatchSampler):
    """Batches that hold at most max_tokens when padded to their longest sample: what decides about memory and time.

    A sum of lengths without the padding would let one long sample among many short ones take many times the memory.

    lengths: of each sample. max_tokens: of a batch, samples times the longest of them. max_samples: of a batch,
    besides. multiple_of: to what lengths are padded (8 or 64 for tensor cores). shuffle, seed, drop_last, rank,
    world_size: see LengthBatchSampler. Batches have different numbers of samples: tell `loop.backward` how many items
    each loss is a mean of.

    Raises ConfigError where a sample alone is over the budget.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Any,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        multiple_of: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("multiple_of", multiple_of), ("max_samples", max_samples)):
            check_count(name, value, or_none=name == "max_samples")
        most = max_tokens // multiple_of * multiple_of
        if not most:
            raise ConfigError(
                f"max_tokens {max_tokens} is less than multiple_of {multiple_of}: no padded sample would fit"
            )
        super().__init__(
            lengths, most=most, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
        )
        self.max_tokens, self.max_samples, self.multiple_of = max_tokens, max_samples, multiple_of
        self._padded = [-(-length // multiple_of) * multiple_of for length in self.lengths]
        average = max(1, max_tokens * len(self._padded) // sum(self._padded))
        self._window = _BATCHES_A_WINDOW * min(average, max_samples or average)

    def size_of(self, batch: Sequence[int]) -> int:
        return len(batch) * max(self._padded[index] for index in batch)

    def make_batches(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        window = self._window if self.shuffle else len(order)
        for samples in longest_first_windows(order, self.lengths, window):
            begin = 0
            while begin < len(samples):
                fits = self.max_tokens // self._padded[samples[begin]]  # the first is the longest
                end = begin + (fits if self.max_samples is None else min(fits, self.max_samples))
                if end <= len(samples) or not self.drop_last:
                    batches.append(samples[begin:end])
                begin = end
        return batches
