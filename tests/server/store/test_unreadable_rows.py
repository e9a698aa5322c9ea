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


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_an_unreadable_row_holds_up_no_frame_and_no_question(shelf, broken: bytes) -> None:
    assert broken != GOOD
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="odd"), frame(2, LONG, run="odd"))
    shelf.execute(update(tail).where(tail.c.seq == 2).values(frame=broken))
    for seq in (1, 2):
        shelf.append(frame(seq, rows({"loss": [2.0]}, [seq]), run="after"))
        assert shelf.samples("odd") == [(1, 1.0)]
        assert shelf.mean(run="odd") == [1.0]
        assert shelf.store.latest("odd")["loss"].value == 1.0
        assert shelf.store.newest_of_runs(select(run.c.id), "loss") == {"odd": 1.0, "after": 2.0}
        with suppress(Exception):  # the first try may fail
            shelf.compact()
        shelf.compact()
        assert shelf.ask(select(tail.c.run, tail.c.seq)) == [("odd", 2)]
    assert shelf.mean(run="after") == [2.0, 2.0]
