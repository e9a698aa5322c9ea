"""Runs that their processes have left: a training was resumed from a checkpoint after it was attached, and continues the
run of that checkpoint. What it had said before, it says again there.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, select

from perfagent.wire import Frame
from perfagent_server.store.tables import event, source

__all__ = ["is_left", "may_be_left"]


def may_be_left(frame: Frame) -> bool:
    """Whether this frame says that its source has left the run."""
    return any(one.kind == "state" and "continues" in one.data for one in frame.events)


def is_left(connection: Connection, run: str) -> bool:
    """Whether nothing is left in a run: it has no step, and each of its processes has gone on in another run."""
    sources = connection.execute(select(source.c.id, source.c.step).where(source.c.run == run)).all()
    told = connection.execute(
        select(event.c.source, event.c.data).where(event.c.run == run, event.c.kind == "state")
    ).all()
    left = {row.source for row in told if _continues(row.data)}
    return bool(left) and all(row.step == 0 and row.id in left for row in sources)


def _continues(data: Any) -> bool:
    return bool(msgspec.msgpack.decode(data).get("continues"))
