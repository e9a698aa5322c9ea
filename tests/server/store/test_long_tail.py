"""While the compactor is behind, a question reads of the tail what it needs and no more."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import select, update
from statements import statements_of

from perfagent.wire import Latest
from perfagent_server.store import tables

STEPS = 1000
NAMES = [f"m{at}" for at in range(40)]


def steady(number: int) -> object:
    """The number-th group of all names, whose values are that number: the tail keeps them packed."""
    return rows({name: np.full(STEPS, number * 1.0) for name in NAMES}, range(number * STEPS, (number + 1) * STEPS))


def damage_values(shelf, *seqs: int) -> None:
    """Whoever unpacks the values of these frames from now on fails."""
    for found in shelf.ask(select(tables.tail.c.frame).where(tables.tail.c.seq.in_(seqs))):
        version, groups, events = msgspec.msgpack.decode(found)
        assert all(group[7] for group in groups), "the values are packed"
        damaged = version, [[*group[:5], b"damaged", *group[6:]] for group in groups], events
        its = update(tables.tail).where(tables.tail.c.frame == found)
        shelf.execute(its.values(frame=msgspec.msgpack.encode(damaged)))


def test_latest_unpacks_the_newest_group_of_a_kind_only(shelf) -> None:
    shelf.append(*(frame(seq, steady(seq)) for seq in (1, 2, 4, 3)))  # the newest is not the last
    damage_values(shelf, 1, 2, 3)
    assert {(each.value, each.step) for each in shelf.store.latest("r1").values()} == {(4.0, 5 * STEPS - 1)}


def test_latest_keeps_names_that_the_newest_frames_lack(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0], "old": [7.0]}, [1])))
    shelf.compact()
    shelf.append(frame(2, rows({"loss": [2.0], "eval": [8.0]}, [2])))
    shelf.append(*(frame(seq, rows({"loss": [float(seq)]}, [seq])) for seq in range(3, 20)))
    found = {name: (each.value, each.step) for name, each in shelf.store.latest("r1").items()}
    assert found == {"loss": (19.0, 19), "eval": (8.0, 2), "old": (7.0, 1)}


def test_a_question_unpacks_no_group_without_its_name(shelf) -> None:
    shelf.append(frame(1, steady(1)), frame(2, rows({"loss": [3.0]}, [5])))
    damage_values(shelf, 1)
    assert shelf.mean() == [3.0]
    assert shelf.store.ranks("r1", "loss").mean == [[3.0]]
    assert set(shelf.store.newest("r1", ["loss", "other"], steps=10)) == {"loss"}


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
