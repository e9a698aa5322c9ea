from __future__ import annotations

import math

import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import func, select
from sqlite_calls import sqlite_calls

from perfagent.wire import Event
from perfagent.wire.limits import MAX_STEP
from perfagent_server.store import tables
from perfagent_server.store.shards import shard_of
from perfagent_server.store.sql import SqlStore


def count(shelf, table) -> int:
    with shelf.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def exported(shelf, run: str = "r1") -> list[tuple[str, int, int, float]]:
    return [(row.name, row.rank, row.step, row.value) for row in shelf.store.samples(run)]


def test_a_frame_is_stored_once_however_often_it_comes(shelf) -> None:
    first = frame(1, rows({"loss": [1.0, 2.0]}, [1, 2]))
    again = frame(1, rows({"loss": [1.0, 2.0]}, [1, 2]))
    receipts = shelf.append(first, again)
    assert [(receipt.stored, receipt.duplicate) for receipt in receipts] == [(2, 0), (0, 2)]
    shelf.compact()
    assert shelf.append(again)[0].duplicate == 2  # also after its block was made
    shelf.compact()
    assert exported(shelf) == [("loss", 0, 1, 1.0), ("loss", 0, 2, 2.0)]


def test_a_job_that_fails_leaves_nothing_behind_and_no_memory_of_it(shelf) -> None:
    def fails(connection):
        shelf.store.append_in(connection, [frame(1, rows({"loss": [1.0]}, [1]))], BEGIN)
        raise RuntimeError("after the append")

    with pytest.raises(RuntimeError, match="after the append"):
        shelf.database.write(fails)
    assert count(shelf, tables.series) == 0
    assert shelf.append(frame(1, rows({"loss": [1.0]}, [1])))[0].stored == 1
    assert exported(shelf) == [("loss", 0, 1, 1.0)]


def test_values_come_back_bit_by_bit_from_the_tail_and_from_blocks(shelf) -> None:
    sent = np.array([math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 2.0**60])
    strange = np.array([0x7FF8_0000_DEAD_BEEF], "u8").view("f8")
    narrow = np.array([0.1, 3e38, -0.0], "f4")
    shelf.append(frame(1, rows({"wide": np.append(sent, strange)}, range(8)), rows({"narrow": narrow}, range(3))))
    for _ in range(2):
        found = exported(shelf)
        wide = np.array([value for name, _, _, value in found if name == "wide"])
        assert wide.view("u8").tolist() == np.append(sent, strange).view("u8").tolist()
        assert (
            np.array([value for name, _, _, value in found if name == "narrow"]).astype("f4").view("u4").tolist()
            == narrow.view("u4").tolist()
        )
        assert math.isnan(shelf.store.latest("r1")["wide"].value)
        shelf.compact()


def test_bad_names_are_left_out_by_name_and_the_rest_is_stored(shelf) -> None:
    long = "é" * 129
    piece = rows(
        {"loss": [1.0, 2.0], "": [1.0, 2.0], long: [1.0, 2.0], "a\x00b": [1.0, 2.0], "../<b>": [1.0, 2.0]}, [1, 2]
    )
    (receipt,) = shelf.append(frame(1, piece))
    assert receipt.stored == 4
    assert {(item.name, item.count) for item in receipt.rejected} == {("", 2), (long, 2), ("a\x00b", 2)}
    assert "258 bytes; 256 are allowed" in next(item.reason for item in receipt.rejected if item.name == long)
    assert shelf.store.names("r1") == ["../<b>", "loss"]
    shelf.compact()
    assert len(exported(shelf)) == 4


