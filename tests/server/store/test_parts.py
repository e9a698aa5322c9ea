"""The norm of sharded gradients: every rank sends a part, the answers are of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from frames import frame, rows, state

PARTS = "grad/local_square_sum"


def fill(
    shelf, parts: Mapping[int, Mapping[int, float]], *, name: str = PARTS, attempt: int = 1, start: int = 1
) -> None:
    """Ranks send these parts: rank -> step -> value."""
    for rank, samples in parts.items():
        begin = state("starting", start_step=start, rank=rank, world_size=len(parts))
        piece = rows({name: list(samples.values())}, list(samples))
        shelf.append(frame(1, begin, piece, rank=rank, attempt=attempt))


@pytest.mark.sql
def test_the_norm_is_the_root_of_the_sum_over_ranks(shelf) -> None:
    fill(shelf, {0: {1: 9.0, 2: 1.0, 3: 1.0}, 1: {1: 16.0, 2: 3.0}})
    fill(shelf, {0: {3: 9.0}, 1: {3: 16.0}}, name="grad_square_sum/blocks.0.weight", attempt=2, start=3)
    answer = shelf.store.series("r1", "grad/norm")
    assert (answer.step, answer.mean, answer.min, answer.max) == ([1, 2], [5.0, 2.0], [5.0, 2.0], [5.0, 2.0])
    assert (answer.count, answer.nonfinite, answer.rank) == ([1, 1], [0, 0], "all")
    assert shelf.store.series("r1", "grad/norm", rank=0).step == []
    assert shelf.store.series("r1", PARTS, rank=0).mean == [9.0, 1.0]
    latest = shelf.store.latest("r1")
    assert (latest["grad/norm"].value, latest["grad/norm"].step, latest["grad/norm"].rank) == (2.0, 2, "all")
    assert shelf.mean("grad_norm/blocks.0.weight") == [latest["grad_norm/blocks.0.weight"].value] == [5.0]
    assert "grad/norm" in shelf.store.names("r1")


def test_the_norm_is_the_same_in_blocks_and_rollups(shelf) -> None:
    steps = range(1, 40_001)
    squares = np.random.default_rng(3).random((2, len(steps))).astype(np.float32)
    fill(shelf, {rank: dict(zip(steps, squares[rank].tolist(), strict=True)) for rank in (0, 1)})
    before = [shelf.store.series("r1", "grad/norm", points=points) for points in (40_000, 300)]
    shelf.compact()
    after = [shelf.store.series("r1", "grad/norm", points=points) for points in (40_000, 300)]
    for one, other in zip(before, after, strict=True):
        assert one.step == other.step
        assert np.allclose(one.mean, other.mean, rtol=1e-12)
    width = after[1].bucket_steps
    norms = np.sqrt(squares.astype(np.float64).sum(axis=0))[width - 1 : 2 * width - 1]  # of the second bucket
    assert after[1].mean[1] == pytest.approx(math.sqrt((norms**2).mean()))
    assert after[1].min[1] <= norms.min()
    assert after[1].max[1] >= norms.max()


@pytest.mark.parametrize(
    ("parts", "newest"),
    [
        ({0: {4: 1.0, 8: 9.0, 12: 1.0}, 1: {8: 16.0}}, (8, 5.0)),  # what a rank did not measure is left out
        ({0: {1: 9.0, 2: math.inf}, 1: {1: 16.0}}, (2, math.inf)),  # one rank is a step ahead
        ({0: {1: 9.0, 2: math.inf}, 1: {1: 16.0, 2: 1.0, 3: 1.0}}, (2, math.inf)),
        ({0: {1: 9.0, 2: math.inf}, 1: {1: 16.0, 2: math.nan, 3: 1.0}}, (2, math.nan)),
    ],
    ids=["gaps", "ahead", "behind", "both"],
)
def test_the_newest_norm_is_of_all_ranks_or_no_number(shelf, parts, newest) -> None:
    fill(shelf, parts)
    for _ in range(2):
        latest, answer = shelf.store.latest("r1")["grad/norm"], shelf.store.series("r1", "grad/norm")
        assert (latest.step, latest.value) == (newest[0], pytest.approx(newest[1], nan_ok=True))
        assert (answer.step[-1], sum(answer.nonfinite)) == (newest[0], int(not math.isfinite(newest[1])))
        assert answer.mean[0] == 5.0
        shelf.compact()


def test_a_norm_that_one_rank_knows_stands_as_it_is(shelf) -> None:
    fill(shelf, {0: {1: 9.0, 2: 9.0}, 1: {1: 16.0, 2: 16.0}})
    fill(shelf, {0: {2: 4.0}}, attempt=2, start=2)  # an attempt with fewer ranks is whole by itself
    assert shelf.mean("grad/norm") == [5.0, 2.0]
    assert shelf.store.latest("r1")["grad/norm"].value == 2.0
    shelf.append(frame(3, rows({"grad/norm": [7.0]}, [2]), attempt=2))
    assert shelf.store.latest("r1")["grad/norm"].value == 7.0
