from __future__ import annotations

import sqlite3
import tracemalloc

import numpy as np
import pytest
from builders import until
from frames import BEGIN, frame, rows
from sqlalchemy import func, select

from perfagent_server.store import tables
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor

pytestmark = pytest.mark.blocks


def count(shelf, table) -> int:
    with shelf.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def test_a_tail_is_left_alone_until_it_is_worth_the_work(shelf) -> None:
    now = [BEGIN]
    policy = CompactionPolicy(samples=1000, frames=5, age_s=30)
    lazy = Compactor(shelf.database, rules_enabled=False, policy=policy, clock=lambda: now[0])
    shelf.append(frame(1, rows({"loss": [1.0]}, [1])), now=BEGIN)
    assert lazy.run_once() == 0
    now[0] += 31
    assert lazy.run_once() == 1  # by age
    shelf.append(frame(2, rows({"loss": [1.0] * 1024}, range(1024, 2048))), now=now[0])
    assert lazy.run_once() == 1  # by samples
    for seq in range(3, 8):
        shelf.append(frame(seq, rows({"loss": [1.0]}, [seq * 1024 - 1])), now=now[0])
    assert lazy.run_once() == 5  # by frames


def test_what_belongs_to_the_newest_block_waits_until_that_is_full_or_old(shelf) -> None:
    now = [BEGIN]
    policy = CompactionPolicy(samples=1000, age_s=30)
    lazy = Compactor(shelf.database, rules_enabled=False, policy=policy, clock=lambda: now[0])
    for seq, steps in enumerate([range(1000), range(1000, 1500), range(1500, 2100)], 1):
        shelf.append(frame(seq, rows({"loss": np.array(steps) * 1.0}, steps)), now=now[0])
    assert lazy.run_once() == 2  # the last one reaches into a block that is not full
    shelf.append(frame(4, rows({"loss": [7.0]}, [3])), now=now[0])  # late, for a block that is there
    assert lazy.run_once() == 0
    shelf.append(frame(5, rows({"loss": np.arange(2100.0, 3072.0)}, range(2100, 3072))), now=now[0])
    assert lazy.run_once() == 0  # a thousand more than had to wait
    shelf.append(frame(6, rows({"loss": np.arange(3072.0, 4096.0)}, range(3072, 4096))), now=now[0])
    assert lazy.run_once() == 4
    assert (count(shelf, tables.block), count(shelf, tables.tail), lazy.counters["blocks"]) == (4, 0, 6)
    shelf.append(frame(7, rows({"loss": [4096.0]}, [4096])), now=now[0])
    now[0] += 31
    assert lazy.run_once() == 1
    assert [row.value for row in shelf.store.samples("r1")] == [0.0, 1.0, 2.0, 3.0, 7.0, *np.arange(4.0, 4097.0)]


def test_more_rows_than_are_read_at_once_are_compacted_though_no_block_is_whole(shelf) -> None:
    policy = CompactionPolicy(samples=10, rows_at_once=4, age_s=1e9)
    lazy = Compactor(shelf.database, rules_enabled=False, policy=policy, clock=lambda: BEGIN)
    for seq in range(1, 11):
        shelf.append(frame(seq, rows({"loss": [float(seq)]}, [seq])), now=BEGIN)
    assert lazy.run_once() == 8
    assert count(shelf, tables.tail) == 2
    assert shelf.store.series("r1", "loss").mean == [float(seq) for seq in range(1, 11)]


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


@pytest.mark.parametrize("everything", [True, False])
def test_a_rank_with_large_frames_is_compacted_a_few_frames_at_a_time(shelf, everything: bool) -> None:
    """After an outage frames of 2 MB come one after the other: two hundred of them together took 1.5 GB."""
    names = [f"m{at}" for at in range(20)]
    for seq in range(1, 31):
        steps = range((seq - 1) * 1000, seq * 1000)
        shelf.append(frame(seq, rows({name: np.full(1000, float(seq)) for name in names}, steps)))
    before = [shelf.store.series("r1", name, points=20_000) for name in names]
    frame_bytes = 8 * 1000 * len(names)
    policy = CompactionPolicy(bytes_at_once=2 * frame_bytes)
    small = Compactor(shelf.database, rules_enabled=False, policy=policy, clock=lambda: BEGIN)
    tracemalloc.start()
    try:
        small.run_once(everything=everything)
        assert tracemalloc.get_traced_memory()[1] < 30 * frame_bytes
    finally:
        tracemalloc.stop()
    assert (small.counters["failures"], count(shelf, tables.tail)) == (0, 0 if everything else 1)
    assert [shelf.store.series("r1", name, points=20_000) for name in names] == before


def test_a_frame_larger_than_what_is_read_at_once_is_compacted_all_the_same(shelf) -> None:
    tiny = Compactor(shelf.database, rules_enabled=False, policy=CompactionPolicy(bytes_at_once=1))
    for seq in (1, 2, 3):
        shelf.append(frame(seq, rows({"loss": [float(seq)]}, [seq])))
    assert tiny.run_once(everything=True) == 3
    assert shelf.store.series("r1", "loss").mean == [1.0, 2.0, 3.0]


