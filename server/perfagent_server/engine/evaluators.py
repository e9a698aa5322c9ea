"""The evaluators of runs: in memory while a run moves, else in their snapshots.

Where a snapshot is lost, or is of another version, the evaluator is rebuilt from the tables (rebuild.py).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from perfagent_server.database import Database
from perfagent_server.engine.evaluator import STATE_VERSION, Evaluator
from perfagent_server.engine.rebuild import rebuild
from perfagent_server.rules.plan import Plan
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.tables import alert, rule_state
from perfagent_server.store.tables import run as runs

__all__ = ["Evaluators", "PlanOf"]

_MOST_KEPT = 2048  # in memory; the others lie in their snapshots
_IDLE_S = 600.0  # one that was idle for so long is dropped from memory

PlanOf = Callable[[str, Sequence[str]], Plan]
"""Project, and the rules that are switched off for the run -> the rules that judge it."""


@dataclass(slots=True)
class _Run:
    """What the table of runs says of one."""

    project: str
    world_size: int
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

    def load(self, wanted: Iterable[str], moment: float, now: float, judged: Callable[[str], int]) -> list[str]:
        """Brings the evaluators of these runs into memory; the names of those that were not there. judged: the tail
        id up to which frames of a run were judged."""
        missing = [run for run in wanted if run not in self.in_memory]
        for run, judge in self._made(missing, now, judged):
            self.in_memory[run], self.moved[run] = judge, moment
        return [run for run in missing if run in self.in_memory]

    def made(self, run: str, now: float, judged: Callable[[str], int]) -> Evaluator | None:
        """The evaluator of a run as its snapshot has it, for reading only; None where there is no such run."""
        return next((judge for _, judge in self._made([run], now, judged)), None)

    def _made(
        self, missing: Sequence[str], now: float, judged: Callable[[str], int]
    ) -> Iterator[tuple[str, Evaluator]]:
        for start in range(0, len(missing), 500):
            piece = missing[start : start + 500]
            with self._database.read() as connection:
                known = _runs(connection, piece)
                saved = connection.execute(select(rule_state).where(rule_state.c.run.in_(piece))).all()
                resolved = _resolved(connection, piece)
            states = {row.run: row.state for row in saved if row.version == STATE_VERSION}
            for run, about in known.items():
                judge = self._evaluator(run, about, states.get(run), judged(run))
                for one in judge.firing() & resolved:  # by hand, while no server judged the run
                    judge.resolve(one, now, "")
                judge.window.world_size = max(judge.window.world_size, about.world_size)
                judge.start_clock(now)
                yield run, judge

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

    def _evaluator(self, run: str, about: _Run, saved: bytes | None, judged: int) -> Evaluator:
        plan = self._plan_of(about.project, about.rules_off)

        def failed(rule: str, error: Exception) -> None:
            self._on_failure(run, f"a judgement by {rule}", error)

        if saved is not None:
            try:
                return Evaluator.restore(saved, plan, on_failure=failed)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is one run's
                self._on_failure(run, "the snapshot", error)
        judge = Evaluator(run, plan, on_failure=failed)
        rebuild(judge, self._database, self._store, judged)
        return judge


def _resolved(connection: Connection, names: Sequence[str]) -> set[str]:
    """Alerts of these runs that are over, says the table. A rule writes that together with its snapshot."""
    its = alert.c.run.in_(names), alert.c.state == "resolved"
    return set(connection.execute(select(alert.c.id).where(*its)).scalars())


def _runs(connection: Connection, names: Sequence[str]) -> dict[str, _Run]:
    columns = runs.c.id, runs.c.project, runs.c.world_size, runs.c.rules_off
    return {
        row.id: _Run(row.project, row.world_size or 1, json.loads(row.rules_off))
        for row in connection.execute(select(*columns).where(runs.c.id.in_(names)))
    }
