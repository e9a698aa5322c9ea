"""Checkpoints of the rules: the snapshots of all runs that moved, in pieces, and then the cursors, one for each shard.

A piece is one short job for the writer, so acknowledgements do not wait for it. The cursors move only when every run
that was behind them has been written; until then a restart judges those frames again, and each snapshot says by itself
(`upto`) which of them it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from sqlalchemy import Connection, delete, select

from perfagent_server.database import Database
from perfagent_server.engine.evaluator import STATE_VERSION
from perfagent_server.engine.held_shards import HeldShards
from perfagent_server.store.shards import SHARDS
from perfagent_server.store.statements import Prepared, put, upsert
from perfagent_server.store.tables import cursor, rule_state
from perfagent_server.store.tables import run as runs

__all__ = ["Checkpoints", "cursor_of", "load_cursors", "save_snapshots"]

RUNS_A_PIECE = 50
_COLUMNS = ("run", "version", "state")
_save = Prepared(lambda dialect: upsert(dialect, rule_state, _COLUMNS), _COLUMNS)


class Checkpoints:
    """dirty: runs whose snapshot is older than their evaluator. due: when the next checkpoint begins, by the monotonic clock.
    saved: shard -> the tail id that its cursor has reached. count: of complete checkpoints."""

    def __init__(
        self, database: Database, held: HeldShards, snapshots: Callable[[Iterable[str]], dict[str, bytes]],
        monotonic: Callable[[], float], *, every_s: float,
    ) -> None:  # fmt: skip
        self._database, self._held, self._snapshots = database, held, snapshots
        self._monotonic, self._every_s, self._took_s = monotonic, every_s, 0.0
        self.due, self.count = monotonic(), 0
        self.dirty: set[str] = set()
        self.saved: dict[str, int] = {}
        self._target: dict[str, int] | None = None  # where the cursors are to go
        self._waiting: list[str] = []

    @property
    def is_under_way(self) -> bool:
        return self._target is not None

    def piece(self) -> bool:
        """Writes the next piece of the checkpoint that is under way, or the first of one that is due. True when it was the
        last one, and where there was nothing to write."""
        begun = self._monotonic()
        if self._target is None:
            if begun < self.due or not self._held.seen:
                return False
            cursors = {shard: max(judged, self.saved.get(shard, 0)) for shard, judged in self._held.cursors().items()}
            if not self.dirty and cursors.items() <= self.saved.items():
                self._plan_next(begun)
                return True
            self._waiting, self._target, self._took_s = sorted(self.dirty), cursors, 0.0
        names, rest = self._waiting[:RUNS_A_PIECE], self._waiting[RUNS_A_PIECE:]
        self._write(names, {} if rest else self._target)
        self._waiting = rest
        self.dirty.difference_update(names)
        self._took_s += self._monotonic() - begun
        if rest:
            return False
        self.saved, self._target, self.count = self.saved | self._target, None, self.count + 1
        self._plan_next(self._monotonic())
        return True

    def _plan_next(self, moment: float) -> None:
        """The next one is due after every_s, or later where writing would take more than five percent of the time."""
        self.due = moment + max(self._every_s, 20 * self._took_s)

    def _write(self, names: Sequence[str], cursors: Mapping[str, int]) -> None:
        """The snapshots of the piece, and with the last one the cursors. A run of which none could be made loses its old
        one, which knows nothing of the frames behind the cursors."""
        snapshots = self._snapshots(names)
        failed = [run for run in names if run not in snapshots]

        def job(connection: Connection) -> None:
            self._held.verify(connection, self._target or ())
            save_snapshots(connection, snapshots)
            if failed:
                connection.execute(delete(rule_state).where(rule_state.c.run.in_(failed)))
            for shard, judged in cursors.items():
                if judged != self.saved.get(shard):
                    put(connection, cursor, {"name": cursor_of(shard), "tail_id": judged})

        self._database.write(job, essential=True)

    def leave_out(self, run: str) -> None:
        """Its row of state stays as it is."""
        self._waiting = [one for one in self._waiting if one != run]

    def cancel(self) -> None:
        """Gives the checkpoint up that is under way."""
        self._waiting, self._target = [], None

    def forget(self) -> None:
        """Begins anew from what the tables say."""
        self.cancel()
        self.dirty.clear()
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
