"""Batches by length: budgets, buckets, packed rows; epochs, ranks and resuming."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import perfagent
from perfagent.errors import ConfigError
from perfagent.training.data.buckets import LengthBucketBatchSampler
from perfagent.training.data.collating import join, pad
from perfagent.training.data.length_batches import LengthBatchSampler
from perfagent.training.data.packed_batches import PackedBatchSampler
from perfagent.training.data.token_budget import TokenBudgetBatchSampler

from . import corpus

LENGTHS = corpus.text_lengths(3000)
SAMPLERS = {
    "budget": functools.partial(TokenBudgetBatchSampler, LENGTHS, 8192),
    "buckets": functools.partial(LengthBucketBatchSampler, LENGTHS, 16),
    "bounds": functools.partial(LengthBucketBatchSampler, LENGTHS, 16, boundaries=[128, 512, 2048]),
    "packed": functools.partial(PackedBatchSampler, LENGTHS, 4096, window=1000),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def random_fill(batch_size: int) -> float:
    batches = [LENGTHS[begin : begin + batch_size] for begin in range(0, len(LENGTHS), batch_size)]
    return sum(LENGTHS) / sum(len(batch) * max(batch) for batch in batches)


# ---- what is in a batch


@pytest.mark.parametrize("multiple_of", [1, 64])
def test_no_batch_is_above_its_budget_when_it_is_padded(multiple_of: int) -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 8192, multiple_of=multiple_of)
    dataset = [corpus.sample_of(length) for length in LENGTHS]
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=functools.partial(pad, multiple_of=multiple_of))
    sizes = [batch["input_ids"].numel() for batch in loader]
    assert max(sizes) <= 8192
    assert len(sizes) == len(sampler) == len(loader)
    assert sum(sizes) == round(sum(LENGTHS) / sampler.fill)


def test_a_budget_wastes_little_where_batches_of_a_fixed_size_waste_most() -> None:
    assert TokenBudgetBatchSampler(LENGTHS, 8192).fill > 0.95
    assert LengthBucketBatchSampler(LENGTHS, 16).fill > 0.9
    assert PackedBatchSampler(LENGTHS, 4096).fill > 0.99
    assert random_fill(16) < 0.5


def test_a_budget_takes_no_more_samples_than_it_is_told() -> None:
    assert max(map(len, TokenBudgetBatchSampler(LENGTHS, 8192, max_samples=10))) == 10


def test_a_bucket_holds_one_range_of_lengths() -> None:
    sampler = SAMPLERS["bounds"]()
    for batch in sampler:
        bounds = {next(bound for bound in (128, 512, 2048) if LENGTHS[index] <= bound) for index in batch}
        assert bounds == {sampler.bound_of(batch)}


# ---- epochs


@every_sampler
def test_every_sample_comes_once_an_epoch_in_other_batches_each(make: Any) -> None:
    sampler = make()
    epochs = []
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


@every_sampler
def test_without_shuffling_all_epochs_are_the_same_longest_first(make: Any) -> None:
    sampler = make(shuffle=False)
    first = [*sampler]
    sampler.set_epoch(5)
    assert [*sampler] == first
    longest = [max(LENGTHS[index] for index in batch) for batch in first]
    assert longest == sorted(longest, reverse=True)


@every_sampler
def test_what_runs_out_of_memory_does_so_in_the_first_step(make: Any) -> None:
    assert max(LENGTHS) in {LENGTHS[index] for index in next(iter(make()))}


@every_sampler
def test_an_order_draws_nothing_from_the_users_generators(make: Any) -> None:
    before = torch.get_rng_state()
    [*make()]
    assert torch.equal(torch.get_rng_state(), before)


# ---- ranks


@every_sampler
@pytest.mark.parametrize("world", [2, 7])
def test_ranks_share_an_epoch_in_as_many_steps_each(make: Any, world: int) -> None:
    ranks = [[*make(rank=rank, world_size=world)] for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(ranks))) == [*range(len(LENGTHS))]


def test_ranks_have_like_lengths_in_a_step_so_that_none_waits() -> None:
    ranks = [[*TokenBudgetBatchSampler(LENGTHS, 8192, rank=rank, world_size=4)] for rank in range(4)]
    for step in zip(*ranks, strict=True):
        longest = [max(LENGTHS[index] for index in batch) for batch in step]
        assert max(longest) <= 1.5 * min(longest) + 32
    firsts = [max(LENGTHS[index] for index in batch) for batch in ranks[0]]
    others = [max(LENGTHS[index] for index in batch) for batch in ranks[3]]
    assert sum(one > other for one, other in zip(firsts, others, strict=True)) < 0.75 * len(firsts)


def test_fewer_samples_than_ranks_come_twice_unless_they_are_left_out() -> None:
    def batches(**more: Any) -> list[list[list[int]]]:
        return [[*LengthBucketBatchSampler([5, 6], 4, rank=rank, world_size=3, **more)] for rank in range(3)]

    assert sorted(len(one) for one in batches()) == [1, 1, 1]
    with pytest.raises(ConfigError, match="drop_last leaves no batch for 3 ranks and 2 samples"):
        batches(drop_last=True)


@every_sampler
def test_drop_last_leaves_out_what_does_not_go_round(make: Any) -> None:
    ranks = [[*make(rank=rank, world_size=7, drop_last=True)] for rank in range(7)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = [*itertools.chain.from_iterable(itertools.chain.from_iterable(ranks))]
    assert len(seen) == len(set(seen)) <= len(LENGTHS)


# ---- wrong use


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TokenBudgetBatchSampler([5, 900], 512), "length 1 is 900, above the 512 tokens"),
        (lambda: TokenBudgetBatchSampler([5], 0), "max_tokens is a whole number, 1 or more; got 0"),
        (lambda: TokenBudgetBatchSampler([5], 40, multiple_of=64), "max_tokens 40 is less than multiple_of 64"),
        (lambda: TokenBudgetBatchSampler([500], 510, multiple_of=64), "length 0 is 500, above the 448 tokens"),
        (lambda: TokenBudgetBatchSampler([], 512), "there are no lengths"),
        (lambda: TokenBudgetBatchSampler([5], 512, rank=2, world_size=2), "0 <= rank < world_size; got 2 and 2"),
        (lambda: TokenBudgetBatchSampler([5], 512, rank=0), "rank and world_size go together"),
        (lambda: TokenBudgetBatchSampler([5], 512, seed=None), "seed must be a whole number"),
        (lambda: LengthBucketBatchSampler([5], 0), "batch_size is a number of samples"),
        (lambda: LengthBucketBatchSampler([5], 2, boundaries=[9, 3]), "boundaries are the rising upper lengths"),
        (lambda: LengthBucketBatchSampler([5, 10], 2, boundaries=[3, 9]), "length 1 is 10, above the 9 tokens"),
        (lambda: PackedBatchSampler([5], 3), "length 0 is 5, above the 3 tokens"),
        (lambda: PackedBatchSampler([5], 8, window=0), "window is the number of samples"),
        (lambda: LengthBucketBatchSampler([5], 2).set_epoch(-1), "an epoch is counted from 0, not -1"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


# ---- in the loop


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def token_loop() -> perfagent.Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 4), nn.Dropout(0.1), nn.Linear(4, 64))
    return perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.5), grad_accum=2)


def token_loader(make: Any, collate: Any, workers: int) -> DataLoader[Any]:
    lengths = [length % 40 + 1 for length in LENGTHS[:60]]
    dataset = [corpus.sample_of(length, first=1 + number % 20) for number, length in enumerate(lengths)]
    sampler: LengthBatchSampler = make(lengths)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=workers)


def losses_of(loop: perfagent.Loop, loader: DataLoader[Any], steps: int | None = None) -> list[float]:
    losses = []
    for batch in loop.batches(loader, epochs=3, steps=steps):
        with loop.forward():
            labels = batch["labels"]
            loss = nn.functional.cross_entropy(loop.model(batch["input_ids"]).flatten(0, 1), labels.flatten())
        loop.backward(loss, labels.ne(-100).sum())
        loop.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("make", "collate", "steps"),
    [
        (functools.partial(TokenBudgetBatchSampler, max_tokens=120), pad, 8),
        (functools.partial(PackedBatchSampler, capacity=128, window=30), join, 6),
    ],
    ids=["budget", "packed"],
)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("one_thread")
def test_a_run_that_was_interrupted_goes_on_with_the_same_losses(
    make: Any, collate: Any, steps: int, workers: int
) -> None:
    whole = losses_of(token_loop(), token_loader(make, collate, workers))
    first = token_loop()
    begun = losses_of(first, token_loader(make, collate, workers), steps=steps)
    assert first.epoch == 1
    state = first.state_dict()
    second = token_loop()
    second.load_state_dict(state)
    assert begun + losses_of(second, token_loader(make, collate, workers)) == whole
