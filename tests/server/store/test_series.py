"""Whatever lies where (tail, blocks, rollups), an answer is the one that numpy gives over the visible samples."""

from __future__ import annotations

import math
import time
from itertools import count, pairwise

import numpy as np
import pytest
from case_selection import everyday
from frames import BEGIN, frame, rows, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.wire import Series, metric

numbers = count()
values = st.one_of(
    st.floats(-1e6, 1e6, width=32),
    st.floats(-1e6, 1e6),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e300, 5e-324]),
)


def brute(
    samples: list[tuple[int, float]], first: int, last: int, width: int
) -> dict[int, tuple[float, float, float, int, int]]:
    """bucket -> min, max, mean, count, nonfinite, by the definition."""
    buckets: dict[int, list[float]] = {}
    for step, value in samples:
        if first <= step <= last:
            buckets.setdefault(step // width, []).append(value)
    found = {}
    for bucket, inside in buckets.items():
        finite = [value for value in inside if math.isfinite(value)]
        found[bucket] = (
            min(finite, default=math.nan),
            max(finite, default=math.nan),
            math.fsum(finite) / len(finite) if finite else math.nan,
            len(inside),
            len(inside) - len(finite),
        )
    return found


def check(answer: Series, samples: list[tuple[int, float]], first: int, last: int, points: int) -> None:
    visible = [item for item in samples if first <= item[0] <= last]
    assert len(answer.step) <= points
    if answer.exact:
        assert len(visible) <= points
        assert answer.step == sorted(step for step, _ in visible)
        assert sum(answer.count) == len(visible)
        for step, value in visible:
            if math.isfinite(value):
                assert any(at == step and low == value for at, low in zip(answer.step, answer.min, strict=True))
        return
    assert len(visible) > points
    expected = brute(samples, first, last, answer.bucket_steps)
    assert [step // answer.bucket_steps for step in answer.step] == sorted(expected)
    for at, bucket in enumerate(sorted(expected)):
        low, high, mean, count, nonfinite = expected[bucket]
        assert (answer.count[at], answer.nonfinite[at]) == (count, nonfinite)
        assert answer.min[at] == low or (math.isnan(low) and math.isnan(answer.min[at]))
        assert answer.max[at] == high or (math.isnan(high) and math.isnan(answer.max[at]))
        scale = max(abs(low), abs(high)) if nonfinite < count else 0.0
        assert answer.mean[at] == pytest.approx(mean, rel=1e-9, abs=1e-9 * scale, nan_ok=True)


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int, list[tuple[int, float]]]]:
    """Pieces of a run in the order in which they arrive: ("frame", attempt, samples) and ("compact", 0, [])."""
    reach = draw(st.sampled_from([60, 3000, 40_000]))
    story: list[tuple[str, int, list[tuple[int, float]]]] = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, reach))
        gap = draw(st.sampled_from([0, 1, 1, 3, 40]))
        length = draw(st.integers(1, 60))
        steps = [start + gap * at for at in range(length)]
        if draw(st.booleans()):
            steps = draw(st.permutations(steps))
        chosen = draw(st.lists(values, min_size=length, max_size=length))
        story.append(("frame", draw(st.sampled_from([1, 1, 1, 2])), list(zip(steps, chosen, strict=True))))
        if draw(st.booleans()):
            story.append(("compact", 0, []))
    return story


@pytest.mark.parametrize("examples", [25, pytest.param(100, marks=pytest.mark.long)])
def test_any_story_of_pieces_gives_the_answer_of_the_definition(shelf, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        story=stories(),
        resume=st.integers(0, 3000),
        bounds=st.tuples(st.integers(0, 45_000), st.integers(0, 45_000)),
        points=st.sampled_from([1, 7, 50]),
    )
    def holds(story: list, resume: int, bounds: tuple[int, int], points: int) -> None:
        gives_the_answer_of_the_definition(shelf, story, resume, bounds, points)

    holds()


