"""Batches by length: budgets, buckets, packed rows; epochs, ranks and resuming."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from perfagent_loop.data.collating import pad
from perfagent_loop.data.length_batches import LengthBucketBatchSampler, PackedBatchSampler, TokenBudgetBatchSampler

from . import corpus

LENGTHS = corpus.text_lengths(3000)
SAMPLERS = {
    "budget": functools.partial(TokenBudgetBatchSampler, LENGTHS, 8192),
    "buckets": functools.partial(LengthBucketBatchSampler, LENGTHS, 16),
    "bounds": functools.partial(LengthBucketBatchSampler, LENGTHS, 16, boundaries=[128, 512, 2048]),
    "packed": functools.partial(PackedBatchSampler, LENGTHS, 4096, window=1000),
}
FILLED = {"budget": 0.95, "buckets": 0.9, "packed": 0.99}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def test_batches_are_nearly_full_and_none_is_above_its_budget() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 8192, multiple_of=64)
    dataset = [{"input_ids": torch.arange(length)} for length in LENGTHS]
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=functools.partial(pad, multiple_of=64))
    sizes = [batch["input_ids"].numel() for batch in loader]
    assert max(sizes) <= 8192
    assert len(sizes) == len(sampler) == len(loader)
    assert sum(sizes) == round(sum(LENGTHS) / sampler.fill)
    assert [SAMPLERS[name]().fill > least for name, least in FILLED.items()] == [True] * 3
    assert max(map(len, TokenBudgetBatchSampler(LENGTHS, 8192, max_samples=10))) == 10
    buckets = SAMPLERS["bounds"]()
    for batch in buckets:
        bounds = {next(bound for bound in (128, 512, 2048) if LENGTHS[index] <= bound) for index in batch}
        assert bounds == {buckets.bound_of(batch)}


@every_sampler
def test_every_sample_comes_once_an_epoch_in_other_batches_each(make: Any) -> None:
    sampler = make()
    epochs, before = [], torch.get_rng_state()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = [*sampler]
        assert len(batches) == len(sampler)
        assert sorted(itertools.chain.from_iterable(batches)) == [*range(len(LENGTHS))]
        epochs.append({frozenset(batch) for batch in batches})
    assert len(epochs[0] & epochs[1]) < 0.1 * len(epochs[0])
    sampler.set_epoch(0)
    assert {frozenset(batch) for batch in sampler} == epochs[0]
    assert [*make(seed=1)] != [*make()]
    assert max(LENGTHS) in {LENGTHS[index] for index in next(iter(make()))}, "what needs most memory comes first"
    assert torch.equal(torch.get_rng_state(), before)


@every_sampler
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_an_epoch_in_as_many_steps_each(make: Any, drop_last: bool) -> None:
    ranks = [[*make(rank=rank, world_size=7, drop_last=drop_last)] for rank in range(7)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(ranks)))
    assert seen == sorted(set(seen)) if drop_last else seen == [*range(len(LENGTHS))]


def test_ranks_have_like_lengths_in_a_step_so_that_none_waits() -> None:
    ranks = [[*TokenBudgetBatchSampler(LENGTHS, 8192, rank=rank, world_size=4)] for rank in range(4)]
    for step in zip(*ranks, strict=True):
        longest = [max(LENGTHS[index] for index in batch) for batch in step]
        assert max(longest) <= 1.5 * min(longest) + 32
    firsts = [max(LENGTHS[index] for index in batch) for batch in ranks[0]]
    others = [max(LENGTHS[index] for index in batch) for batch in ranks[3]]
    assert sum(one > other for one, other in zip(firsts, others, strict=True)) < 0.75 * len(firsts)
