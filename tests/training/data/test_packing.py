"""Sequences packed into rows: offline and from a stream."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from perfagent.errors import ConfigError
from perfagent.training.data.next_fit import fill_rows
from perfagent.training.data.packed_stream import PackedStream
from perfagent.training.data.packing import fill, pack, pack_stream
from perfagent.training.data.sorted_ints import Integers

from . import corpus


def test_fifty_thousand_lengths_fill_their_rows_to_99_percent_in_under_a_second() -> None:
    lengths = corpus.text_lengths(50_000)
    begin = time.thread_time()
    rows = pack(lengths, 2048)
    took_s = time.thread_time() - begin
    assert sorted(itertools.chain.from_iterable(rows)) == [*range(50_000)]
    assert max(sum(lengths[index] for index in row) for row in rows) <= 2048
    assert fill(rows, lengths, 2048) >= 0.999
    assert took_s < 1.0


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_every_row_holds_what_the_best_fit_by_hand_would_put_there(lengths: list[int]) -> None:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            best = min(fitting)
            rooms.remove(best)
            rooms.append(best - length)
        else:
            rooms.append(70 - length)
    rows = pack(lengths, 70)
    left = sorted(70 - sum(lengths[index] for index in row) for row in rows)
    assert left == sorted(rooms) or (left[0] >= 0 and len(left) < len(rooms))
    assert sorted(itertools.chain.from_iterable(rows)) == [*range(len(lengths))]


def cut_rows(pieces: int, least: int, capacity: int) -> list[int]:
    """The lengths of full rows that were each cut into pieces at random, in random order: 100 % is possible."""
    draw = random.Random(pieces)
    lengths: list[int] = []
    rest = capacity - pieces * least
    for _ in range(12_000 // pieces):
        cuts = [0, *sorted(draw.randint(0, rest) for _ in range(pieces - 1)), rest]
        lengths += [least + end - begin for begin, end in itertools.pairwise(cuts)]
    draw.shuffle(lengths)
    return lengths


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [
        (3000 * [501] + 3000 * [252] + 3000 * [251] + 6000 * [248], 1000),  # best-fit decreasing: 82 %
        (cut_rows(3, 614, 2048), 2048),  # 89 %
        (cut_rows(3, 532, 2048), 2048),
        (cut_rows(4, 307, 2048), 2048),  # 96 %
        (cut_rows(5, 307, 2048), 2048),
        (cut_rows(8, 819, 8192), 8192),
        (cut_rows(5, 100_000, 10**6), 10**6),  # hardly two alike
    ],
)
def test_lengths_without_short_ones_for_the_gaps_fill_99_percent_too(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(itertools.chain.from_iterable(rows)) == [*range(len(lengths))]
    assert max(sum(lengths[index] for index in row) for row in rows) <= capacity
    assert fill(rows, lengths, capacity) >= 0.99
    assert pack(lengths, capacity) == rows


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(40, 90))
@settings(max_examples=100, deadline=None)
def test_rows_that_are_filled_one_by_one_hold_everything_once(lengths: list[int], capacity: int) -> None:
    rows = fill_rows(lengths, capacity, 0)
    assert sorted(itertools.chain.from_iterable(rows)) == [*range(len(lengths))]
    assert all(0 < sum(lengths[index] for index in row) <= capacity for row in rows)


@given(st.sets(st.integers(0, 5000)), st.lists(st.integers(0, 5000), min_size=1))
def test_a_set_of_integers_knows_its_neighbors(members: set[int], asked: list[int]) -> None:
    numbers = Integers(5000)
    for one in members:
        numbers.add(one)
    for one in asked:
        assert numbers.largest_to(one) == max((member for member in members if member <= one), default=None)
        assert numbers.smallest_from(one) == min((member for member in members if member >= one), default=None)
        numbers.discard(one)
        members.discard(one)


@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 4095, 4096, 1_000_000])
def test_a_row_may_be_exactly_full_at_any_capacity(capacity: int) -> None:
    parts = [capacity, *([capacity // 2, capacity - capacity // 2] if capacity > 1 else [])]
    assert [sum(parts[index] for index in row) for row in pack(parts, capacity)] == [capacity] * (
        2 if capacity > 1 else 1
    )


def test_tensors_and_arrays_are_lengths_too() -> None:
    lengths = torch.tensor([3, 5, 2])
    assert pack(lengths, 5) == pack(lengths.numpy(), 5) == pack([3, 5, 2], 5) == [[1], [0, 2]]
    assert pack([], 5) == []


@pytest.mark.parametrize(
    ("lengths", "capacity", "said"),
    [
        ([3, 9, 12], 8, "length 1 is 9, above the 8 tokens that there is room for (2 of 3 are); truncate or split"),
        ([3, 0], 8, "length 1 is 0: leave out what is empty"),
        ([3, 2.5], 8, "number 1 is 2.5"),
        ([3], 0, "the capacity is a number of tokens, 1 or more; got 0"),
        ([3], None, "the capacity is a number of tokens, 1 or more; got None"),
        (None, 8, "lengths are a list, tensor or array of whole numbers, one a sample; got None"),
        (7, 8, "got 7"),
    ],
)
def test_what_cannot_be_packed_is_named(lengths: list[int], capacity: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pack(lengths, capacity)
    assert said in str(caught.value)


@pytest.mark.parametrize(("window", "filled"), [(100, 0.98), (500, 0.99), (2000, 0.995)])
def test_a_stream_is_packed_with_a_window_in_hand(window: int, filled: float) -> None:
    lengths = corpus.text_lengths(20_000)
    held, most = 0, 0

    def stream():
        nonlocal held, most
        for index in range(len(lengths)):
            held += 1
            most = max(most, held)
            yield index

    rows = []
    for row in pack_stream(stream(), 2048, length=lengths.__getitem__, window=window):
        held -= len(row)
        rows.append(row)
    assert sorted(itertools.chain.from_iterable(rows)) == [*range(len(lengths))]
    assert max(sum(lengths[index] for index in row) for row in rows) <= 2048
    assert fill(rows, lengths, 2048) >= filled
    assert most <= window


def test_no_item_of_a_stream_waits_longer_than_eight_windows() -> None:
    awkward = [(0, 6)]  # nothing fills its row: 6 of 10, and all that follows is 7
    stream = itertools.chain(awkward, ((number, 7) for number in range(1, 1000)))
    out = pack_stream(stream, 10, length=lambda item: item[1], window=10)
    came = next(number for number, row in enumerate(out) if any(item[0] == 0 for item in row))
    assert came <= 9 * 10


def test_samples_with_input_ids_know_their_length_and_others_must_be_told() -> None:
    samples = [corpus.sample_of(3), corpus.sample_of(5), corpus.sample_of(2)]
    assert [[len(one["input_ids"]) for one in row] for row in pack_stream(samples, 5)] == [[5], [3, 2]]
    with pytest.raises(ConfigError, match="has no 'input_ids': say what counts with length="):
        next(pack_stream([{"text": "a"}], 5))
    with pytest.raises(ConfigError, match="length 3 is 9"):
        [*pack_stream([[1], [1], [1], [1] * 9], 5, window=2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_share_a_stream_and_pack_every_sample_once(workers: int) -> None:
    samples = [torch.full((length % 30 + 1,), number) for number, length in enumerate(corpus.text_lengths(200))]
    stream = PackedStream(samples, 64, window=50)
    for _ in range(2):
        rows = [*DataLoader(stream, batch_size=None, num_workers=workers)]
        assert all(row["input_ids"].shape[1] <= 64 for row in rows)
        seen = torch.cat([row["input_ids"][0] for row in rows]).bincount()
        assert seen.tolist() == [len(sample) for sample in samples]
    with pytest.raises(ConfigError, match="list_iterator can be read only once"):
        PackedStream(iter(samples), 64)
