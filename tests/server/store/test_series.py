"""Whatever lies where (tail, blocks, rollups), an answer is the one that numpy gives over the visible samples."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from frames import BEGIN, frame, rows, state

from perfagent.wire import Series, metric


def check(answer: Series, step: np.ndarray, value: np.ndarray, first: int, last: int, points: int) -> None:
    """The answer to a question for the steps first..last, against the definition. steps in order."""
    inside = (step >= first) & (step <= last)
    step, value = step[inside], value[inside]
    assert len(answer.step) <= points
    assert answer.exact == (len(step) <= points)
    width = answer.bucket_steps
    assert width & (width - 1) == 0
    assert all(before < after for before, after in pairwise(answer.step)) or answer.exact
    assert answer.time == sorted(answer.time)
    places = step // width
    assert [at // width for at in answer.step] == (step.tolist() if answer.exact else np.unique(places).tolist())
    if answer.exact:
        assert np.array_equal(answer.mean, value, equal_nan=True)
        return
    for at, bucket in enumerate(np.unique(places)):
        its = value[places == bucket]
        finite = its[np.isfinite(its)]
        assert (answer.count[at], answer.nonfinite[at]) == (len(its), len(its) - len(finite))
        if len(finite):
            assert (answer.min[at], answer.max[at]) == (finite.min(), finite.max())
            assert answer.mean[at] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * np.abs(finite).max())
        else:
            assert math.isnan(answer.min[at]) and math.isnan(answer.max[at]) and math.isnan(answer.mean[at])


def test_rollups_blocks_cells_and_tail_give_one_answer(shelf) -> None:
    """Groups that close in different jobs, pieces that come late, a series that begins late and one with a gap of NaN."""
    steps = 150_000
    draw = np.random.default_rng(3)
    sent = {name: draw.standard_normal(steps) for name in ("loss", "late", "gap")}
    sent["gap"][33_000:33_300] = np.nan
    for seq, (start, end) in enumerate([(0, 20_000), (20_000, 70_000), (70_000, 131_072), (131_072, steps)], 1):
        piece = {name: values[start:end] for name, values in sent.items() if seq > 1 or name != "late"}
        shelf.append(frame(seq, rows(piece, np.arange(start, end))))
        shelf.compact()
    more = {"loss": [(1_234, 7e9), (77_777, math.nan)], "late": [], "gap": [(5, 1.0), (steps, 2.0), (steps + 2, 3.0)]}
    for seq, (name, pieces) in enumerate(more.items(), 8):
        shelf.append(frame(seq, rows({name: [value for _, value in pieces]}, [step for step, _ in pieces])))
        if name == "loss":
            shelf.compact()  # the others stay in the tail
    for name, values in sent.items():
        begins = 20_000 if name == "late" else 0
        whole = [*zip(range(begins, steps), values[begins:], strict=True), *more[name]]
        whole.sort(key=lambda item: item[0])
        step, value = np.array([item[0] for item in whole]), np.array([item[1] for item in whole])
        for points in (3, 20, 300):
            for first, last in ((0, steps + 2), (17, steps - 3), (70_001, 120_000), (4096, 8191), (1_230, 1_240)):
                how = {"from_step": first, "to_step": last, "points": points}
                check(shelf.store.series("r1", name, **how), step, value, first, last, points)


def test_a_single_spike_in_a_million_points_is_in_its_bucket(shelf) -> None:
    steps, spike = 1_000_000, 654_321
    wave = np.sin(np.arange(steps) / 1000).astype("f4").astype("f8")
    wave[spike] = 1e6
    for seq, start in enumerate(range(0, steps, 65_536), 1):
        piece = wave[start : start + 65_536]
        shelf.append(frame(seq, rows({"loss": piece}, np.arange(start, start + len(piece)))))
    shelf.compact()
    answer = shelf.store.series("r1", "loss", points=1000)
    at = answer.max.index(1e6)
    assert answer.step[at] <= spike < answer.step[at] + answer.bucket_steps
    assert (len(answer.step) <= 1000, answer.exact, sum(answer.count)) == (True, False, steps)
    width = steps
    while width >= 1:  # ... and at every zoom, down to the step itself
        first = max(0, spike - width // 2)
        near = shelf.store.series("r1", "loss", from_step=first, to_step=first + width - 1, points=1000)
        assert max(near.max) == 1e6
        width //= 3
    assert (near.exact, near.step) == (True, [spike])


@pytest.mark.sql
def test_ranks_are_put_together_as_the_catalogue_says(shelf) -> None:
    expected = {
        "loss": ("mean", [2, 12, 22, 32]), "samples_per_s": ("sum", [6, 36, 66, 96]),
        "step_time_s": ("max", [3, 13, 23, 33]), "amp/scale": ("min", [1, 11, 21, 31]),
    }  # fmt: skip
    for rank in range(3):
        values = {name: [rank + 1.0 + 10 * at for at in range(4)] for name in expected}
        shelf.append(frame(1, rows(values, [1, 2, 3, 4]), rank=rank))
    shelf.append(frame(1, rows({"silent": [1.0, 2.0]}, [1, 2]), rank=4))
    shelf.append(frame(1, rows({"silent": [5.0]}, [2]), rank=5))
    for _ in range(2):
        assert {name: (metric(name).over_ranks, shelf.mean(name)) for name in expected} == expected
        loss = shelf.store.series("r1", "loss")
        assert (loss.min, loss.max, loss.count, loss.exact) == ([1, 11, 21, 31], [3, 13, 23, 33], [3] * 4, False)
        latest = shelf.store.latest("r1")
        assert (latest["samples_per_s"].value, latest["samples_per_s"].rank, latest["loss"].step) == (96, "all", 4)
        assert shelf.mean(rank=1) == [2, 12, 22, 32]
        matrix = shelf.store.ranks("r1", "loss", points=2)
        assert (matrix.ranks, len(matrix.step)) == ([0, 1, 2], 2)
        gap = shelf.store.ranks("r1", "silent")
        assert (gap.step, repr(gap.mean)) == ([1, 2], "[[1.0, 2.0], [nan, 5.0]]")
        shelf.compact()


def test_several_samples_in_a_step_stay_in_order_of_time(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [3.0, 1.0, 2.0]}, [7, 7, 7], [BEGIN + 3, BEGIN + 1, BEGIN + 2])))
    for _ in range(2):
        answer = shelf.store.series("r1", "loss")
        assert (answer.exact, answer.step, answer.mean) == (True, [7, 7, 7], [1.0, 2.0, 3.0])
        shelf.compact()


@pytest.mark.sql
def test_what_a_later_attempt_starts_again_is_cut_everywhere(shelf) -> None:
    first = rows({"loss": [1.0] * 10, "eval": [9.0] * 10}, range(1, 11))
    shelf.append(frame(1, state("starting", start_step=0), first, attempt=100))
    shelf.append(frame(1, state("starting", start_step=6), rows({"loss": [2.0] * 3}, [6, 7, 8]), attempt=200))
    for _ in range(2):
        answer = shelf.store.series("r1", "loss")
        assert (answer.step, answer.mean) == (list(range(1, 9)), [1.0] * 5 + [2.0] * 3)
        assert shelf.store.series("r1", "eval").step == [1, 2, 3, 4, 5]
        assert (shelf.store.latest("r1")["loss"].step, shelf.store.latest("r1")["eval"].step) == (8, 5)
        assert [step for step, _ in shelf.samples()] == list(range(1, 9))
        shelf.compact()
    shelf.append(frame(1, state("starting", start_step=3), attempt=300))
    assert shelf.store.series("r1", "loss").step == [1, 2]
    assert shelf.store.latest("r1")["loss"].step == 2


def test_an_unknown_run_or_name_is_an_empty_answer(shelf) -> None:
    assert shelf.mean(run="nobody") == shelf.store.ranks("nobody", "loss").mean == shelf.samples("nobody") == []
    assert shelf.store.latest("nobody") == {}
