"""The evaluators of runs: in memory while a run moves, else in their snapshots.

Where a snapshot is lost, or is of another version, the run's alerts are taken from the alert table, so that an open
alert goes on under its id, and the recent past of its series from the store.
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, select

from perfagent.wire import LOSS, Finding, loss_kind
from perfagent_server.alerts.state_machine import Machine
from perfagent_server.database import Database
from perfagent_server.engine.evaluator import STATE_VERSION, Evaluator
from perfagent_server.engine.reports import title_key
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.rule import USER_ALERT
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.stored import Stored
from perfagent_server.store.tables import alert, rule_state
from perfagent_server.store.tables import attempt as attempts
from perfagent_server.store.tables import run as runs
from perfagent_server.timestamps import rfc3339

__all__ = ["Evaluators", "PlanOf"]

log = logging.getLogger("perfagent.server")

_MOST_KEPT = 2048  # in memory; the others lie in their snapshots
_IDLE_S = 600.0  # one that was idle for so long is dropped from memory

PlanOf = Callable[[str, Sequence[str]], Plan]
"""Project, and the rules that are switched off for the run -> the rules that judge it."""


@dataclass(slots=True)
class _Run:
    """What the table of runs says of one."""

    project: str
    attempt: int
    world_size: int
    state: str
    rules_off: list[str]


class Evaluators:
    """in_memory: run -> its evaluator, least recently moved first. moved: when that was, by the monotonic clock.

    on_failure: called with a run, what could not be done, and the error.
    """

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        plan_of: PlanOf,
        *,
        on_failure: Callable[[str, str, Exception], None],
    ) -> None:
        self._database, self._store, self._plan_of, self._on_failure = database, store, plan_of, on_failure
        self.in_memory: OrderedDict[str, Evaluator] = OrderedDict()
        self.moved: dict[str, float] = {}

    def load(self, wanted: Iterable[str], moment: float, now: float, batch: Sequence[Stored] = ()) -> list[str]:
        """Brings the evaluators of these runs into memory; the names of those that were not there. batch: frames that
        are about to be judged."""
        missing = [run for run in wanted if run not in self.in_memory]
        loaded = []
        for start in range(0, len(missing), 500):
            piece = missing[start : start + 500]
            with self._database.read() as connection:
                known = _runs(connection, piece)
                saved = connection.execute(select(rule_state).where(rule_state.c.run.in_(piece))).all()
            states = {row.run: row.state for row in saved if row.version == STATE_VERSION}
            for run, about in known.items():
                judge = self._evaluator(run, about, states.get(run), batch)
                judge.window.world_size = max(judge.window.world_size, about.world_size)
                judge.start_clock(now)
                self.in_memory[run], self.moved[run] = judge, moment
                loaded.append(run)
        return loaded

    def evict(self, moment: float, dirty: set[str]) -> list[str]:
        """Drops those that lie in their snapshots as they are: idle ones, and the oldest when there are many."""
        gone = []
        for run in list(self.in_memory):
            idle = moment - self.moved.get(run, moment) > _IDLE_S
            if not idle and len(self.in_memory) <= _MOST_KEPT:
                break
            if run not in dirty:
                self.drop(run)
                gone.append(run)
        return gone

    def drop(self, run: str) -> None:
        self.in_memory.pop(run, None)
        self.moved.pop(run, None)

    def _evaluator(self, run: str, about: _Run, saved: bytes | None, batch: Sequence[Stored]) -> Evaluator:
        plan = self._plan_of(about.project, about.rules_off)

        def failed(rule: str, error: Exception) -> None:
            self._on_failure(run, f"a judgement by {rule}", error)

        if saved is not None:
            try:
                return Evaluator.restore(saved, plan, on_failure=failed)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is one run's
                self._on_failure(run, "the snapshot", error)
        judge = Evaluator(run, plan, on_failure=failed)
        first = min((stored.id for stored in batch if stored.run == run), default=None)
        self._rebuild(judge, about, [stored for stored in batch if stored.run == run], first)
        return judge

    def _rebuild(self, judge: Evaluator, about: _Run, frames: Sequence[Stored], first: int | None) -> None:
        """An evaluator without a snapshot, from what the tables say of its run. Nothing of a run that is new."""
        window = judge.window
        with self._database.read() as connection:
            rows = _alerts(connection, window.run, about.attempt)
        steps = [step for stored in frames for group in stored.groups for step in group.steps()[:1]]
        before = min(steps, default=None)
        if not rows and (first is None or before is None or before <= 1):
            return
        window.attempt, window.state = about.attempt, about.state if about.state != "lost" else "running"
        # a clock that was set back meanwhile must not keep an alert open
        now = frames[0].received if frames else window.now or math.inf
        judge.machines = {machine.rule: machine for machine in (_machine(row, now) for row in rows)}
        judge.note_firing()
        self._fill(judge, None if before is None else before - 1)

    def _fill(self, judge: Evaluator, until: int | None) -> None:
        """The newest steps of the series that rules are judged on, as they were stored. until: the last step that was
        judged."""
        window, plan = judge.window, judge.plan
        names = [name for name in self._store.names(window.run) if plan.is_judged(name) or loss_kind(name) == "whole"]
        for name in names:
            found = self._store.series(window.run, name, to_step=until, points=1)
            if not found.step:
                continue
            kept = plan.series_of(name)
            last = found.step[-1] + found.bucket_steps - 1
            found = self._store.series(
                window.run, name, from_step=max(0, last - kept.keep), to_step=until, points=kept.keep + 1
            )
            if not found.exact:
                continue
            series = window.by_step[plan.part_of(name)] = StepSeries(name, kept)
            series.fill(found.step, found.mean)
            window.step = max(window.step, found.step[-1])
            if name == LOSS:
                window.first_loss = None


def _runs(connection: Connection, names: Sequence[str]) -> dict[str, _Run]:
    columns = runs.c.id, runs.c.project, runs.c.attempt, runs.c.world_size, runs.c.state, runs.c.rules_off
    return {
        row.id: _Run(row.project, row.attempt, row.world_size or 1, row.state, json.loads(row.rules_off))
        for row in connection.execute(select(*columns).where(runs.c.id.in_(names)))
    }


def _alerts(connection: Connection, run: str, attempt: int) -> Sequence[RowMapping]:
    """The alerts that are open, and those that fired in this attempt, oldest first."""
    its = (attempts.c.run == run) & (attempts.c.attempt == attempt)
    began = connection.execute(select(attempts.c.started).where(its)).scalar() or 0.0
    wanted = (alert.c.run == run) & ((alert.c.state == "firing") | (alert.c.fired >= began))
    return connection.execute(select(alert).where(wanted).order_by(alert.c.fired)).mappings().all()


def _machine(row: RowMapping, now: float) -> Machine:
    """The machine of an alert, as far as its row says. now: by the server clock of the frames."""
    finding = Finding(
        rule=row["rule"],
        severity=row["severity"],
        message=row["message"],
        since_step=row["since_step"],
        since=rfc3339(row["since"]),
        ranks=json.loads(row["ranks"]),
        evidence=json.loads(row["evidence"]),
        fix=row["fix"],
        gain_pct=row["gain_pct"],
        title=row["title"],
        cause=row["cause"],
        cost=row["cost"],
    )
    key = row["rule"]
    if key == USER_ALERT:
        key = title_key(str(finding.evidence.get("title", "")))
    is_open = row["state"] == "firing"
    step = row["last_step"] or row["since_step"] or 0
    return Machine(
        key,
        "firing" if is_open else "inactive",
        row["id"],
        since_step=finding.since_step or step,
        since=row["since"],
        hit_step=step,
        hit=min(row["fired"] or now, now),
        resolved_step=None if is_open else step,
        resolved=None if is_open else min(row["resolved"] or now, now),
        written=row["fired"],
        finding=finding,
    )
