"""Newest values: of all names, of many ranks, with few statements."""

from __future__ import annotations

import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from statements import statements_of

from perfagent.wire import Latest

NAMES = [f"m{at}" for at in range(40)]


def test_latest_keeps_names_that_the_newest_frames_lack(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0], "old": [7.0]}, [1])))
    shelf.compact()
    shelf.append(frame(2, rows({"loss": [2.0], "eval": [8.0]}, [2])))
    shelf.append(*(frame(seq, rows({"loss": [float(seq)]}, [seq])) for seq in range(3, 20)))
    found = {name: (each.value, each.step) for name, each in shelf.store.latest("r1").items()}
    assert found == {"loss": (19.0, 19), "eval": (8.0, 2), "old": (7.0, 1)}


@pytest.mark.sql
def test_newest_values_after_a_new_start_are_one_question(shelf) -> None:
    """Series by series it took more than a minute for 512 ranks of 63 names, until their first step."""

    def values(step):
        return {name: step + 0.25 * at for at, name in enumerate(NAMES)}

    for seq, steps in enumerate([range(1500), range(1500, 3000), range(3000, 3010)], 1):
        single = rows({"single": np.array(steps) * 1.0}, steps)
        shelf.append(frame(seq, rows(values(np.array(steps)), steps), single))
        if seq < 3:
            shelf.compact()

    def newest(step: int) -> dict[str, Latest]:
        of = {**values(step), "single": step * 1.0}
        return {name: Latest(value=one, step=step, time=BEGIN + 0.25 * step, rank=0) for name, one in of.items()}

    last = 3009
    for attempt, start in ((2, 2000), (3, 3005), (4, 1000), (5, 700)):
        shelf.append(frame(1, state("starting", start_step=start), attempt=attempt))
        last = min(last, start - 1)
        assert shelf.store.latest("r1") == newest(last)
        assert len(statements_of(shelf.database.engine, lambda: shelf.store.latest("r1"))) < 16
