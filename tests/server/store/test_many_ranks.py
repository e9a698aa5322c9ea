"""Questions about many ranks: the same answer as side by side, without holding all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from frames import frame, rows
from sqlalchemy import insert

from perfagent.wire import TIMED_PHASES
from perfagent_server.store.codec.aggregates import Cells, of_samples
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
