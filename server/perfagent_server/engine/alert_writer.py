"""Writes what a round of the rules has caused: alerts, their deliveries and the snapshots of the runs concerned, in one
transaction. Where a table does not take one of them, each is written by itself, so that it costs no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import Connection

from perfagent.wire import Alert
from perfagent_server.alerts import tables
from perfagent_server.alerts.state_machine import Change
from perfagent_server.database import Database
from perfagent_server.database.errors import is_of_the_run
from perfagent_server.engine.checkpoints import save_snapshots
from perfagent_server.engine.held_shards import HeldShards
from perfagent_server.store.changes import note_change
from perfagent_server.store.shards import LeaseLost, shard_of
from perfagent_server.store.statements import insert_for
from perfagent_server.store.tables import run as runs

__all__ = ["AlertWriter", "Changes"]

Changes = Sequence[tuple[str, Change]]
"""Of runs, in order."""
Job = Callable[[Connection], object]
_MOST_UNWRITTEN = 3
"""Where alerts of so many runs in a row could not be written, it is no fault of a run."""


class AlertWriter:
    """snapshots: of these runs. forget: called where the evaluators have moved on from what the tables say. on_failure: with
    a run, what could not be written, and the error. on_written: after each transaction, with the changes, the runs whose
    snapshots it wrote, the alerts as they are now, and how many deliveries there were. clock: Unix seconds."""

    def __init__(
        self, database: Database, held: HeldShards, clock: Callable[[], float], link: Callable[[str], str], *,
        snapshots: Callable[[Iterable[str]], dict[str, bytes]], forget: Callable[[], None],
        on_failure: Callable[[str, str, Exception], None],
        on_written: Callable[[Changes, Iterable[str], Sequence[Alert], int], None],
    ) -> None:  # fmt: skip
        self._database, self._held, self._clock, self._link = database, held, clock, link
        self._snapshots, self._forget = snapshots, forget
        self._on_failure, self._on_written = on_failure, on_written
        self._unwritten: set[str] = set()  # runs whose alerts could not be written, since one could

    def commit(self, changes: Changes, also: Job | None = None) -> None:
        """In transactions of some runs each, which let ingest write in between; `also` goes with the last one."""
        *first, last = tables.in_jobs(changes)
        for part in first:
            self._commit_part(part, None)
        self._commit_part(last, also)

    @property
    def trouble(self) -> str:
        """Why no alert is written, as far as alerts of several runs show it. Of no lock, for any thread."""
        count = len(self._unwritten)
        return f"no alert of the last {count} runs could be written" if count >= _MOST_UNWRITTEN else ""

    def rehearse(self, run: str, changes: Sequence[Change]) -> int:
        """Writes alerts of a run that there is not, and rolls all of it back; how many were written."""
        now = self._clock()

        def job(connection: Connection) -> int:
            undone = connection.begin_nested()
            try:
                about = {"id": run, "project": "", "name": run, "state": "running", "started": now, "updated": now}
                connection.execute(insert_for(connection.dialect.name)(runs).values(**about).on_conflict_do_nothing())
                return len(tables.apply(connection, [(run, change) for change in changes], now, self._link)[0])
            finally:
                undone.rollback()

        return self._database.write(job, essential=True)

    def _commit_part(self, changes: Changes, also: Job | None) -> None:
        """Changes of runs whose shard was lost are left to the server that has it."""
        try:
            self._commit_whole(changes, also)
        except LeaseLost:
            lost = self._held.lost()
            rest = [(run, change) for run, change in changes if shard_of(run) not in lost]
            if also is not None or len(rest) == len(changes):
                self._forget()
                raise
            if rest:
                self._commit_part(rest, None)
        except BaseException:
            self._forget()
            raise

    def _commit_whole(self, changes: Changes, also: Job | None) -> None:
        names = {run for run, _ in changes}
        snapshots = self._snapshots(sorted(names))
        also = self._held.verified(names, also)
        try:
            self._write(changes, snapshots, also)
        except Exception as error:
            if not is_of_the_run(error):
                raise
            self._write_apart(changes, snapshots, also)

    def _write_apart(self, changes: Changes, snapshots: dict[str, bytes], also: Job) -> None:
        """A kill between them has the rest written after the restart: a row that is there already is not written, nor
        sent, again."""
        for run, change in changes:
            try:
                self._write([(run, change)], {}, self._held.verified([run]))
            except Exception as error:
                if not is_of_the_run(error):
                    raise
                self._on_failure(run, f"an alert ({change.finding.rule})", error)
                self._unwritten.add(run)
        self._write([], snapshots, also)

    def _write(self, changes: Changes, snapshots: dict[str, bytes], also: Job) -> None:
        now = self._clock()

        def job(connection: Connection) -> tuple[list[Alert], int]:
            also(connection)
            written, deliveries = tables.apply(connection, changes, now, self._link)
            save_snapshots(connection, snapshots)
            for alert in written:
                note_change(connection, "alert", alert.id)
            if deliveries:
                note_change(connection, "delivery")
            return written, deliveries

        alerts, deliveries = self._database.write(job, essential=True)
        if changes:
            self._unwritten.clear()
        self._on_written(changes, snapshots, alerts, deliveries)