@pytest.mark.sqlite
def test_ranks_whose_turn_a_failed_write_cut_short_are_looked_at_again(shelf) -> None:
    """The next ranks are packed while the writer writes; when that fails, theirs is not lost sight of either."""
    for rank in range(4):
        shelf.append(frame(1, rows({"loss": [rank + 0.0]}, [1]), rank=rank))
    refuse = "CREATE TRIGGER refuse BEFORE INSERT ON block BEGIN SELECT RAISE(ABORT, 'refused by the test'); END"
    shelf.database.write(lambda connection: connection.exec_driver_sql(refuse))
    eager = Compactor(shelf.database, rules_enabled=False, policy=CompactionPolicy(samples=1, samples_at_once=1))
    with pytest.raises(sqlite3.IntegrityError, match="refused by the test"):
        eager.run_once(everything=True)
    assert (count(shelf, tables.tail), count(shelf, tables.block)) == (4, 0)
    shelf.database.write(lambda connection: connection.exec_driver_sql("DROP TRIGGER refuse"))
    assert eager.run_once(everything=True) == 4
    assert (count(shelf, tables.tail), eager.counters["samples"]) == (0, 4)
    assert [row.value for row in shelf.store.samples("r1")] == [0.0, 1.0, 2.0, 3.0]


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


def test_frames_of_any_lengths_and_widths_become_one_series_each(shelf) -> None:
    """Frames in a row with as many rows each are taken at once, by column type; others one after the other."""
    rng = np.random.default_rng(4)
    names = [f"m{at}" for at in range(7)]
    sent: dict[str, list[float]] = {name: [] for name in names}
    first = 0
    for seq, length in enumerate([16, 16, 16, 5, 5, 1, 70, 8, 16, 8], 1):
        narrow = rng.integers(0, 2, len(names)).astype(bool)
        narrow[0], narrow[1] = True, False  # one that always fits float32, one that never does
        piece = {}
        for name, small in zip(names, narrow, strict=True):
            piece[name] = rng.standard_normal(length).astype("f4" if small else "f8")
            sent[name] += piece[name].astype("f8").tolist()
        shelf.append(frame(seq, rows(piece, range(first, first + length))))
        first += length
    shelf.compact()
    found = {name: [row.value for row in shelf.store.samples("r1") if row.name == name] for name in names}
    assert found == sent
    with shelf.database.read() as connection:
        columns = (tables.series.c.name, tables.block.c.payload)
        widths = {
            row.name: row.payload[1]
            for row in connection.execute(
                select(*columns).join(tables.block, tables.block.c.series == tables.series.c.id)
            )
        }
    assert (widths["m0"], widths["m1"]) == (4, 8)


def test_an_open_block_is_rewritten_seldom(shelf) -> None:
    """A rank that sends 40 series four times a second: how often a block is written for the 1024 samples that it
    holds."""
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


@pytest.mark.parametrize(
    "steps", [range(10_240), range(1000, 9000), [*range(3000), *range(3100, 7000)], [*range(5000), *range(4000, 6000)]]
)
def test_blocks_that_are_made_at_once_hold_what_was_sent(shelf, steps) -> None:
    steps = np.array(steps)
    rng = np.random.default_rng(1)
    narrow, wide = rng.standard_normal(len(steps)).astype("f4"), rng.standard_normal(len(steps))
    narrow[[5, 2000]] = np.nan, np.inf
    wide[1024:2048] = np.nan  # a whole block without a finite value
    times = BEGIN + np.arange(len(steps)) * 0.25
    shelf.append(frame(1, rows({"narrow": narrow, "other": narrow + 1, "wide": wide}, steps, times)))
    shelf.compact()
    order = np.lexsort((times, steps))
    for name, sent in {"narrow": narrow, "other": narrow + 1, "wide": wide}.items():
        kept = [row for row in shelf.store.samples("r1") if row.name == name]
        assert [row.step for row in kept] == steps[order].tolist()
        assert [row.time for row in kept] == times[order].tolist()
        assert np.array_equal([row.value for row in kept], sent[order].astype("f8"), equal_nan=True)
    with shelf.database.read() as connection:
        held = connection.execute(select(tables.block.c.samples, tables.block.c.nonfinite, tables.block.c.min)).all()
    assert sum(row.samples for row in held) == 3 * len(steps)
    assert all((row.min is None) == (row.nonfinite == row.samples) for row in held)


def test_series_that_are_rolled_up_together_keep_their_own_values(shelf) -> None:
    """Groups that close in different jobs, pieces that come late, a series that begins late: level by level what numpy
    gives."""
    steps = np.arange(70_000)
    rng = np.random.default_rng(2)
    sent = {name: rng.standard_normal(len(steps)) for name in "abc"}
    sent["b"][33_000:33_300] = np.nan
    for rank in range(2):
        for seq, (first, last) in enumerate([(0, 20_000), (20_000, 70_000)], 1):
            names = sent if seq == 2 else {name: sent[name] for name in "ab"}
            piece = {name: values[first:last] + rank for name, values in names.items()}
            shelf.append(frame(seq, rows(piece, steps[first:last], steps[first:last]), rank=rank))
            shelf.compact()
        shelf.append(frame(3, rows({"a": [1e6]}, [100], [100.5]), rank=rank))
        shelf.compact()
    for rank in range(2):
        for name, values in sent.items():
            for points in (300, 20):  # from cells of 256 and of 4096 steps
                answer = shelf.store.series("r1", name, rank=rank, points=points)
                start = 20_000 if name == "c" else 0
                for at, bucket in enumerate(answer.step):
                    low = bucket // answer.bucket_steps * answer.bucket_steps
                    inside = values[max(low, start) : low + answer.bucket_steps] + rank
                    if name == "a" and low <= 100 < low + answer.bucket_steps:
                        inside = np.append(inside, 1e6)
                    finite = inside[np.isfinite(inside)]
                    assert answer.count[at] == len(inside)
                    assert answer.nonfinite[at] == len(inside) - len(finite)
                    if len(finite):
                        assert (answer.min[at], answer.max[at]) == (finite.min(), finite.max())
                        assert np.isclose(answer.mean[at], finite.mean())
                assert sum(answer.count) == len(steps) - start + (name == "a")
    with shelf.database.read() as connection:
        assert {level for (level,) in connection.execute(select(tables.rollup.c.level))} == {256, 4096}
