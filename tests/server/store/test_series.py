"""What is asked of series: charts at every zoom, ranks together, attempts that begin again."""

from __future__ import annotations

import numpy as np
import pytest
from frames import frame, rows

from perfagent.wire import metric


def test_a_single_spike_in_a_million_points_is_in_its_bucket(shelf) -> None:
    steps, spike = 1_000_000, 654_321
    wave = np.sin(np.arange(steps) / 1000).astype("f4").astype("f8")
    wave[spike] = 1e6
    for seq, start in enumerate(range(0, steps, 65_536), 1):
        piece = wave[start : start + 65_536]
        shelf.append(frame(seq, rows({"loss": piece}, np.arange(start, start + len(piece)))))
        shelf.compact()  # groups close in different jobs
    answer = shelf.store.series("r1", "loss", points=1000)
    width = answer.bucket_steps
    at = answer.max.index(1e6)
    assert answer.step[at] <= spike < answer.step[at] + width
    assert (len(answer.step) <= 1000, answer.exact, sum(answer.count)) == (True, False, steps)
    means = [wave[first : first + width].mean() for first in range(0, steps, width)]
    assert (answer.mean, answer.min[0]) == (pytest.approx(means), wave[:width].min())
    zoom = steps
    while zoom >= 1:  # ... and at every zoom, down to the step itself
        first = max(0, spike - zoom // 2)
        near = shelf.store.series("r1", "loss", from_step=first, to_step=first + zoom - 1, points=1000)
        assert (max(near.max), sum(near.count)) == (1e6, min(steps - first, zoom))
        zoom //= 3
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


def test_an_unknown_run_or_name_is_an_empty_answer(shelf) -> None:
    assert shelf.mean(run="nobody") == shelf.store.ranks("nobody", "loss").mean == shelf.samples("nobody") == []
    assert shelf.store.latest("nobody") == {}