def test_a_run_has_a_limit_of_names_over_all_its_ranks(database) -> None:
    store = SqlStore(database, max_names=3)

    def send(seq: int, rank: int, *names: str):
        piece = rows({name: [1.0] for name in names}, [seq])
        return database.write(lambda connection: store.append_in(connection, [frame(seq, piece, rank=rank)], BEGIN))[0]

    assert send(1, 0, "a", "b").stored == 2
    assert send(1, 1, "a", "b").stored == 2  # the same names of another rank are no new names
    receipt = send(2, 1, "c", "d", "e", "a")
    assert (receipt.stored, sorted(item.name for item in receipt.rejected)) == (2, ["d", "e"])
    assert "limit" in receipt.rejected[0].reason
    assert store.names("r1") == ["a", "b", "c"]


def test_rows_whose_step_is_no_step_are_left_out(shelf) -> None:
    (receipt,) = shelf.append(frame(1, rows({"loss": [1.0, 2.0, 3.0]}, [-1, 4, MAX_STEP + 1])))
    assert (receipt.stored, [(item.name, item.count) for item in receipt.rejected]) == (1, [("loss", 2)])
    shelf.compact()
    assert exported(shelf) == [("loss", 0, 4, 2.0)]


def test_a_clock_that_says_nan_is_replaced_by_ours(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0, 2.0]}, [1, 2], [math.nan, BEGIN + 5])), now=BEGIN + 9)
    for _ in range(2):
        assert [row.time for row in shelf.store.samples("r1")] == [BEGIN + 9, BEGIN + 5]
        shelf.compact()


def test_since_gives_frames_in_order_with_groups_and_events(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), Event(kind="log", time=BEGIN, data={"lines": ["hello"]})))
    shelf.append(frame(2, rows({"loss": [2.0]}, [2])), frame(1, rows({"loss": [3.0]}, [1]), rank=1))
    shelf.append(frame(3))  # only a sign of life: nothing to read
    found = shelf.store.since(0, 100)
    assert [(item.seq, item.rank, list(item.groups[0].numbers([0])[0])) for item in found] == [
        (1, 0, [1.0]),
        (2, 0, [2.0]),
        (1, 1, [3.0]),
    ]
    assert found[0].events[0].data == {"lines": ["hello"]}
    assert [item.id for item in shelf.store.since(found[0].id, 1)] == [found[1].id]


@pytest.mark.blocks
def test_the_compactor_leaves_what_the_rules_have_not_judged(shelf) -> None:
    from perfagent_server.store.write.compaction import Compactor

    ids = [shelf.append(frame(seq, rows({"loss": [1.0]}, [seq])))[0].tail_id for seq in (1, 2, 3)]
    patient = Compactor(shelf.database)
    assert patient.run_once(everything=True) == 0
    judged = tables.cursor.insert().values(name=f"rules/{shard_of('r1')}", tail_id=ids[1])
    shelf.database.write(lambda connection: connection.execute(judged))
    assert patient.run_once(everything=True) == 2
    assert [item.id for item in shelf.store.since(0, 10)] == [ids[2]]
    assert len(exported(shelf)) == 3


@pytest.mark.blocks
def test_deleting_a_run_takes_everything_of_it_and_nothing_else(shelf) -> None:
    for run in ("r1", "r2"):
        shelf.append(frame(1, state("starting"), rows({"loss": [1.0] * 40}, range(40)), run=run))
        shelf.compact()
        shelf.append(frame(2, rows({"loss": [1.0]}, [41]), run=run))
    shelf.store.delete("r1")
    assert shelf.store.series("r1", "loss").step == []
    assert len(exported(shelf, "r2")) == 41
    with shelf.database.read() as connection:
        assert connection.execute(select(tables.ledger.c.source).distinct()).scalars().all() == ["r2-1-0"]
        assert connection.execute(select(tables.run.c.id)).scalars().all() == ["r2"]
        for table in (
            tables.block,
            tables.tail,
            tables.series,
            tables.source,
            tables.attempt,
            tables.event,
            tables.last,
        ):
            assert connection.execute(select(func.count()).select_from(table)).scalar_one() >= 1
    assert count(shelf, tables.block) == 1
    # ... and an agent that goes on sending makes a run again
    assert shelf.append(frame(3, rows({"loss": [5.0]}, [42]), run="r1"))[0].stored == 1
    shelf.compact()
    assert exported(shelf, "r1") == [("loss", 0, 42, 5.0)]