def gives_the_answer_of_the_definition(shelf, story: list, resume: int, bounds: tuple[int, int], points: int) -> None:
    run = f"run{next(numbers)}"  # one database serves all examples, each has a run of its own
    shelf.append(frame(1, state("starting", start_step=0), run=run, attempt=1))
    shelf.append(frame(1, state("starting", start_step=resume), run=run, attempt=2))
    kept: list[tuple[int, int, float]] = []
    for at, (kind, attempt, samples) in enumerate(story):
        if kind == "compact":
            shelf.compact()
            continue
        piece = rows(
            {"x": [value for _, value in samples]},
            [step for step, _ in samples],
            [BEGIN + at + 0.001 * row for row in range(len(samples))],
        )
        shelf.append(frame(at + 2, piece, run=run, attempt=attempt))
        kept += [(attempt, step, value) for step, value in samples]
    visible = [(step, value) for attempt, step, value in kept if attempt == 2 or step < resume]
    whole = shelf.store.series(run, "x", points=points)
    if visible:
        check(whole, visible, min(step for step, _ in visible), max(step for step, _ in visible), points)
    else:
        assert whole.step == []
    first, last = sorted(bounds)
    part = shelf.store.series(run, "x", rank=0, from_step=first, to_step=last, points=points)
    check(part, visible, first, last, points)
    exported = [(row.step, row.value) for row in shelf.store.samples(run)]
    assert [step for step, _ in exported] == sorted(step for step, _ in visible)
    assert sorted(np.array([value for _, value in exported]).view("u8").tolist()) == sorted(
        np.array([value for _, value in visible]).view("u8").tolist()
    )


def fill(shelf, steps: int, *, seed: int = 3) -> np.ndarray:
    """A long series by way of a few large frames, compacted."""
    found = np.random.default_rng(seed).standard_normal(steps)
    for seq, start in enumerate(range(0, steps, 65_536), 1):
        piece = found[start : start + 65_536]
        shelf.append(frame(seq, rows({"loss": piece}, np.arange(start, start + len(piece)))))
    shelf.compact()
    return found


def test_a_single_spike_in_a_million_points_is_in_the_thousand_buckets(shelf) -> None:
    steps = 1_000_000
    wave = np.sin(np.arange(steps) / 1000).astype("f4").astype("f8")
    wave[654_321] = 1e6
    for seq, start in enumerate(range(0, steps, 65_536), 1):
        piece = wave[start : start + 65_536]
        shelf.append(frame(seq, rows({"loss": piece}, np.arange(start, start + len(piece)))))
    shelf.compact()
    begin = time.perf_counter()
    answer = shelf.store.series("r1", "loss", points=1000)
    print(
        f"\n1000 buckets of 1,000,000 points: {(time.perf_counter() - begin) * 1e3:.1f} ms, {len(answer.step)} buckets"
    )
    assert len(answer.step) <= 1000
    assert not answer.exact
    assert max(answer.max) == 1e6
    at = answer.max.index(1e6)
    assert answer.step[at] <= 654_321 < answer.step[at] + answer.bucket_steps
    assert sum(answer.count) == steps
    # ... and at every zoom, down to the step itself
    width = steps
    while width >= 1:
        first = max(0, 654_321 - width // 2)
        near = shelf.store.series("r1", "loss", from_step=first, to_step=first + width - 1, points=1000)
        assert max(near.max) == 1e6
        width //= 3
    assert near.exact
    assert near.step == [654_321]


@pytest.mark.parametrize("points", everyday(2, [3, 200, 40, 900]))
def test_rollups_blocks_cells_and_tail_give_one_answer(shelf, points: int) -> None:
    steps = 300_000
    found = fill(shelf, steps)
    late = rows({"loss": [7e9, math.nan]}, [1_234, 77_777])
    tail = rows({"loss": np.arange(5.0)}, [steps, steps + 1, steps + 2, 5, 6])
    shelf.append(frame(90, late))
    shelf.compact()
    shelf.append(frame(91, tail))
    samples = [*enumerate(found.tolist()), (1_234, 7e9), (77_777, math.nan)]
    samples += list(zip([steps, steps + 1, steps + 2, 5, 6], np.arange(5.0).tolist(), strict=True))
    for first, last in ((0, steps + 2), (17, steps - 3), (70_001, 270_000), (4096, 8191)):
        check(
            shelf.store.series("r1", "loss", from_step=first, to_step=last, points=points), samples, first, last, points
        )


def test_ranks_are_put_together_as_the_catalogue_says(shelf) -> None:
    names = ["loss", "samples_per_s", "step_time_s", "amp/scale"]
    for rank in range(3):
        shelf.append(
            frame(1, rows({name: [rank + 1.0 + 10 * at for at in range(4)] for name in names}, [1, 2, 3, 4]), rank=rank)
        )
    for _ in range(2):
        means = {name: shelf.store.series("r1", name).mean for name in names}
        assert [metric(name).over_ranks for name in names] == ["mean", "sum", "max", "min"]
        assert means["loss"] == [2, 12, 22, 32]
        assert means["samples_per_s"] == [6, 36, 66, 96]
        assert means["step_time_s"] == [3, 13, 23, 33]
        assert means["amp/scale"] == [1, 11, 21, 31]
        loss = shelf.store.series("r1", "loss")
        assert (loss.min, loss.max, loss.count, loss.exact) == ([1, 11, 21, 31], [3, 13, 23, 33], [3] * 4, False)
        latest = shelf.store.latest("r1")
        assert (latest["samples_per_s"].value, latest["samples_per_s"].rank, latest["loss"].step) == (96, "all", 4)
        assert shelf.store.series("r1", "loss", rank=1).mean == [2, 12, 22, 32]
        matrix = shelf.store.ranks("r1", "loss", points=2)
        assert (matrix.ranks, matrix.step) == ([0, 1, 2], [1, 4]) or len(matrix.step) <= 2
        shelf.compact()


def test_a_rank_that_is_silent_for_a_while_leaves_a_gap_in_the_matrix(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0, 2.0]}, [1, 2]), rank=0), frame(1, rows({"loss": [5.0]}, [2]), rank=1))
    matrix = shelf.store.ranks("r1", "loss")
    assert matrix.step == [1, 2]
    assert matrix.mean[0] == [1.0, 2.0]
    assert math.isnan(matrix.mean[1][0])
    assert matrix.mean[1][1] == 5.0


