"""While the compactor is behind, a question reads of the tail what it needs and no more."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import event, select, update

from perfagent.wire import Latest
from perfagent_server.store import tables

STEPS = 1000
NAMES = [f"m{at}" for at in range(40)]


def steady(value: float, number: int) -> object:
    """The number-th group of all names, whose values repeat: the tail keeps them packed."""
    steps = range(number * STEPS, (number + 1) * STEPS)
    return rows({name: np.full(STEPS, value) for name in NAMES}, steps)


def damage_values(shelf, ids: list[int]) -> None:
    """Whoever unpacks the values of these tail rows from now on fails."""

    def job(connection) -> None:
        for (found,) in connection.execute(select(tables.tail.c.frame).where(tables.tail.c.id.in_(ids))).all():
            version, groups, events = msgspec.msgpack.decode(found)
            assert all(group[7] for group in groups), "the values are packed"
            damaged = [[*group[:5], b"damaged", *group[6:]] for group in groups]
            connection.execute(
                update(tables.tail)
                .where(tables.tail.c.frame == found)
                .values(frame=msgspec.msgpack.encode((version, damaged, events)))
            )

    shelf.database.write(job)


def statements_of(shelf, ask: Callable[[], object]) -> list[tuple[str, object]]:
    """SQL and parameters of what a question asks the database."""
    seen: list[tuple[str, object]] = []

    def note(connection, cursor, statement, parameters, context, executemany) -> None:
        seen.append((statement, parameters))

    event.listen(shelf.database.engine, "before_cursor_execute", note)
    try:
        ask()
    finally:
        event.remove(shelf.database.engine, "before_cursor_execute", note)
    return seen


def test_latest_unpacks_the_newest_group_of_a_kind_and_no_other(shelf) -> None:
    receipts = [shelf.append(frame(seq, steady(seq, seq)))[0] for seq in (1, 2, 4, 3)]  # the newest is not the last
    damage_values(shelf, [receipt.tail_id for receipt in (receipts[0], receipts[1], receipts[3])])
    assert {(each.value, each.step) for each in shelf.store.latest("r1").values()} == {(4.0, 5 * STEPS - 1)}


def test_latest_keeps_names_that_the_newest_frames_lack(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0], "old": [7.0]}, [1])))
    shelf.compact()
    shelf.append(frame(2, rows({"loss": [2.0], "eval": [8.0]}, [2])))
    for seq in range(3, 20):
        shelf.append(frame(seq, rows({"loss": [float(seq)]}, [seq])))
    found = shelf.store.latest("r1")
    assert {name: (each.value, each.step) for name, each in found.items()} == {
        "loss": (19.0, 19),
        "eval": (8.0, 2),
        "old": (7.0, 1),
    }


def test_a_question_unpacks_no_group_without_its_name(shelf) -> None:
    receipt = shelf.append(frame(1, steady(1.0, 1)))[0]
    shelf.append(frame(2, rows({"loss": [3.0]}, [5])))
    damage_values(shelf, [receipt.tail_id])
    assert shelf.store.series("r1", "loss").mean == [3.0]
    assert shelf.store.ranks("r1", "loss").mean == [[3.0]]
    assert set(shelf.store.newest("r1", ["loss", "other"], steps=10)) == {"loss"}


def test_a_series_holds_its_own_column_of_the_tail_and_not_the_others(shelf) -> None:
    for seq in range(1, 101):
        shelf.append(frame(seq, steady(1.0, seq)))
    whole_tail = 100 * STEPS * len(NAMES) * 8
    tracemalloc.start()
    try:
        assert len(shelf.store.series("r1", "m3", points=100).mean) == 99
        assert tracemalloc.get_traced_memory()[1] < whole_tail
    finally:
        tracemalloc.stop()


@pytest.mark.sqlite
def test_the_tail_is_read_in_the_order_of_its_index_and_not_sorted(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [3.0]}, [5])))
    for ask in (lambda: shelf.store.latest("r1"), lambda: shelf.store.series("r1", "loss")):
        [(statement, parameters)] = [each for each in statements_of(shelf, ask) if "tail.frame" in each[0]]
        with shelf.database.read() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
        assert not [step for step in plan if "TEMP B-TREE" in step[3]], plan


def test_values_of_a_rank_that_has_started_again_are_looked_for_all_together(shelf) -> None:
    """Series by series it took more than a minute for 512 ranks of 63 names, until their first step."""
    for seq, steps in enumerate([range(1500), range(1500, 3000), range(3000, 3010)], 1):
        values = {name: np.array(steps) + 0.25 * at for at, name in enumerate(NAMES)}
        shelf.append(frame(seq, rows(values, steps), rows({"single": np.array(steps) * 1.0}, steps)))
        if seq < 3:
            shelf.compact()
    shelf.append(frame(1, state("starting", start_step=2000), attempt=2))

    def newest(step: int) -> dict[str, Latest]:
        values = {name: step + 0.25 * at for at, name in enumerate(NAMES)} | {"single": float(step)}
        return {
            name: Latest(value=value, step=step, time=BEGIN + 0.25 * step, rank=0) for name, value in values.items()
        }

    assert shelf.store.latest("r1") == newest(1999)
    assert len(statements_of(shelf, lambda: shelf.store.latest("r1"))) < 12
    for attempt, start in ((3, 3005), (4, 1000), (5, 700)):
        shelf.append(frame(1, state("starting", start_step=start), attempt=attempt))
        assert shelf.store.latest("r1") == newest(min(1999, start - 1))