def test_a_run_deleted_while_it_is_compacted_does_not_come_back(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0]}, [1])))
    shelf.compactor._look()
    shelf.store.delete("r1")
    assert shelf.compact() == 0
    assert count(shelf, tables.block) == 0


def test_what_readers_behind_the_ack_get_is_what_was_sent(shelf) -> None:
    """Frames of a few rows and of many, with gaps and without: a row of the tail does not hold all of them alike."""
    many = np.arange(500, 700)
    for seq, steps in enumerate([[3, 4, 5], many, np.delete(many, 50), many[::-1]], 1):
        values = np.array(steps) * 0.1
        shelf.append(frame(seq, rows({"x": values, "y": values.astype("f4")}, steps)))
        (stored,) = shelf.store.since(seq - 1, 10)
        (group,) = stored.groups
        assert group.step_list() == list(steps)
        x, y = group.numbers([0, 1])
        assert list(x) == values.tolist()
        assert list(y) == values.astype("<f4").tolist()


@pytest.mark.sqlite
def test_a_name_too_many_costs_one_look_at_the_names_of_the_run(database) -> None:
    store = SqlStore(database, max_names=3)

    def append(seq: int, *names: str):
        piece = rows({name: [1.0] for name in names}, [seq])
        return database.write(lambda connection: store.append_in(connection, [frame(seq, piece)], BEGIN))[0]

    append(1, "a", "b", "c")
    assert append(2, "a", "d").rejected[0].name == "d"
    looks: list[str] = []
    watch = sqlite_calls(database, looks)
    assert [append(seq, "a", "d", f"e{seq}").stored for seq in (3, 4, 5)] == [1, 1, 1]
    watch()
    assert not [call for call in looks if "DISTINCT" in call]


def test_rows_that_were_refused_do_not_move_the_run_on(database) -> None:
    store = SqlStore(database, max_names=1)
    for seq, name, step in ((1, "a", 1), (2, "b", 500)):
        sent = frame(seq, rows({name: [1.0]}, [step]))
        database.write(lambda connection, sent=sent: store.append_in(connection, [sent], BEGIN))
    with database.read() as connection:
        assert connection.execute(select(tables.run.c.step)).scalar_one() == 1


@pytest.mark.sqlite
def test_names_new_to_a_run_cost_one_look_at_those_it_has(database) -> None:
    """With 512 ranks of 1000 names each look took 150 ms of the writer's time."""
    store = SqlStore(database)

    def append(seq: int, *names: str) -> None:
        piece = rows({name: [1.0] for name in names}, [seq])
        database.write(lambda connection: store.append_in(connection, [frame(seq, piece)], BEGIN))

    append(1, "a")
    looks: list[str] = []
    watch = sqlite_calls(database, looks)
    for seq in range(2, 12):
        append(seq, "a", f"b{seq}")
    watch()
    assert len([call for call in looks if "DISTINCT" in call]) <= 1
    assert len(store.names("r1")) == 11


def test_names_that_a_failed_transaction_would_have_made_do_not_count(database) -> None:
    store = SqlStore(database, max_names=2)

    def append(seq: int, *names: str, fail: bool = False) -> int:
        def job(connection) -> int:
            receipt = store.append_in(connection, [frame(seq, rows({name: [1.0] for name in names}, [seq]))], BEGIN)[0]
            if fail:
                raise RuntimeError("after the append")
            return receipt.stored

        return database.write(job)

    append(1, "a")
    with pytest.raises(RuntimeError):
        append(2, "b", fail=True)
    assert append(2, "c") == 1
    assert store.names("r1") == ["a", "c"]
