"""Old samples and old runs go, in short jobs, and nothing that has become young meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import func, select, update

from perfagent_server.store import tables

DAY_S = 24 * 3600.0


def say_hello(shelf, run: str = "alive") -> None:
    """A run is heard of, so that the clock is believed."""
    shelf.append(frame(int(shelf.now - BEGIN) + 1, run=run))


def thin(shelf, days: float = 40, keep_days: float = 30) -> dict[str, int]:
    """What retention counts when it looks after so many days."""
    shelf.now = BEGIN + days * DAY_S
    say_hello(shelf)
    retention = shelf.retention(samples_days=keep_days)
    retention.run_once()
    return retention.counters


@pytest.mark.sql
@pytest.mark.blocks
def test_old_blocks_lose_their_samples_and_charts_stay_exact(shelf) -> None:
    shelf.append(frame(1, rows({"loss": np.random.default_rng(1).standard_normal(5000)}, range(5000))))
    shelf.compact()
    before = shelf.store.series("r1", "loss", points=200)
    assert (thin(shelf, 40, keep_days=41)["blocks_thinned"], len(shelf.samples())) == (0, 5000), "they are young"
    thin(shelf, 40.1)
    assert shelf.ask(select(func.count(tables.block.c.payload))) == [0]
    assert shelf.store.series("r1", "loss", points=200) == before
    near = shelf.store.series("r1", "loss", from_step=100, to_step=131, points=1000)
    assert (near.exact, near.count) == (False, [16, 16, 16])  # cells of 16 steps are what is left
    assert shelf.samples() == []
    shelf.append(frame(2, rows({"loss": [99.0]}, [120])))  # a late piece still counts
    shelf.compact()
    after = shelf.store.series("r1", "loss", points=200)
    assert (max(after.max), sum(after.count)) == (99.0, 5001)


@pytest.mark.sql
def test_runs_over_age_are_deleted_whole(shelf) -> None:
    shelf.append(frame(1, state("finished"), rows({"loss": [1.0]}, [1]), run="ended"))
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="silent"))
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="over age"), now=BEGIN + 30 * DAY_S - 1)
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="under age"), now=BEGIN + 30 * DAY_S + 1)
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="new"), now=BEGIN + 50 * DAY_S)
    shelf.now = BEGIN + 60 * DAY_S
    retention = shelf.retention(runs_days=30)
    retention.run_once()
    assert (retention.counters["runs_deleted"], shelf.runs()) == (3, ["new", "under age"])
    assert shelf.store.names("new") == ["loss"]


@pytest.mark.sql
@pytest.mark.blocks
@pytest.mark.parametrize("how", ["tagged", "reached by new samples"])
def test_what_must_stay_by_now_keeps_its_samples(shelf, how: str) -> None:
    """After retention has looked, and before it thins."""
    shelf.append(frame(1, rows({"loss": [1.0] * 1500}, range(1500))))
    shelf.compact()
    shelf.now = BEGIN + 40 * DAY_S
    say_hello(shelf)

    def happens() -> None:
        if how == "tagged":
            shelf.execute(update(tables.run).where(tables.run.c.id == "r1").values(tags='["keep"]'))
        else:
            shelf.append(frame(2, rows({"loss": [2.0]}, [1501], [shelf.now])))
            shelf.compact()

    retention = shelf.retention(samples_days=30)
    with shelf.before_job(happens, number=2):  # the first notes that the clock is trusted
        retention.run_once()
    assert retention.counters["blocks_thinned"] == (0 if how == "tagged" else 1)
    left = [*range(1500)] if how == "tagged" else [*range(1024, 1500), 1501]
    assert [step for step, _ in shelf.samples()] == left
