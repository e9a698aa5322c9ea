"""Questions about many ranks: the same answer as side by side, without holding all of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from frames import frame, rows, state
from sqlalchemy import insert

from perfagent.wire import TIMED_PHASES
from perfagent_server.store.codec.aggregates import Cells, of_samples
from perfagent_server.store.read import view
from perfagent_server.store.read.ranks import over_ranks
from perfagent_server.store.tables import series
from perfagent_server.store.write import lifecycle


def cells_of(draw: np.random.Generator, steps: int) -> Cells:
    """Of one rank: some steps are missing, and some values are not finite."""
    step = np.flatnonzero(draw.random(steps) < 0.8).astype(np.int64)
    value = draw.standard_normal(len(step))
    value[draw.random(len(step)) < 0.1] = np.nan
    return of_samples(step, step * 0.25, value)


@pytest.mark.parametrize(
    ("name", "combine"),
    [
        ("loss", lambda values: np.mean(values)),
        ("samples_per_s", np.sum),
        ("step_time_s", np.max),
    ],
)
def test_ranks_one_after_the_other_give_what_they_give_side_by_side(
    name: str, combine: Callable[[np.ndarray], float]
) -> None:
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


def test_putting_ranks_together_takes_no_more_room_for_more_ranks() -> None:
    def many(ranks: int) -> Iterator[Cells]:
        for _ in range(ranks):
            yield cells_of(np.random.default_rng(1), 5000)

    assert peak_bytes(lambda: over_ranks("loss", many(64))) < 1.2 * peak_bytes(lambda: over_ranks("loss", many(4)))


@pytest.mark.parametrize("name", ["loss", "grad/norm"])
def test_a_series_of_many_ranks_is_read_a_few_ranks_at_a_time(
    shelf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_CELLS_AT_ONCE", 32 * 256)  # a quarter of what is asked for
    sent = "grad/local_square_sum" if name == "grad/norm" else name
    steps = range(4096)
    for rank in range(128):
        shelf.append(frame(1, rows({sent: np.full(4096, 4.0)}, steps), rank=rank))
    shelf.compact()
    answer = shelf.store.series("r1", name, points=256)
    assert answer.mean == [4.0 if name == "loss" else np.sqrt(128 * 4.0)] * 256
    side_by_side = 128 * 256 * 7 * 8
    assert peak_bytes(lambda: shelf.store.series("r1", name, points=256)) < side_by_side


NAMES = (
    "step_time_s",
    "tokens_per_s",
    "samples_per_s",
    "flops_per_s",
    "mfu",
    *(f"phase/{one}_s" for one in TIMED_PHASES),
)
RANKS = 4096


def test_sixteen_series_of_four_thousand_ranks_are_one_question(shelf) -> None:
    """More series than PostgreSQL takes parameters in a statement, and twice what SQLite of python.org does."""
    shelf.append(frame(1, rows({name: [0.25] for name in NAMES}, [1])))
    shelf.compact()
    others = [{"run": "r1", "rank": rank, "name": name} for rank in range(1, RANKS) for name in NAMES]
    assert len(others) > 65_500
    shelf.database.write(lambda connection: connection.execute(insert(series), others))
    found = shelf.store.newest("r1", NAMES, steps=100)
    assert {name: one.mean for name, one in found.items()} == {name: [0.25] for name in NAMES}


def test_thousands_of_silent_ranks_are_called_lost_together(shelf) -> None:
    sent = [frame(1, state("running"), rank=rank) for rank in range(100)]
    shelf.append(*sent)
    silent = [one.source for one in sent] + [f"gone-{number}" for number in range(70_000)]
    changed = shelf.database.write(lambda connection: lifecycle.mark_lost(connection, silent))
    assert changed == ["r1"]
