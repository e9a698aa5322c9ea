"""Deleting a large run holds the writer for a little while many times, and not once for long."""

from __future__ import annotations

import numpy as np
import pytest
from builders import until
from frames import frame, rows
from sqlalchemy import insert

from perfagent_server.store import tables
from perfagent_server.store.write.emptying import empty_run

FRAMES = 2200


def fill(shelf, run: str) -> None:
    """2200 blocks and rows of the tail, and more of all that a run has."""
    steps = range(550 * 1024)
    shelf.append(frame(1, rows({name: np.zeros(len(steps)) for name in "abcd"}, steps), run=run))
    shelf.compact()
    shelf.append(*(frame(seq, rows({"loss": [1.0]}, [seq]), run=run) for seq in range(2, FRAMES + 2)))
    profile = {"run": run, "id": "x", "attempt": 1, "rank": 0, "time": 1.0, "parts": 36, "summary": b""}
    parts = [{"run": run, "profile": "x", "part": part, "data": b"trace"} for part in range(36)]
    shelf.execute(insert(tables.profile).values(**profile))
    shelf.execute(insert(tables.profile_part).values(parts))


@pytest.mark.sql
@pytest.mark.blocks
def test_a_large_run_is_emptied_in_many_jobs_and_others_stay(shelf) -> None:
    fill(shelf, "large")
    shelf.append(frame(1, rows({"loss": [5.0]}, [7]), run="other"))
    until(lambda: shelf.database.waiting == 0)
    counted = (tables.tail, tables.block, tables.profile_part)
    before, held = shelf.database.jobs, [shelf.count(each) for each in counted]
    empty_run(shelf.database, "large")
    until(lambda: shelf.database.jobs >= before + 2 + 2 + 2)
    assert held == [FRAMES + 1, 2200, 36]
    assert [shelf.count(each) for each in counted] == [FRAMES + 1 - 2000, 2200 - 2000, 36 - 2 * 16]
    assert shelf.store.names("large") == ["a", "b", "c", "d", "loss"], "until it is deleted the run is there"
    # it still takes frames, and is compacted
    shelf.append(frame(FRAMES + 2, rows({"loss": [2.0], "new": [3.0]}, [5000]), run="large"))
    shelf.compact()
    assert shelf.compactor.counters["failures"] == 0
    assert (shelf.store.latest("large")["loss"].value, shelf.mean("new", "large")) == (2.0, [3.0])
    shelf.store.delete("large")
    assert shelf.store.names("large") == []
    left = (tables.run, tables.series, tables.block, tables.bundle, tables.axis, tables.tail)
    assert [shelf.count(each) for each in left] == [1, 1, 1, 0, 1, 0]
    assert shelf.mean("loss", "other") == [5.0]
