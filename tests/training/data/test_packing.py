"""Sequences packed into rows: offline and from a stream."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from perfagent_loop.data.packed_stream import PackedStream
from perfagent_loop.data.packing import fill, fill_rows, pack, pack_stream

from . import corpus


def cut_in_three(rows: int) -> list[int]:
    """Rows of 2048 tokens, each cut into large pieces: best-fit decreasing alone fills 96 % with them."""
    firsts = [512 + 37 * row % 513 for row in range(rows)]
    seconds = [max(512, 1024 - first) + 11 * row % 257 for row, first in enumerate(firsts)]
    return [*firsts, *seconds, *(2048 - one - other for one, other in zip(firsts, seconds, strict=True))]


@pytest.mark.parametrize(
    ("lengths", "share"), [(corpus.text_lengths(5_000), 0.999), (cut_in_three(1_000), 0.98)], ids=["text", "cut rows"]
)
def test_rows_are_nearly_full(lengths: list[int], share: float) -> None:
    assert fill(pack(lengths, 2048), lengths, 2048) >= share


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90))
@settings(max_examples=100, deadline=None)
def test_rows_hold_every_sample_once_and_no_more_than_fits(lengths: list[int], capacity: int) -> None:
    for rows in (pack(lengths, capacity), fill_rows(lengths, capacity, 0)):  # what long lists are filled by
        assert sorted(itertools.chain.from_iterable(rows)) == [*range(len(lengths))]
        assert all(0 < sum(lengths[index] for index in row) <= capacity for row in rows)


def test_a_stream_is_packed_with_a_window_in_hand() -> None:
    lengths, held, rows = corpus.text_lengths(20_000), list[int](), list[list[int]]()
    stream = ((held.append(number), number)[1] for number in range(len(lengths)))
    for row in pack_stream(stream, 2048, length=lengths.__getitem__, window=500):
        assert len(held) - sum(map(len, rows)) <= 500
        rows.append(row)
    assert sorted(itertools.chain.from_iterable(rows)) == [*range(len(lengths))]
    assert max(sum(lengths[index] for index in row) for row in rows) <= 2048
    assert fill(rows, lengths, 2048) >= 0.99


@pytest.mark.real
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_share_a_stream_and_pack_every_sample_once(workers: int) -> None:
    lengths = [length % 30 + 1 for length in corpus.text_lengths(200)]
    samples = [{"input_ids": torch.full((length,), number)} for number, length in enumerate(lengths)]
    stream = PackedStream(samples, 64, window=50)
    for _ in range(2):
        rows = [*DataLoader(stream, batch_size=None, num_workers=workers)]
        assert all(row["input_ids"].shape[1] <= 64 for row in rows)
        seen = torch.cat([row["input_ids"][0] for row in rows]).bincount()
        assert seen.tolist() == lengths
