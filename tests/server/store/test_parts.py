"""The norm of sharded gradients: every rank sends a part, the answers are of the whole."""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from frames import frame, rows, state

if TYPE_CHECKING:
    from conftest import Shelf

PARTS = "grad/local_square_sum"
numbers = count()


def filled(
    shelf: Shelf, parts: dict[int, dict[int, float]], *, name: str = PARTS, attempt: int = 1, start: int = 1
) -> str:
    """A run whose ranks sent these parts: rank -> step -> value."""
    run = f"sharded{next(numbers)}"
    for rank, samples in parts.items():
        begin = state("starting", start_step=start, rank=rank, world_size=len(parts))
        shelf.append(
            frame(1, begin, rows({name: list(samples.values())}, list(samples)), run=run, rank=rank, attempt=attempt)
        )
    return run


def test_the_norm_is_the_root_of_the_sum_over_ranks(shelf: Shelf) -> None:
    run = filled(shelf, {0: {1: 9.0, 2: 1.0}, 1: {1: 16.0, 2: 3.0}})
    answer = shelf.store.series(run, "grad/norm")
    assert (answer.step, answer.mean, answer.min, answer.max) == ([1, 2], [5.0, 2.0], [5.0, 2.0], [5.0, 2.0])
    assert (answer.count, answer.nonfinite, answer.rank) == ([1, 1], [0, 0], "all")
    latest = shelf.store.latest(run)["grad/norm"]
    assert (latest.value, latest.step, latest.rank) == (2.0, 2, "all")
    assert "grad/norm" in shelf.store.names(run)


def test_it_is_the_same_once_the_parts_lie_in_blocks_and_rollups(shelf: Shelf) -> None:
    random = np.random.default_rng(3)
    steps = range(1, 40_001)
    squares = random.random((2, len(steps))).astype(np.float32)
    run = filled(shelf, {rank: dict(zip(steps, squares[rank].tolist(), strict=True)) for rank in (0, 1)})
    before = [shelf.store.series(run, "grad/norm", points=points) for points in (40_000, 300)]
    shelf.compact()
    after = [shelf.store.series(run, "grad/norm", points=points) for points in (40_000, 300)]
    for one, other in zip(before, after, strict=True):
        assert one.step == other.step
        assert np.allclose(one.mean, other.mean, rtol=1e-12)
    width = after[1].bucket_steps
    assert width is not None
    first = [step for step in steps if step // width == 1]
    norms = np.sqrt(squares.astype(np.float64).sum(axis=0))[[step - 1 for step in first]]
    assert after[1].mean[1] == pytest.approx(math.sqrt((norms**2).mean()))
    assert after[1].min[1] <= norms.min()
    assert after[1].max[1] >= norms.max()


def test_a_step_that_a_rank_did_not_measure_is_left_out(shelf: Shelf) -> None:
    run = filled(shelf, {0: {4: 1.0, 8: 9.0, 12: 1.0}, 1: {8: 16.0}})
    assert shelf.store.series(run, "grad/norm").step == [8]
    latest = shelf.store.latest(run)["grad/norm"]
    assert (latest.value, latest.step) == (5.0, 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_part_that_is_no_number_makes_the_norm_so_whatever_the_others_say(shelf: Shelf, bad: float) -> None:
    run = filled(shelf, {0: {1: 9.0, 2: bad}, 1: {1: 16.0}})
    answer = shelf.store.series(run, "grad/norm")
    assert (answer.step, answer.nonfinite, answer.count) == ([1, 2], [0, 1], [1, 1])
    assert answer.mean[0] == 5.0
    assert math.isnan(answer.mean[1])


@pytest.mark.parametrize("compacted", [False, True], ids=["tail", "blocks"])
@pytest.mark.parametrize(
    ("parts", "newest"),
    [
        ({0: {1: 9.0, 2: math.inf}, 1: {1: 16.0, 2: 1.0}}, math.inf),
        ({0: {1: 9.0, 2: math.inf}, 1: {1: 16.0}}, math.inf),  # one rank is a step ahead
        ({0: {1: 9.0, 2: math.inf}, 1: {1: 16.0, 2: 1.0, 3: 1.0}}, math.inf),
        ({0: {1: 9.0, 2: math.inf}, 1: {1: 16.0, 2: math.nan, 3: 1.0}}, math.nan),
        ({0: {1: 9.0, 2: math.nan}, 1: {1: 16.0}}, math.nan),
    ],
    ids=["all there", "ahead", "behind", "both", "not a number"],
)
def test_an_infinite_part_makes_the_newest_norm_infinite_and_not_nan(
    shelf: Shelf, parts: dict[int, dict[int, float]], newest: float, compacted: bool
) -> None:
    run = filled(shelf, parts)
    if compacted:
        shelf.compact()
    latest = shelf.store.latest(run)["grad/norm"]
    assert latest.step == 2
    assert latest.value == pytest.approx(newest, nan_ok=True)


def test_layers_are_put_together_in_the_same_way(shelf: Shelf) -> None:
    run = filled(shelf, {0: {3: 9.0}, 1: {3: 16.0}}, name="grad_square_sum/blocks.0.weight")
    assert shelf.store.series(run, "grad_norm/blocks.0.weight").mean == [5.0]
    assert shelf.store.latest(run)["grad_norm/blocks.0.weight"].value == 5.0


def test_a_norm_that_a_rank_knows_stands_as_it_is(shelf: Shelf) -> None:
    run = filled(shelf, {0: {1: 4.0}, 1: {1: 5.0}})
    shelf.append(frame(2, rows({"grad/norm": [7.0]}, [1]), run=run))
    assert shelf.store.series(run, "grad/norm").mean == [7.0]
    assert shelf.store.latest(run)["grad/norm"].value == 7.0


def test_one_rank_alone_has_no_norm_but_its_part(shelf: Shelf) -> None:
    run = filled(shelf, {0: {1: 9.0}, 1: {1: 16.0}})
    assert shelf.store.series(run, "grad/norm", rank=0).step == []
    assert shelf.store.series(run, PARTS, rank=0).mean == [9.0]


def test_an_attempt_with_fewer_ranks_is_whole_by_itself(shelf: Shelf) -> None:
    run = filled(shelf, {0: {1: 9.0, 2: 9.0}, 1: {1: 16.0, 2: 16.0}})
    begin = state("starting", start_step=2, rank=0, world_size=1)
    shelf.append(frame(1, begin, rows({PARTS: [4.0]}, [2]), run=run, rank=0, attempt=2))
    assert shelf.store.series(run, "grad/norm").mean == [5.0, 2.0]
    assert shelf.store.latest(run)["grad/norm"].value == 2.0
