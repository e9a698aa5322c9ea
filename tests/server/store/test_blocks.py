"""Samples as bytes: every bit of a block, of its axis and of its cells comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent_server.store.codec.aggregates import aggregate, decode_cells, encode_cells, places
from perfagent_server.store.codec.blocks import (
    Samples,
    axis_key,
    decode_axis,
    decode_block,
    encode_axes,
    encode_values,
    merged,
)

pytestmark = pytest.mark.blocks

quiet = st.floats(allow_nan=True, allow_infinity=True)
any_bits = st.one_of(st.integers(0, 2**64 - 1), quiet)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2**53), any_bits, quiet), min_size=1, max_size=40))
def test_a_block_returns_every_bit_of_steps_times_and_values(samples):
    step = np.array(sorted(step for step, _, _ in samples), np.int64)
    time = np.array([time for _, _, time in samples])
    value = np.array([np.uint64(item).view("f8") if isinstance(item, int) else item for _, item, _ in samples])
    (payload,) = encode_values(value[None])
    found = decode_block(encode_axes(step[None], time[None])[0], payload)
    assert found.step.tolist() == step.tolist()
    assert (found.time.tobytes(), found.value.tobytes()) == (time.tobytes(), value.tobytes())


def test_an_axis_is_known_by_its_content_and_place():
    axis, other = (encode_axes(np.array([[3, 3, 7]]), np.array([[1.0, 2.0, end]]))[0] for end in (3.0, 4.0))
    assert decode_axis(axis)[0].tolist() == [3, 3, 7]
    places_of = [(1, 1, 0, axis), (1, 1, 0, other), (1, 1, 1, axis), (1, 2, 0, axis), (2, 1, 0, axis)]
    keys = {axis_key(*place) for place in places_of + places_of}
    assert len(keys) == 5
    assert all(0 <= key < 2**63 for key in keys)


def test_samples_of_one_step_are_ordered_by_time_then_arrival():
    first = Samples(np.array([5, 5]), np.array([2.0, 1.0]), np.array([20.0, 10.0]))
    late = Samples(np.array([5, 4]), np.array([1.0, 9.0]), np.array([11.0, 90.0]))
    assert merged([first, late]).value.tolist() == [90.0, 10.0, 11.0, 20.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 1023), quiet), min_size=1, max_size=60), st.booleans())
def test_cells_survive_as_bytes(samples, narrow):
    samples.sort(key=lambda item: item[0])
    step = np.array([item[0] for item in samples])
    with np.errstate(over="ignore"):
        value = np.array([item[1] for item in samples]).astype("f4" if narrow else "f8").astype("f8")
    where = places(step // 16)
    grid = aggregate(where, step[None, where.starts] * 0.5, value[None])
    single = aggregate(places(np.array([0])), np.array([[1.5]]), np.array([[0.1]]))
    blobs = [*encode_cells(grid), *encode_cells(single), *encode_cells(grid)]  # rows of two kinds in turn
    cells, lengths = decode_cells(blobs, [2048, 0, 4096], 16)
    many = len(grid.index)
    assert lengths.tolist() == [many, 1, many]
    steps = (grid.index * 16).tolist()
    assert cells.step.tolist() == [*(2048 + step for step in steps), 0, *(4096 + step for step in steps)]
    assert cells.count.tolist() == [*grid.count.tolist(), 1, *grid.count.tolist()]
    for name in ("min", "max", "sum", "nonfinite", "time"):
        assert np.array_equal(getattr(cells, name)[:many], getattr(grid, name)[0], equal_nan=name == "sum"), name
