"""Checkpoints of the rules: the snapshots of all runs that moved, in pieces, and then the cursors, one for each shard.

A piece is one short job for the writer, so acknowledgements do not wait for it. The cursors move only when every run
that was behind them has been written; until then a restart judges those frames again, and each snapshot says by itself
(`upto`) which of them it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from sqlalchemy import Connection, delete, select

from perfagent_server.engine.evaluator import STATE_VERSION
from perfagent_server.store.shards import SHARDS
from perfagent_server.store.statements import Prepared, put, upsert
from perfagent_server.store.tables import cursor, rule_state
from perfagent_server.store.tables import run as runs

__all__ = ["Checkpoints", "cursor_of", "load_cursors", "save_snapshots"]

RUNS_A_PIECE = 50


_COLUMNS = ("run", "version", "state")
_save = Prepared(lambda dialect: upsert(dialect, rule_state, _COLUMNS), _COLUMNS)


class Checkpoints:
    """verify: raises where shards belong to another server by now. due: when the next checkpoint begins, by the monotonic
    clock. saved: shard -> the tail id that its cursor has reached. took_s: how long the pieces of this one took."""

    def __init__(
        self,
        write: Callable[[Callable[[Connection], None]], None],
        verify: Callable[[Connection, Collection[str]], None],
        *,
        every_s: float,
    ) -> None:
        self._write, self._verify, self._every_s = write, verify, every_s
        self.due = 0.0
        self.saved: dict[str, int] = {}
        self._target: dict[str, int] | None = None
        self._waiting: list[str] = []
        self.took_s = 0.0

    @property
    def is_under_way(self) -> bool:
        return self._target is not None

    def begin(self, dirty: Iterable[str], seen: Mapping[str, int]) -> None:
        """From now on pieces are written, until the cursors are at `seen`."""
        self._waiting, self._target, self.took_s = sorted(dirty), dict(seen), 0.0

    def next_piece(self) -> list[str]:
        return self._waiting[:RUNS_A_PIECE]

    def write_piece(self, snapshots: Mapping[str, bytes]) -> bool:
        """Writes the snapshots of the piece, and the cursors behind the last one; whether the checkpoint is complete. A
        run of which none could be made loses its old one, which knows nothing of the frames behind the cursors."""
        failed = [run for run in self.next_piece() if run not in snapshots]
        rest = self._waiting[RUNS_A_PIECE:]
        target = self._target

        def job(connection: Connection) -> None:
            self._verify(connection, target or ())
            save_snapshots(connection, snapshots)
            if failed:
                connection.execute(delete(rule_state).where(rule_state.c.run.in_(failed)))
            if not rest and target is not None:
                for shard, judged in target.items():
                    if judged != self.saved.get(shard):
                        put(connection, cursor, {"name": cursor_of(shard), "tail_id": judged})

        self._write(job)
        self._waiting = rest
        if rest or target is None:
            return False
        self.saved, self._target = self.saved | target, None
        return True

    def plan_next(self, moment: float) -> None:
        """The next one is due after every_s, or later where writing would take more than five percent of the time."""
        self.due = moment + max(self._every_s, 20 * self.took_s)

    def leave_out(self, run: str) -> None:
        """Its row of state stays as it is."""
        self._waiting = [one for one in self._waiting if one != run]

    def cancel(self) -> None:
        """Gives the checkpoint up that is under way."""
        self._waiting, self._target = [], None

    def forget(self) -> None:
        """Begins anew from what the tables say."""
        self.cancel()
        self.saved = {}


def cursor_of(shard: str) -> str:
    return f"rules/{shard}"


def load_cursors(connection: Connection) -> dict[str, int]:
    """Shard -> the tail id up to which its runs have been judged."""
    rows = connection.execute(select(cursor.c.name, cursor.c.tail_id)).all()
    found = {row.name: row.tail_id for row in rows}
    return {shard: found.get(cursor_of(shard), 0) for shard in SHARDS}


def save_snapshots(connection: Connection, snapshots: Mapping[str, bytes], version: int = STATE_VERSION) -> None:
    """Writes snapshots of the runs that still exist."""
    there: set[str] = set()
    names = list(snapshots)
    for start in range(0, len(names), 500):
        there.update(connection.execute(select(runs.c.id).where(runs.c.id.in_(names[start : start + 500]))).scalars())
    _save.many(connection, [{"run": run, "version": version, "state": snapshots[run]} for run in names if run in there])