def test_several_samples_in_one_step_stay_several_and_in_order_of_time(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [3.0, 1.0, 2.0]}, [7, 7, 7], [BEGIN + 3, BEGIN + 1, BEGIN + 2])))
    for _ in range(2):
        answer = shelf.store.series("r1", "loss")
        assert (answer.exact, answer.step, answer.mean) == (True, [7, 7, 7], [1.0, 2.0, 3.0])
        shelf.compact()


def test_what_a_later_attempt_starts_again_is_cut_from_every_answer(shelf) -> None:
    shelf.append(
        frame(
            1,
            state("starting", start_step=0),
            rows({"loss": [1.0] * 10, "eval": [9.0] * 10}, range(1, 11)),
            attempt=100,
        )
    )
    shelf.append(frame(1, state("starting", start_step=6), rows({"loss": [2.0] * 3}, [6, 7, 8]), attempt=200))
    for _ in range(2):
        answer = shelf.store.series("r1", "loss")
        assert list(zip(answer.step, answer.mean, strict=True)) == [(at, 1.0) for at in range(1, 6)] + [
            (at, 2.0) for at in (6, 7, 8)
        ]
        assert shelf.store.series("r1", "eval").step == [1, 2, 3, 4, 5]
        assert (shelf.store.latest("r1")["loss"].step, shelf.store.latest("r1")["eval"].step) == (8, 5)
        assert [row.step for row in shelf.store.samples("r1") if row.name == "loss"] == list(range(1, 9))
        shelf.compact()
    shelf.append(frame(1, state("starting", start_step=3), attempt=300))
    assert shelf.store.series("r1", "loss").step == [1, 2]
    assert shelf.store.latest("r1")["loss"].step == 2


def test_an_unknown_run_or_name_is_an_empty_answer(shelf) -> None:
    assert shelf.store.series("nobody", "loss").step == []
    assert shelf.store.ranks("nobody", "loss").mean == []
    assert shelf.store.latest("nobody") == {}
    assert list(shelf.store.samples("nobody")) == []


def test_buckets_are_powers_of_two_and_begin_in_order(shelf) -> None:
    fill(shelf, 5000)
    for points in (1, 10, 333, 1000):
        answer = shelf.store.series("r1", "loss", points=points)
        assert len(answer.step) <= points
        assert answer.bucket_steps & (answer.bucket_steps - 1) == 0
        assert all(before < after for before, after in pairwise(answer.step))
        assert answer.time == sorted(answer.time)
