from __future__ import annotations

import numpy as np
from builders import until
from frames import BEGIN, frame, rows
from sqlalchemy import func, select

from perfagent_server.store import tables
from perfagent_server.store.compaction import CompactionPolicy, Compactor


def count(shelf, table) -> int:
    with shelf.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def test_a_tail_is_left_alone_until_it_is_worth_the_work(shelf) -> None:
    now = [BEGIN]
    policy = CompactionPolicy(samples=100, frames=5, age_s=30)
    lazy = Compactor(shelf.database, rules_enabled=False, policy=policy, clock=lambda: now[0])
    shelf.append(frame(1, rows({"loss": [1.0]}, [1])), now=BEGIN)
    assert lazy.run_once() == 0
    now[0] += 31
    assert lazy.run_once() == 1  # by age
    shelf.append(frame(2, rows({"loss": [1.0] * 100}, range(100))), now=now[0])
    assert lazy.run_once() == 1  # by samples
    for seq in range(3, 8):
        shelf.append(frame(seq, rows({"loss": [1.0]}, [seq])), now=now[0])
    assert lazy.run_once() == 5  # by frames


def test_ranks_that_are_due_together_share_one_commit(shelf) -> None:
    for rank in range(8):
        shelf.append(frame(1, rows({"loss": [1.0, 2.0]}, [1, 2]), rank=rank))
    before = shelf.database.commits
    assert shelf.compact() == 8
    until(lambda: shelf.database.commits == before + 1)
    assert shelf.store.series("r1", "loss").count == [8, 8]


def test_more_rows_than_one_job_takes_are_all_compacted(shelf) -> None:
    small = Compactor(shelf.database, rules_enabled=False, policy=CompactionPolicy(rows_at_once=3))
    for seq in range(1, 11):
        shelf.append(frame(seq, rows({"loss": [float(seq)]}, [seq])))
    assert small.run_once(everything=True) == 10
    assert shelf.store.series("r1", "loss").mean == [float(seq) for seq in range(1, 11)]
    assert count(shelf, tables.block) == 1


def test_series_of_one_group_share_an_axis_and_old_axes_are_dropped(shelf) -> None:
    names = {name: [1.0, 2.0] for name in "abcd"}
    shelf.append(frame(1, rows(names, [1, 2])))
    shelf.compact()
    assert (count(shelf, tables.block), count(shelf, tables.axis)) == (4, 1)
    shelf.append(frame(2, rows(names, [3, 4])))
    shelf.compact()
    assert (count(shelf, tables.block), count(shelf, tables.axis)) == (4, 1)
    shelf.append(frame(3, rows({"a": [9.0]}, [5])))  # one of them goes its own way
    shelf.compact()
    assert (count(shelf, tables.block), count(shelf, tables.axis)) == (4, 2)
    assert shelf.store.series("r1", "a").mean == [1.0, 2.0, 1.0, 2.0, 9.0]
    assert shelf.store.series("r1", "b").mean == [1.0, 2.0, 1.0, 2.0]
    for name in "bcd":
        shelf.append(frame({"b": 4, "c": 5, "d": 6}[name], rows({name: [8.0]}, [6])))
    shelf.compact()
    with shelf.database.read() as connection:
        used = set(connection.execute(select(tables.block.c.axis)).scalars())
        assert used == set(connection.execute(select(tables.axis.c.key)).scalars())


def test_float32_and_float64_pieces_of_one_series_are_one_series(shelf) -> None:
    shelf.append(frame(1, rows({"x": np.array([0.5, 1.5], "f4"), "y": [1.0, 1.0]}, [1, 2])))
    shelf.append(frame(2, rows({"x": np.array([0.1, 0.2]), "y": [1.0, 1.0]}, [3, 4])))
    for _ in range(2):
        assert [row.value for row in shelf.store.samples("r1") if row.name == "x"] == [0.5, 1.5, 0.1, 0.2]
        shelf.compact()


def test_an_open_block_is_rewritten_seldom(shelf) -> None:
    """A rank that sends 40 series four times a second: how often a block is written for the 1024 samples that it holds."""
    now = [BEGIN]
    compactor = Compactor(shelf.database, rules_enabled=False, clock=lambda: now[0])
    names = [f"m{at}" for at in range(40)]
    for second in range(1, 1025):
        now[0] = BEGIN + second
        step = [4 * second + at for at in range(4)]
        shelf.append(frame(second, rows(dict.fromkeys(names, [1.0] * 4), step)), now=now[0])
        compactor.run_once()
    compactor.run_once(everything=True)
    written, ideal = compactor.counters["blocks"], 40 * 5
    print(f"\n{written} blocks written for {ideal} that are there: {written / ideal:.1f} times")
    assert written / ideal < 15


def test_the_thread_compacts_by_itself_and_stops(shelf) -> None:
    quick = Compactor(
        shelf.database, rules_enabled=False, policy=CompactionPolicy(age_s=0, pause_s=0.01), clock=lambda: BEGIN + 1
    )
    quick.start()
    shelf.append(frame(1, rows({"loss": [1.0]}, [1])))
    until(lambda: count(shelf, tables.tail) == 0)
    quick.stop()
    assert shelf.store.series("r1", "loss").mean == [1.0]
    assert quick.counters["failures"] == 0


def test_the_ledger_is_trimmed_along_the_way(shelf) -> None:
    for start in range(1, 1101, 100):
        shelf.append(*(frame(seq, rows({"loss": [1.0]}, [seq])) for seq in range(start, start + 100)))
        shelf.compact()
    assert count(shelf, tables.ledger) <= 100
    assert shelf.append(frame(5, rows({"loss": [1.0]}, [5])))[0].duplicate == 1
