"""Deleting a large run holds the writer for a little while many times, and not once for long."""

from __future__ import annotations

import numpy as np
import pytest
from builders import until
from frames import frame, rows
from sqlalchemy import func, insert, select

from perfagent_server.store import tables
from perfagent_server.store.write.emptying import empty_run

FRAMES = 2200


def count(shelf, table) -> int:
    with shelf.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def fill(shelf, run: str) -> None:
    """2200 blocks and rows of the tail, and more of all that a run has."""
    steps = range(550 * 1024)
    shelf.append(frame(1, rows({name: np.zeros(len(steps)) for name in "abcd"}, steps), run=run))
    shelf.compact()
    shelf.append(*(frame(seq, rows({"loss": [1.0]}, [seq]), run=run) for seq in range(2, FRAMES + 2)))
    profile = {"run": run, "id": "x", "attempt": 1, "rank": 0, "time": 1.0, "parts": 36, "summary": b""}
    parts = [{"run": run, "profile": "x", "part": part, "data": b"trace"} for part in range(36)]

    def job(connection) -> None:
        connection.execute(insert(tables.profile).values(**profile))
        connection.execute(insert(tables.profile_part), parts)

    shelf.database.write(job)


@pytest.mark.blocks
def test_a_large_run_is_emptied_in_many_short_jobs_and_others_stay(shelf) -> None:
    fill(shelf, "large")
    shelf.append(frame(1, rows({"loss": [5.0]}, [7]), run="other"))
    until(lambda: shelf.database.waiting == 0)
    before, tail_rows, block_rows = shelf.database.jobs, count(shelf, tables.tail), count(shelf, tables.block)
    empty_run(shelf.database, "large")
    until(lambda: shelf.database.jobs >= before + 2 + 2 + 2)
    assert (tail_rows, count(shelf, tables.tail)) == (FRAMES + 1, FRAMES + 1 - 2 * 1000)
    assert (block_rows, count(shelf, tables.block)) == (2200, 2200 - 2 * 1000)
    assert count(shelf, tables.profile_part) == 36 - 2 * 16
    assert shelf.store.names("large") == ["a", "b", "c", "d", "loss"], "until it is deleted the run is there"
    shelf.store.delete("large")
    assert shelf.store.names("large") == []
    assert [count(shelf, each) for each in (tables.run, tables.series, tables.block, tables.axis)] == [1, 1, 0, 0]
    assert shelf.store.series("other", "loss").mean == [5.0]


def test_a_small_run_is_deleted_in_one_job(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0]}, [1])))
    before = shelf.database.jobs
    shelf.store.delete("r1")
    until(lambda: shelf.database.jobs == before + 1)
    assert count(shelf, tables.run) == 0


def test_a_run_that_is_being_emptied_still_takes_frames_and_is_compacted(shelf) -> None:
    fill(shelf, "r1")
    empty_run(shelf.database, "r1")
    shelf.append(frame(FRAMES + 2, rows({"loss": [2.0], "new": [3.0]}, [5000]), run="r1"))
    shelf.compact()
    assert shelf.compactor.counters["failures"] == 0
    assert shelf.store.latest("r1")["loss"].value == 2.0
    assert shelf.store.series("r1", "new").mean == [3.0]
    shelf.store.delete("r1")
    assert count(shelf, tables.block) == count(shelf, tables.bundle) == count(shelf, tables.tail) == 0
