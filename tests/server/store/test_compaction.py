from __future__ import annotations

import numpy as np
import pytest
from builders import until
from frames import frame, rows, state
from sqlalchemy import select

from perfagent_server.store import tables

pytestmark = pytest.mark.blocks


def send(shelf, seq: int, steps, **more) -> None:
    """Losses that are their steps."""
    shelf.append(frame(seq, rows({"loss": np.array(steps) * 1.0}, steps), **more))


def held(shelf) -> tuple[int, int]:
    """How many blocks there are, and rows of the tail."""
    return shelf.count(tables.block), shelf.count(tables.tail)


def test_a_tail_is_left_alone_until_it_is_worth_the_work(shelf) -> None:
    lazy = shelf.compactor_of(samples=1000, frames=5, age_s=30)
    send(shelf, 1, [1])
    shelf.now += 29.9
    assert lazy.run_once() == 0
    shelf.now += 0.1
    assert lazy.run_once() == 1  # by age
    send(shelf, 2, range(1024, 2023))
    assert lazy.run_once() == 0
    send(shelf, 3, [2047])
    assert lazy.run_once() == 2  # by samples
    for seq in range(4, 9):
        assert lazy.run_once() == 0
        send(shelf, seq, [seq * 1024 - 1])
    assert lazy.run_once() == 5  # by frames


def test_what_reaches_into_the_newest_block_waits(shelf) -> None:
    lazy = shelf.compactor_of(samples=1000, age_s=30)
    for seq, steps in enumerate([range(1000), range(1000, 1500), range(1500, 2100)], 1):
        send(shelf, seq, steps)
    assert lazy.run_once() == 2  # the last one reaches into a block that is not full
    shelf.append(frame(4, rows({"loss": [7.0]}, [3])))  # late, for a block that is there
    assert lazy.run_once() == 0
    send(shelf, 5, range(2100, 3072))
    assert lazy.run_once() == 0  # a thousand more than had to wait
    send(shelf, 6, range(3072, 4096))
    assert lazy.run_once() == 4
    assert (held(shelf), lazy.counters["blocks"]) == ((4, 0), 6)
    send(shelf, 7, [4096])
    shelf.now += 31
    assert lazy.run_once() == 1
    assert [value for _, value in shelf.samples()] == [0.0, 1.0, 2.0, 3.0, 7.0, *np.arange(4.0, 4097.0)]


def test_the_thread_compacts_and_trims_by_itself_and_stops(shelf) -> None:
    quick = shelf.compactor_of(age_s=0, pause_s=0.01)
    send(shelf, 1, [1])
    shelf.append(frame(2, state("finished")))
    quick.start()
    until(lambda: shelf.count(tables.tail) == shelf.count(tables.ledger) == 0)
    quick.stop()
    assert (shelf.mean(), quick.counters["failures"]) == ([1.0], 0)


@pytest.mark.sql
def test_series_of_a_group_share_an_axis_and_old_axes_go(shelf) -> None:
    groups = [("abcd", [1, 2]), ("abcd", [3, 4]), ("a", [5]), ("b", [6]), ("c", [6]), ("d", [6])]
    axes = []
    for seq, (names, steps) in enumerate(groups, 1):
        shelf.append(frame(seq, rows({name: np.array(steps) * 1.0 for name in names}, steps)))
        if seq < 4 or seq == 6:
            shelf.compact()
            axes.append((shelf.count(tables.block), shelf.count(tables.axis)))
    assert axes[:3] == [(4, 1), (4, 1), (4, 2)]
    assert set(shelf.ask(select(tables.block.c.axis))) == set(shelf.ask(select(tables.axis.c.key)))
    assert [shelf.mean(name) for name in "ab"] == [[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 6.0]]
