"""Drops old data so that the disk does not fill: full resolution first, whole runs only when the settings say so.

A block older than `samples_days` loses its samples and keeps its cells of 16 steps: charts stay exact at that width and
wider. Later those become cells of 256, and of 4096 steps. A run that ended (or was last heard of) more than `runs_days`
ago is deleted. Where a size budget is exceeded, the oldest runs lose the same in the same order until it is met. The
file gives pages back to the disk a little at a time, so that no writer waits long. Every step is an essential job: it
runs when the disk is full, which is when it counts. Nothing goes while the clock is in doubt (deletion_guard.py), and
each transaction looks once more whether it still may (checks.py). What went is in the log and in the audit log.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy import Connection, func, insert, select

from perfagent_server.database import Database, StorageError
from perfagent_server.store.interface import Check, MetricStore
from perfagent_server.store.retention.budget import Step, candidates
from perfagent_server.store.retention.checks import CheckedDatabase, PoliciesChanged, RunStays, same_policies
from perfagent_server.store.retention.deletion_guard import DeletionGuard, keep_trusted, last_trusted, time_since_boot
from perfagent_server.store.retention.expiry import EXPIRIES, Expiry
from perfagent_server.store.retention.policy import DAY_S, Policies, RetentionPolicy, Scope, stored_policies
from perfagent_server.store.retention.preview import ROLLUPS, Excess, Preview, excesses, global_scope, preview
from perfagent_server.store.retention.resolution import roll_up_run, thin_old, thin_run
from perfagent_server.store.retention.runs import OldRun, old_runs, too_fine_runs
from perfagent_server.store.retention.sizes import measure_run, measure_runs, total_bytes, used_bytes
from perfagent_server.store.shards import STORAGE, AllShards, StoreLeases
from perfagent_server.store.tables import audit, run, tail

__all__ = ["Retention"]

_log = logging.getLogger(__name__)
PAGES_AT_ONCE = 2000  # 8 MB: some milliseconds
_WHAT_GOES = {
    "samples": "its samples; cells of 16 steps stay",
    "rollup16": "its cells of 16 steps; cells of 256 steps stay",
    "rollup256": "its cells of 256 steps; cells of 4096 steps stay",
    "run": "all of it",
}


class Retention:
    """`on_deleted`: called with the id of each run that was deleted, on the thread of this class. `leases`: where several
    servers share the database, the one that holds STORAGE does it. `counters`: for /self. `thin_elsewhere`: drops full
    resolution of a scope before a time (Unix seconds) where samples are not in the database, with a check for each of its
    transactions, and answers how much."""

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        policy: RetentionPolicy | None = None,
        *,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time_since_boot,
        on_deleted: Callable[[str], None] = lambda _run: None,
        leases: StoreLeases | None = None,
        thin_elsewhere: Callable[[Scope, float, Check], int] | None = None,
    ) -> None:
        self._thin_elsewhere = thin_elsewhere
        self._on_deleted = on_deleted
        self._leases: StoreLeases = AllShards() if leases is None else leases
        self._database, self._store, self._clock = database, store, clock
        self.policy = policy or RetentionPolicy()
        self.counters = {"blocks_thinned": 0, "runs_rolled_up": 0, "runs_deleted": 0, "pages_returned": 0, "refused": 0}
        self.counters |= {"budget_steps": 0, "over_budget_bytes": 0}
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

    def policies(self) -> Policies:
        """Of the settings, and what was set over them for projects."""
        with self._database.read() as connection:
            return Policies(self.policy, stored_policies(connection))

    def preview(self) -> Preview:
        """What run_once() would do now."""
        now = self._clock()
        policies = self.policies()
        measure_runs(self._database, now, self._stop)
        used = used_bytes(self._database)
        with self._database.read() as connection:
            newest = connection.execute(select(func.max(run.c.updated))).scalar()
            doubt = self._guard.distrust(now, last_trusted(connection))
            if doubt is None and newest is not None:
                doubt = self._guard.is_quiet(now, newest)
            return preview(connection, policies, now, used, doubt or "")

    def _run(self) -> None:
        while not self._stop.wait(self.policy.full_pause_s if self._database.full else self.policy.pause_s):
            try:
                self.run_once()
            except StorageError:
                continue
            except Exception:  # noqa: BLE001 - the thread must live as long as the server
                _log.exception("retention failed and is tried again")

    def run_once(self) -> None:
        """Drops what is over age or over a budget, and returns the room to the disk. Raises LeaseLost."""
        term = self._leases.term(STORAGE)
        if term is None:
            return
        leased = CheckedDatabase(self._database, lambda connection: self._leases.verify(connection, {STORAGE: term}))
        now = self._clock()
        if self._may_believe(leased, now):
            policies = self.policies()
            database = leased.also(same_policies(policies))
            try:
                self._drop_old(database, policies, now)
                self._keep_to_budgets(database, policies, now)
            except PoliciesChanged:
                _log.info("what is to be kept was changed; retention begins anew at its next look")
        self._shrink()

    def _may_believe(self, database: CheckedDatabase, now: float) -> bool:
        """Whether ages by this clock are right, and there are any. Keeps the time when it is trusted."""
        with database.read() as connection:
            newest, trusted = connection.execute(select(func.max(run.c.updated))).scalar(), last_trusted(connection)
        if newest is None:
            return False
        doubt = self._guard.distrust(now, trusted)
        if doubt is None:
            database.write(functools.partial(keep_trusted, now=now))
            doubt = self._guard.is_quiet(now, newest)
        return not self._is_refused("clock", doubt)

    # --- by age -------------------------------------------------------------------------------------------------------

    def _drop_old(self, database: CheckedDatabase, policies: Policies, now: float) -> None:
        self._delete_runs(database, policies, now)
        for scope, days in policies.scopes("samples_days"):
            before = now - days * DAY_S
            thinned, what = thin_old(database, scope, before, self._stop), "blocks"
            if self._thin_elsewhere is not None:
                thinned, what = self._thin_elsewhere(scope, before, database.check), "attempts in ClickHouse"
            self.counters["blocks_thinned"] += thinned
            if thinned:
                said = f"{thinned} {what} older than {days:g} days, {scope.words}"
                self._tell("retention.samples", said, now, scope.project)
        for field, width in ROLLUPS:
            for scope, days in policies.scopes(field):
                self._roll_up(database, scope, now - days * DAY_S, width, now)
        for expiry in EXPIRIES:
            scopes = policies.scopes(expiry.age) if expiry.of_project else global_scope(policies, expiry.age)
            for scope, days in scopes:
                self._expire(database, expiry, scope, now - days * DAY_S, now)

    def _expire(self, database: CheckedDatabase, expiry: Expiry, scope: Scope, before: float, now: float) -> None:
        deleted = 0
        while not self._stop.is_set():
            with database.read() as connection:
                keys = expiry.some(connection, before, scope)
            if not keys:
                break
            database.write(functools.partial(expiry.delete, keys))
            deleted += len(keys)
        self.counters[expiry.counter] += deleted
        if deleted:
            what = f"{deleted}: {expiry.counter}, {scope.words}"
            self._tell(f"retention.{expiry.age.removesuffix('_days')}", what, now, scope.project)

    def _is_refused(self, doubt: str, why: str | None) -> bool:
        """Counts a refusal; the log has each doubt once, and not every hour."""
        if why is None:
            self._doubts.discard(doubt)
            return False
        self.counters["refused"] += 1
        if doubt not in self._doubts:
            _log.warning("nothing is deleted: %s", why)
        self._doubts.add(doubt)
        return True

    def _delete_runs(self, database: CheckedDatabase, policies: Policies, now: float) -> None:
        with database.read() as connection:
            old = [
                (one, scope, now - days * DAY_S)
                for scope, days in policies.scopes("runs_days")
                for one in old_runs(connection, scope, now - days * DAY_S)
            ]
            all_runs = connection.execute(select(func.count()).select_from(run)).scalar_one()
        if self._is_refused("share", self._guard.too_many(len(old), all_runs)):
            return
        for one, scope, before in old:  # one at a time: between two of them other writers have their turn
            if self._stop.is_set():
                return
            still_old = functools.partial(old_runs, scope=scope, before=before, only=one.id)
            try:
                self._delete_run(one.id, database.also(_finds(still_old)))
            except RunStays:
                _log.info("%s stays: it goes on, or was tagged meanwhile", _words(one))
                continue
            self._tell("retention.run", _words(one), now, one.project, one.id)

    def _delete_run(self, run_id: str, database: CheckedDatabase) -> None:
        self._store.delete(run_id, database.check)
        self._on_deleted(run_id)
        self.counters["runs_deleted"] += 1

    def _roll_up(self, database: CheckedDatabase, scope: Scope, before: float, width: int, now: float) -> None:
        with database.read() as connection:
            fine = too_fine_runs(connection, scope, before, width)
        done = 0
        for one in fine:
            if self._stop.is_set():
                break
            still_fine = functools.partial(too_fine_runs, scope=scope, before=before, width=width, only=one.id)
            with contextlib.suppress(RunStays):
                roll_up_run(database.also(_finds(still_fine)), one.id, width, now)
                done += 1
        self.counters["runs_rolled_up"] += done
        if done:
            what = f"{done} runs to cells of {width} steps, {scope.words}"
            self._tell("retention.rollup", what, now, scope.project, fine[0].id if len(fine) == 1 else "")

    # --- by size ------------------------------------------------------------------------------------------------------

    def _keep_to_budgets(self, database: CheckedDatabase, policies: Policies, now: float) -> None:
        self.counters["over_budget_bytes"] = 0
        if policies.default.max_bytes is None and not policies.scopes("max_bytes"):
            return
        measure_runs(self._database, now, self._stop)
        projects = [scope.project for scope, _ in policies.scopes("max_bytes")]
        for project in (*projects, None):
            used = used_bytes(self._database)
            with self._database.read() as connection:
                found = [one for one in excesses(connection, policies, now, used) if one.project == project]
                all_runs = connection.execute(select(func.count()).select_from(run)).scalar_one()
            for excess in found:
                going = sum(step.action == "run" for step in excess.steps)
                if not self._is_refused(f"share {project}", self._guard.too_many(going, all_runs)):
                    self._take(database, excess, now)

    def _take(self, database: CheckedDatabase, excess: Excess, now: float) -> None:
        """Takes the steps in order until the budget is met: a step may free more than was expected, or less."""
        _log.warning("%s", _words_of(excess))
        for step in excess.steps:
            if self._stop.is_set() or self._left(excess) <= 0:
                break
            one = step.run
            still_there = functools.partial(candidates, project=excess.project, now=now, only=one.run)
            try:
                self._take_step(database.also(_finds(still_there)), step, now)
            except RunStays:
                _log.info("%s (%s) stays: it goes on, or was tagged meanwhile", one.name, one.run)
                continue
            self.counters["budget_steps"] += 1
            what = f"{_WHAT_GOES[step.action]}; the budget of {_of(excess.project)} is exceeded"
            self._tell(f"retention.budget.{step.action}", f"{one.name} ({one.run}): {what}", now, one.project, one.run)
        left = self._left(excess)
        self.counters["over_budget_bytes"] += max(0, int(left))
        why = (
            f"{_words_of(excess)}; what is left are runs that go on or were heard of within a day, runs with the tag keep, and "
            "what belongs to no run"
        )
        self._is_refused(f"budget {excess.project}", why if left > 0 else None)

    def _take_step(self, database: CheckedDatabase, step: Step, now: float) -> None:
        run_id = step.run.run
        if step.action == "run":
            self._delete_run(run_id, database)
            return
        if step.action == "samples":
            self.counters["blocks_thinned"] += thin_run(database, run_id, now)
        else:
            roll_up_run(database, run_id, 256 if step.action == "rollup16" else 4096, now)
            self.counters["runs_rolled_up"] += 1
        measure_run(self._database, run_id, now)

    def _left(self, excess: Excess) -> float:
        """Bytes over the budget now."""
        if excess.project is None:
            return used_bytes(self._database) - excess.limit
        with self._database.read() as connection:
            return total_bytes(connection, excess.project) - excess.limit

    # --- both ---------------------------------------------------------------------------------------------------------

    def _tell(self, action: str, detail: str, now: float, project: str | None, run_id: str = "") -> None:
        """In the log and in the audit log. project: None where it was done to several; run_id: where it was one run."""
        _log.info("%s: %s", action, detail)
        row = {
            "time": now, "who": "retention", "origin": "", "action": action[:64], "detail": detail[:2000],
            "project": (project or "")[:256], "thing": run_id[:256],
        }  # fmt: skip
        self._database.write(lambda connection: connection.execute(insert(audit).values(**row)), essential=True)

    def _shrink(self) -> None:
        if self._database.engine.dialect.name != "sqlite":
            return
        while not self._stop.is_set():
            returned = self._database.write(_shrink_some, essential=True)
            self.counters["pages_returned"] += returned
            if returned < PAGES_AT_ONCE:
                return


def _finds(search: Callable[[Connection], Sequence[object]]) -> Check:
    """A check that a run still is among those that a search finds."""

    def check(connection: Connection) -> None:
        if not search(connection):
            raise RunStays

    return check


def _words(one: OldRun) -> str:
    return f"{one.name} ({one.id}) of project {one.project}"


def _of(project: str | None) -> str:
    return "the database" if project is None else f"project {project}"


def _words_of(excess: Excess) -> str:
    return f"{_of(excess.project)} has {excess.used:,} bytes, and its budget is {excess.limit:,.0f}"


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
