"""Checkpoints of the rules: the snapshots of all runs that moved, in pieces, and then the cursor.

A piece is one short job for the writer, so acknowledgements do not wait for it. The cursor moves only when every run
that was behind it has been written; until then a restart judges those frames again, and each snapshot says by itself
(`upto`) which of them it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sqlalchemy import Connection, delete, select

from perfagent_server.engine.evaluator import STATE_VERSION
from perfagent_server.store.statements import Prepared, put, upsert
from perfagent_server.store.tables import cursor, rule_state
from perfagent_server.store.tables import run as runs

__all__ = ["CURSOR", "Checkpoints", "load_cursor", "save_snapshots"]

CURSOR = "rules"
RUNS_A_PIECE = 50


_COLUMNS = ("run", "version", "state")
_save = Prepared(lambda dialect: upsert(dialect, rule_state, _COLUMNS), _COLUMNS)


class Checkpoints:
    """due: when the next checkpoint begins, by the monotonic clock. saved: the tail id that the cursor has reached.
    took_s: how long the pieces of this one took."""

    def __init__(self, write: Callable[[Callable[[Connection], None]], None], *, every_s: float) -> None:
        self._write, self._every_s = write, every_s
        self.due = 0.0
        self.saved = 0
        self._target: int | None = None
        self._waiting: list[str] = []
        self.took_s = 0.0

    @property
    def is_under_way(self) -> bool:
        return self._target is not None

    def begin(self, dirty: Iterable[str], seen: int) -> None:
        """From now on pieces are written, until the cursor is at `seen`."""
        self._waiting, self._target, self.took_s = sorted(dirty), seen, 0.0

    def next_piece(self) -> list[str]:
        return self._waiting[:RUNS_A_PIECE]

    def write_piece(self, snapshots: Mapping[str, bytes]) -> bool:
        """Writes the snapshots of the piece, and the cursor behind the last one; whether the checkpoint is complete. A
        run of which none could be made loses its old one, which knows nothing of the frames behind the cursor."""
        failed = [run for run in self.next_piece() if run not in snapshots]
        rest = self._waiting[RUNS_A_PIECE:]
        target = self._target

        def job(connection: Connection) -> None:
            save_snapshots(connection, snapshots)
            if failed:
                connection.execute(delete(rule_state).where(rule_state.c.run.in_(failed)))
            if not rest and target is not None:
                put(connection, cursor, {"name": CURSOR, "tail_id": target})

        self._write(job)
        self._waiting = rest
        if rest or target is None:
            return False
        self.saved, self._target = target, None
        return True

    def plan_next(self, moment: float) -> None:
        """The next one is due after every_s, or later where writing would take more than five percent of the time."""
        self.due = moment + max(self._every_s, 20 * self.took_s)

    def forget(self) -> None:
        """Begins anew from what the tables say."""
        self._waiting, self._target, self.saved = [], None, 0


def load_cursor(connection: Connection) -> int:
    return int(connection.execute(select(cursor.c.tail_id).where(cursor.c.name == CURSOR)).scalar() or 0)


def save_snapshots(connection: Connection, snapshots: Mapping[str, bytes]) -> None:
    """Writes snapshots of the runs that still exist."""
    there: set[str] = set()
    names = list(snapshots)
    for start in range(0, len(names), 500):
        there.update(connection.execute(select(runs.c.id).where(runs.c.id.in_(names[start : start + 500]))).scalars())
    _save.many(
        connection, [{"run": run, "version": STATE_VERSION, "state": snapshots[run]} for run in names if run in there]
    )
