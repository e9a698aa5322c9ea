"""Drops old data so that the disk does not fill: full resolution first, whole runs only when the settings say so.

A block older than `samples_days` loses its samples and keeps its cells of 16 steps: charts stay exact at that width and
wider. A run that ended (or was last heard of) more than `runs_days` ago is deleted. The file gives pages back to the
disk a little at a time, so that no writer waits long. Every step is an essential job: it runs when the disk is full,
which is when it counts. Nothing is deleted while its age is in doubt (deletion_guard.py).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, func, null, select, update

from perfagent_server.database import Database, StorageError
from perfagent_server.store.deletion_guard import DeletionGuard, time_since_boot
from perfagent_server.store.expiry import EXPIRIES, Expiry
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.statements import Prepared
from perfagent_server.store.tables import block, bundle, run, tail
from perfagent_server.store.write.compaction import drop_unused_axes, thin_bundles

__all__ = ["Retention", "RetentionPolicy"]

_log = logging.getLogger(__name__)
DAY_S = 86_400.0
BLOCKS_AT_ONCE = 200  # some 10 ms
PAGES_AT_ONCE = 2000  # 8 MB: some milliseconds

_old_blocks = Prepared(
    select(block.c.series, block.c.attempt, block.c.block, block.c.axis)
    .where(block.c.last_time < bindparam("before"), block.c.payload.is_not(None))
    .order_by(block.c.last_time)
    .limit(bindparam("count"))
)
_old_bundle = Prepared(select(bundle.c.id).where(bundle.c.last_time < bindparam("before")).limit(1))
_thin_block = Prepared(
    update(block)
    .where(
        block.c.series == bindparam("_series"),
        block.c.attempt == bindparam("_attempt"),
        block.c.block == bindparam("_block"),
        block.c.axis.is_not_distinct_from(bindparam("_axis")),
        block.c.last_time < bindparam("_before"),
    )
    .values(payload=null(), axis=null())
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """How long is kept: samples_days: full resolution; runs_days: runs after their end; events_days: console lines,
    stacks and other events; profiles_days: profiles with their traces; alerts_days: alerts that are over, after the run
    was heard of last; audit_days: the audit log. None: for ever."""

    samples_days: float | None = None
    runs_days: float | None = None
    events_days: float | None = None
    profiles_days: float | None = None
    alerts_days: float | None = None
    audit_days: float | None = None
    pause_s: float = 3600.0
    full_pause_s: float = 30.0  # between two rounds while the disk is full


class Retention:
    """`on_deleted`: called with the id of each run that was deleted, on the thread of this class. `counters`: for
    /self."""

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        policy: RetentionPolicy | None = None,
        *,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time_since_boot,
        on_deleted: Callable[[str], None] = lambda _run: None,
    ) -> None:
        self._on_deleted = on_deleted
        self._database, self._store, self._clock = database, store, clock
        self.policy = policy or RetentionPolicy()
        self.counters = {"blocks_thinned": 0, "runs_deleted": 0, "pages_returned": 0, "refused": 0}
        self.counters |= {expiry.counter: 0 for expiry in EXPIRIES}
        self._doubts: set[str] = set()  # that the log has already
        self._guard = DeletionGuard(clock=clock, uptime=uptime)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="perfagent-retention", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.policy.full_pause_s if self._database.full else self.policy.pause_s):
            try:
                self.run_once()
            except StorageError:
                continue
            except Exception:  # noqa: BLE001 - the thread must live as long as the server
                _log.exception("retention failed and is tried again")

    def run_once(self) -> None:
        """Drops what is over age and returns the room to the disk."""
        self._drop_old(self._clock())
        self._shrink()

    def _drop_old(self, now: float) -> None:
        with self._database.read() as connection:
            newest = connection.execute(select(func.max(run.c.updated))).scalar()
        if newest is None or self._is_refused("clock", self._guard.distrust(now, newest)):
            return
        if self.policy.runs_days is not None:
            self._delete_runs(now - self.policy.runs_days * DAY_S)
        if self.policy.samples_days is not None:
            self._thin(now - self.policy.samples_days * DAY_S)
        for expiry in EXPIRIES:
            days = getattr(self.policy, expiry.age)
            if days is not None:
                self._expire(expiry, now - days * DAY_S)

    def _expire(self, expiry: Expiry, before: float) -> None:
        while not self._stop.is_set():
            with self._database.read() as connection:
                keys = expiry.some(connection, before)
            if not keys:
                return
            self._database.write(functools.partial(expiry.delete, keys), essential=True)
            self.counters[expiry.counter] += len(keys)

    def _is_refused(self, doubt: str, why: str | None) -> bool:
        """Counts a refusal; the log has each doubt once, and not every hour."""
        if why is None:
            self._doubts.discard(doubt)
            return False
        self.counters["refused"] += 1
        if doubt not in self._doubts:
            _log.warning("nothing is deleted by age: %s", why)
        self._doubts.add(doubt)
        return True

    def _delete_runs(self, before: float) -> None:
        with self._database.read() as connection:
            old = connection.execute(
                select(run.c.id).where(func.coalesce(run.c.ended, run.c.updated) < before, run.c.updated < before)
            )
            ids = old.scalars().all()
            all_runs = connection.execute(select(func.count()).select_from(run)).scalar_one()
        if self._is_refused("share", self._guard.too_many(len(ids), all_runs)):
            return
        for each in ids:  # one at a time: between two of them other writers have their turn
            self._store.empty(each)
            self._database.write(functools.partial(self._store.delete, run=each), essential=True)
            self._on_deleted(each)
            self.counters["runs_deleted"] += 1

    def _thin(self, before: float) -> None:
        while not self._stop.is_set():
            with (
                self._database.read() as connection
            ):  # looked for here, so that the writer has only the changes to make
                old = _old_blocks.all(connection, {"before": before, "count": BLOCKS_AT_ONCE})
            if not old:
                break
            job = functools.partial(_thin_blocks, blocks=old, before=before)
            self.counters["blocks_thinned"] += self._database.write(job, essential=True)
        while not self._stop.is_set() and self._has_old_bundles(before):
            self.counters["blocks_thinned"] += self._database.write(
                functools.partial(thin_bundles, before=before, blocks_at_once=BLOCKS_AT_ONCE), essential=True
            )

    def _has_old_bundles(self, before: float) -> bool:
        with self._database.read() as connection:
            return bool(_old_bundle.all(connection, {"before": before}))

    def _shrink(self) -> None:
        if self._database.engine.dialect.name != "sqlite":
            return
        while not self._stop.is_set():
            returned = self._database.write(_shrink_some, essential=True)
            self.counters["pages_returned"] += returned
            if returned < PAGES_AT_ONCE:
                return


def _thin_blocks(connection: Connection, blocks: Sequence[tuple[int, int, int, int]], before: float) -> int:
    """Takes the samples out of these blocks, but for those that new ones have reached meanwhile."""
    names = ("_series", "_attempt", "_block", "_axis")
    rows = [dict(zip(names, row, strict=True), _before=before) for row in blocks]
    thinned = _thin_block.many(connection, rows)
    drop_unused_axes(connection, {row[3] for row in blocks})
    return thinned


def _shrink_some(connection: Connection) -> int:
    free: int = connection.exec_driver_sql("PRAGMA freelist_count").scalar() or 0
    # What compaction frees it needs again at once: only a free part that is large is worth moving pages for.
    busy = connection.execute(select(func.count()).select_from(tail)).scalar() or 0
    spare = free - max(PAGES_AT_ONCE, 4 * busy)
    if spare <= 0:
        return 0
    pages = min(spare, PAGES_AT_ONCE)
    # sqlite3 takes one step of a statement that has no columns, and one step of this one is one page, whatever number
    # is given.
    driver = connection.connection.driver_connection
    assert driver is not None
    for _ in range(pages):
        driver.execute("PRAGMA incremental_vacuum(1)")
    return pages
