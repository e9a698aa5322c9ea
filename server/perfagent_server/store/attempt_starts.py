"""Keeps the step at which each attempt of a run begins: at and after it, older attempts are cut from view (reading.py).

The agent sends it where it knows it. An attempt without word begins at the lowest step of its rows, and as long as it
has none, nothing of the older ones is cut: a start guessed too low would hide what they have. Rows of samplers do not
count, they come before the first step is done; nor do those of POST /log, which may name any step.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, bindparam, insert, select, update

from perfagent.wire.limits import MAX_STEP, whole
from perfagent_server.store.statements import Prepared
from perfagent_server.store.tables import attempt as attempts
from perfagent_server.store.tables import event

__all__ = ["UNDECIDED", "Starts"]

UNDECIDED = MAX_STEP + 1
"""The start of an attempt that has no rows yet: after every step."""
_MOST = 8192  # attempts whose start stays in memory

_of_attempt = (attempts.c.run == bindparam("_run")) & (attempts.c.attempt == bindparam("_attempt"))
_load = Prepared(select(attempts.c.start_step).where(_of_attempt))
_new = Prepared(insert(attempts), ("run", "attempt", "start_step", "started"))
_set = Prepared(update(attempts).where(_of_attempt).values(start_step=bindparam("start")))
_lower = Prepared(
    update(attempts)
    .where(_of_attempt, attempts.c.start_step > bindparam("start"))
    .values(start_step=bindparam("start"))
)
_states = Prepared(
    select(event.c.data).where(
        event.c.run == bindparam("_run"), event.c.attempt == bindparam("_attempt"), event.c.kind == "state"
    )
)


class Starts:
    """Used inside transactions on the writer thread, so all is forgotten whenever one is undone."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}
        self._told: set[tuple[str, int]] = set()

    def forget(self) -> None:
        self._known.clear()
        self._told.clear()

    def make_room(self) -> None:
        """Between transactions: what a frame says is not in the events before its transaction ends."""
        if len(self._known) >= _MOST:
            self.forget()

    def drop(self, run: str) -> None:
        """After a run was deleted."""
        for key in [key for key in self._known if key[0] == run]:
            del self._known[key]
            self._told.discard(key)

    def exists(self, connection: Connection, run: str, attempt: int) -> bool:
        return self._start(connection, run, attempt) is not None

    def begin(self, connection: Connection, run: str, attempt: int, start: int, now: float) -> None:
        """Creates an attempt."""
        _new.many(connection, [{"run": run, "attempt": attempt, "start_step": start, "started": now}])
        self._known[run, attempt] = start

    def tell(self, connection: Connection, run: str, attempt: int, rank: int, start: int) -> bool:
        """What the agent says; rank 0 has the last word. Answers whether it is taken."""
        if rank != 0 and self._is_told(connection, run, attempt):
            return False
        self._told.add((run, attempt))
        if self._start(connection, run, attempt) != start:
            _set.many(connection, [{"_run": run, "_attempt": attempt, "start": start}])
            self._known[run, attempt] = start
        return True

    def has_row(self, connection: Connection, run: str, attempt: int, step: int) -> None:
        """A row of this step has come: an attempt without word begins here at the latest, in whatever order rows
        come."""
        start = self._start(connection, run, attempt)
        if start is None or step >= start or self._is_told(connection, run, attempt):
            return
        _lower.many(connection, [{"_run": run, "_attempt": attempt, "start": step}])
        self._known[run, attempt] = step

    def _start(self, connection: Connection, run: str, attempt: int) -> int | None:
        start = self._known.get((run, attempt))
        if start is None:
            found = _load.all(connection, {"_run": run, "_attempt": attempt})
            if found:
                start = self._known[run, attempt] = int(found[0][0])
        return start

    def _is_told(self, connection: Connection, run: str, attempt: int) -> bool:
        """Asked only where a row comes below the start, and when a rank begins: another server may have heard it."""
        if (run, attempt) in self._told:
            return True
        events = _states.all(connection, {"_run": run, "_attempt": attempt})
        told = any(whole(msgspec.msgpack.decode(data).get("start_step")) is not None for (data,) in events)
        if told:
            self._told.add((run, attempt))
        return told
