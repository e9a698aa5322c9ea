"""A row of the tail that cannot be read stays there, and holds up no other."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from frames import frame, rows
from sqlalchemy import select, update

from perfagent_server.store.codec.tail import pack_tail
from perfagent_server.store.tables import run, tail

LONG = rows({"loss": np.sin(np.arange(2048.0)), "lr": np.zeros(2048)}, range(2048))  # its values are stored packed
GOOD = pack_tail([LONG], [])
BROKEN = {
    "no msgpack": b"\xc1\xc1",
    "a newer format": b"\x93\x7f" + GOOD[2:],
    "values that zstd cannot unpack": GOOD.replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfe"),
    "the end is gone": GOOD[:-100],
}


def waiting(shelf) -> list[str]:
    with shelf.database.read() as connection:
        return list(connection.scalars(select(tail.c.run).order_by(tail.c.id)))


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_row_that_cannot_be_read_holds_up_no_other_frame(shelf, broken: bytes) -> None:
    assert broken != GOOD
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="before"))
    shelf.append(frame(1, LONG, run="odd"))
    shelf.database.write(lambda one: one.execute(update(tail).where(tail.c.run == "odd").values(frame=broken)))
    for seq in (1, 2):
        shelf.append(frame(seq, rows({"loss": [2.0]}, [seq]), run="after"))
        with suppress(Exception):  # the first try may fail
            shelf.compact()
        shelf.compact()
        assert waiting(shelf) == ["odd"]
    assert shelf.store.series("after", "loss").mean == [2.0, 2.0]


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_questions_pass_over_a_row_that_cannot_be_read(shelf, broken: bytes) -> None:
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="odd"))
    shelf.append(frame(2, LONG, run="odd"))
    shelf.append(frame(1, rows({"loss": [2.0]}, [1]), run="other"))
    its = (tail.c.run == "odd") & (tail.c.seq == 2)
    shelf.database.write(lambda one: one.execute(update(tail).where(its).values(frame=broken)))
    assert shelf.store.series("odd", "loss").mean == [1.0]
    assert shelf.store.latest("odd")["loss"].value == 1.0
    assert shelf.store.newest_of_runs(select(run.c.id), "loss") == {"odd": 1.0, "other": 2.0}
    assert [row.value for row in shelf.store.samples("odd")] == [1.0]


def test_a_row_that_cannot_be_read_makes_no_other_frame_due(shelf) -> None:
    """Frames go in few large batches, whatever the age of a row that stays."""
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="odd"), now=0.0)
    shelf.database.write(lambda one: one.execute(update(tail).values(frame=b"\xc1")))
    with suppress(Exception):
        shelf.compact()
    shelf.compact()
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="new"), now=shelf.compactor._clock())
    assert shelf.compactor.run_once() == 0
    assert waiting(shelf) == ["odd", "new"]
