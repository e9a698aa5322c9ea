from __future__ import annotations

import math

import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import select

from perfagent.wire import Event
from perfagent.wire.limits import MAX_STEP
from perfagent_server.store import tables
from perfagent_server.store.shards import shard_of
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import Compactor


def loss(seq: int, *steps: int, **more):
    """Frame `seq` whose losses are its steps."""
    return frame(seq, rows({"loss": [float(step) for step in steps]}, steps), **more)


def test_a_frame_is_stored_once_however_often_it_comes(shelf) -> None:
    receipts = shelf.append(loss(1, 1, 2), loss(1, 1, 2))
    assert [(receipt.stored, receipt.duplicate) for receipt in receipts] == [(2, 0), (0, 2)]
    shelf.compact()
    assert shelf.append(loss(1, 1, 2))[0].duplicate == 2  # also after its block was made
    shelf.compact()
    assert shelf.samples() == [(1, 1.0), (2, 2.0)]


def test_bad_names_are_left_out_by_name_and_the_rest_stored(shelf) -> None:
    long = "é" * 129
    names = ["loss", "", long, "a\x00b", "../<b>"]
    (receipt,) = shelf.append(frame(1, rows({name: [1.0, 2.0] for name in names}, [1, 2])))
    assert receipt.stored == 4
    assert {(item.name, item.count) for item in receipt.rejected} == {("", 2), (long, 2), ("a\x00b", 2)}
    assert "258 bytes; 256" in next(item.reason for item in receipt.rejected if item.name == long)
    assert shelf.store.names("r1") == ["../<b>", "loss"]
    shelf.compact()
    assert len(list(shelf.store.samples("r1"))) == 4


@pytest.mark.sql
def test_a_run_has_a_limit_of_names_over_all_its_ranks(database) -> None:
    store = SqlStore(database, max_names=3)

    def append(seq: int, *names: str, rank: int = 0, step: int | None = None, fails: bool = False):
        def job(connection):
            sent = frame(seq, rows({name: [1.0] for name in names}, [step or seq]), rank=rank)
            (receipt,) = store.append_in(connection, [sent], BEGIN)
            return 1 / 0 if fails else receipt

        return database.write(job)

    assert append(1, "a").stored == 1
    with pytest.raises(ZeroDivisionError):
        append(2, "b", "c", "d", fails=True)  # names of a failed transaction count nowhere
    assert append(2, "a", "b").stored == 2
    assert append(1, "a", "b", rank=1).stored == 2  # the same names of another rank are no new names
    receipt = append(2, "c", "d", "e", "a", rank=1)
    assert (receipt.stored, sorted(item.name for item in receipt.rejected)) == (2, ["d", "e"])
    assert append(3, "e", step=500).stored == 0
    assert store.names("r1") == ["a", "b", "c"]
    with database.read() as connection:  # what was refused did not move the run on
        assert connection.execute(select(tables.run.c.step)).scalar_one() == 2


def test_a_step_that_is_none_is_left_out_and_a_time_replaced(shelf) -> None:
    values = {"loss": [1.0, 2.0, 3.0, 4.0]}
    sent = rows(values, [-1, 0, MAX_STEP, MAX_STEP + 1], [BEGIN, math.nan, BEGIN + 5, BEGIN])
    (receipt,) = shelf.append(frame(1, sent), now=BEGIN + 9)
    assert (receipt.stored, [(item.name, item.count) for item in receipt.rejected]) == (2, [("loss", 2)])
    for _ in range(2):
        found = [(row.step, row.value, row.time) for row in shelf.store.samples("r1")]
        assert found == [(0, 2.0, BEGIN + 9), (MAX_STEP, 3.0, BEGIN + 5)]
        shelf.compact()


def test_since_gives_frames_in_order_with_groups_and_events(shelf) -> None:
    """Frames of a few rows and of many, with gaps and without: a row of the tail does not hold all of them alike."""
    many = np.arange(500, 700)
    for seq, steps in enumerate([[3, 4, 5], many, np.delete(many, 50), many[::-1]], 1):
        values = np.array(steps) * 0.1
        event = Event(kind="log", time=BEGIN, data={"lines": [f"{seq}"]})
        shelf.append(frame(seq, rows({"x": values, "y": values.astype("f4")}, steps), event))
        shelf.append(frame(seq, rank=1))  # only a sign of life: nothing to read
        (stored,) = shelf.store.since(seq - 1, 10)
        (group,) = stored.groups
        assert (stored.seq, stored.rank, group.step_list()) == (seq, 0, list(steps))
        x, y = group.numbers([0, 1])
        assert (list(x), list(y)) == (values.tolist(), values.astype("<f4").tolist())
        assert stored.events[0].data == {"lines": [f"{seq}"]}
    found = shelf.store.since(0, 3)
    assert [one.seq for one in found] == [1, 2, 3]
    assert [one.id for one in shelf.store.since(found[0].id, 1)] == [found[1].id]


@pytest.mark.blocks
def test_the_compactor_leaves_what_the_rules_have_not_judged(shelf) -> None:
    ids = [shelf.append(loss(seq, seq))[0].tail_id for seq in (1, 2, 3)]
    patient = Compactor(shelf.database)
    assert patient.run_once(everything=True) == 0
    shelf.execute(tables.cursor.insert().values(name=f"rules/{shard_of('r1')}", tail_id=ids[1]))
    assert patient.run_once(everything=True) == 2
    assert [item.id for item in shelf.store.since(0, 10)] == [ids[2]]
    assert len(shelf.samples()) == 3


@pytest.mark.sql
@pytest.mark.blocks
def test_a_deleted_run_takes_all_of_it_and_nothing_else(shelf) -> None:
    names = [f"m{at}" for at in range(70)]  # so many lie in bundles
    for run in ("r1", "r2"):
        shelf.append(frame(1, state("starting"), rows({"loss": [1.0] * 40}, range(40)), run=run))
        shelf.append(frame(2, rows({name: [1.0] for name in names}, [1]), run=run, rank=1))
        shelf.compact()
        shelf.append(loss(3, 41, run=run))
    shelf.store.delete("r1")
    assert shelf.samples() == shelf.samples(name="m3") == []
    assert len(list(shelf.store.samples("r2"))) == 111
    for table in (tables.bundle, tables.tail, tables.series, tables.source, tables.attempt, tables.event):
        assert set(shelf.ask(select(table.c.run))) == {"r2"}, table.name
    assert [shelf.count(table) for table in (tables.run, tables.block, tables.axis)] == [1, 1, 1]
    assert (shelf.count(tables.last), set(shelf.ask(select(tables.ledger.c.source)))) == (1, {"r2-1-0", "r2-1-1"})
    # ... and an agent that goes on sending makes a run again
    assert shelf.append(loss(4, 42, run="r1"))[0].stored == 1
    shelf.compact()
    assert shelf.samples() == [(42, 42.0)]
