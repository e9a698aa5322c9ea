"""Questions about many ranks: the same answer as side by side, without holding all of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from frames import frame, rows
from sqlalchemy import insert

from perfagent.wire import TIMED_PHASES
from perfagent_server.store.codec.aggregates import Cells, of_samples
from perfagent_server.store.read import view
from perfagent_server.store.read.ranks import over_ranks
from perfagent_server.store.tables import series


def cells_of(draw: np.random.Generator, steps: int) -> Cells:
    """Of one rank: some steps are missing, and some values are not finite."""
    step = np.flatnonzero(draw.random(steps) < 0.8).astype(np.int64)
    value = draw.standard_normal(len(step))
    value[draw.random(len(step)) < 0.1] = np.nan
    return of_samples(step, step * 0.25, value)


@pytest.mark.parametrize(("name", "combine"), [("loss", np.mean), ("samples_per_s", np.sum), ("step_time_s", np.max)])
def test_ranks_one_by_one_give_what_they_give_side_by_side(name: str, combine: Callable[[np.ndarray], float]) -> None:
    draw = np.random.default_rng(7)
    ranks = [cells_of(draw, 50) for _ in range(9)]
    cells, mean = over_ranks(name, iter(ranks))
    assert cells.step.tolist() == list(range(50))
    for place, step in enumerate(cells.step):
        here = [(rank, int(np.flatnonzero(rank.step == step)[0])) for rank in ranks if step in rank.step]
        finite = np.array([rank.sum[at] for rank, at in here if not rank.nonfinite[at]])
        assert (cells.count[place], cells.nonfinite[place]) == (len(here), len(here) - len(finite))
        ends = (finite.sum(), finite.sum()) if combine is np.sum else (finite.min(), finite.max())
        assert (cells.min[place], cells.max[place]) == pytest.approx(ends)
        assert mean[place] == pytest.approx(combine(finite))


def peak_bytes(ask: Callable[[], object]) -> int:
    ask()  # what is imported and kept at its first use is no part of it
    tracemalloc.start()
    try:
        ask()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_putting_more_ranks_together_takes_no_more_room() -> None:
    def of(ranks: int) -> int:
        draws = np.random.default_rng
        return peak_bytes(lambda: over_ranks("loss", (cells_of(draws(1), 5000) for _ in range(ranks))))

    assert of(64) < 1.2 * of(4)


@pytest.mark.parametrize("name", ["loss", "grad/norm"])
def test_a_series_of_many_ranks_is_read_a_few_at_a_time(shelf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "_CELLS_AT_ONCE", 16 * 256)  # a quarter of what is asked for
    sent = "grad/local_square_sum" if name == "grad/norm" else name
    shelf.append(*(frame(1, rows({sent: np.full(4096, 4.0)}, range(4096)), rank=rank) for rank in range(64)))
    shelf.compact()
    assert shelf.mean(name, points=256) == [4.0 if name == "loss" else np.sqrt(64 * 4.0)] * 256
    side_by_side = 64 * 256 * 7 * 8
    assert peak_bytes(lambda: shelf.mean(name, points=256)) < side_by_side


@pytest.mark.sql
def test_sixteen_series_of_four_thousand_ranks_are_one_question(shelf) -> None:
    """More series than PostgreSQL takes parameters in a statement, and twice what SQLite of python.org does."""
    names = ["step_time_s", "tokens_per_s", "samples_per_s", "flops_per_s", "mfu"]
    names += [f"phase/{one}_s" for one in TIMED_PHASES]
    shelf.append(frame(1, rows({name: [0.25] for name in names}, [1])))
    shelf.compact()
    others = [{"run": "r1", "rank": rank, "name": name} for rank in range(1, 4096) for name in names]
    assert len(others) > 65_500
    shelf.database.write(lambda connection: connection.execute(insert(series), others))
    found = shelf.store.newest("r1", names, steps=100)
    assert {name: one.mean for name, one in found.items()} == {name: [0.25] for name in names}
