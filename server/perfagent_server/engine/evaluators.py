"""The evaluators of runs: in memory while a run moves, else in their snapshots.

Where a snapshot is lost, or is of another version, the evaluator is rebuilt from the tables (rebuild.py). Each run is
loaded behind its own guard: one that cannot be loaded is given to `on_set_aside`, and the others are loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, select
from sqlalchemy.sql.expression import func

from perfagent_server.database import Database, StorageError
from perfagent_server.database.errors import spell
from perfagent_server.engine import set_aside
from perfagent_server.engine.evaluator import STATE_VERSION, Evaluator
from perfagent_server.engine.rebuild import rebuild
from perfagent_server.rules.plan import Plan
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.stored_json import stored_names
from perfagent_server.store.tables import SET_ASIDE, alert, rule_state, tail
from perfagent_server.store.tables import run as runs

__all__ = ["Evaluators", "PlanOf"]

_MOST_KEPT = 2048  # in memory; the others lie in their snapshots
_IDLE_S = 600.0  # one that was idle for so long is dropped from memory

PlanOf = Callable[[str, Sequence[str], Sequence[str]], Plan]
"""Project, the rules that are switched off for the run, and its tags -> the rules that judge it."""


@dataclass(slots=True)
class _Run:
    """What the tables say of one. resolved: its alerts that are over."""

    project: str
    world_size: int
    rules_off: str
    tags: str
    version: int | None
    state: bytes
    resolved: set[str]

    @property
    def says_upto(self) -> bool:
        """Whether its row of state says up to which frame it was judged."""
        return self.version in (STATE_VERSION, SET_ASIDE)


class Evaluators:
    """in_memory: run -> its evaluator, least recently moved first. moved: when that was, by the monotonic clock.

    on_failure: called with a run, what could not be done, and the error. on_set_aside: with a run that cannot be loaded,
    up to which tail id it was judged (None where its row says that), and the error. on_progress: before each run that is
    loaded, and each frame that is judged for it.
    """

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        plan_of: PlanOf,
        *,
        on_failure: Callable[[str, str, Exception], None],
        on_set_aside: Callable[[str, int | None, Exception], None],
        on_progress: Callable[[], None],
    ) -> None:
        self._on_set_aside, self._on_progress = on_set_aside, on_progress
        self._database, self._store, self._plan_of, self._on_failure = database, store, plan_of, on_failure
        self.in_memory: OrderedDict[str, Evaluator] = OrderedDict()
        self.moved: dict[str, float] = {}

    def load(self, wanted: Iterable[str], moment: float, now: float, judged: Callable[[str], int]) -> dict[str, int]:
        """Brings the evaluators of these runs into memory; those that were not there, and how many frames of them the tail
        holds that they have not seen, though all others of their shard were judged. judged: the tail id up to which."""
        missing = [run for run in wanted if run not in self.in_memory]
        loaded: dict[str, int] = {}
        for start in range(0, len(missing), 500):
            names = missing[start : start + 500]
            try:
                known, newest = self._read(names, judged)
            except StorageError:
                raise
            except Exception as error:  # noqa: BLE001 - a row that cannot be read: each run alone says whose
                if len(names) == 1:
                    self._on_set_aside(names[0], judged(names[0]), error)
                else:
                    for run in names:
                        loaded |= self.load([run], moment, now, judged)
                continue
            for run, about in known.items():
                self._on_progress()
                try:
                    judge = self._evaluator(run, about, now, judged(run))
                except StorageError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, it is one run's
                    self._on_set_aside(run, None if about.says_upto else judged(run), error)
                    continue
                self.in_memory[run], self.moved[run] = judge, moment
                loaded[run] = self._waiting(run, judge.upto, judged(run)) if newest.get(run, 0) > judge.upto else 0
        return loaded

    def made(self, run: str, now: float, judged: Callable[[str], int]) -> Evaluator | None:
        """The evaluator of a run as its snapshot has it, for reading only; None where there is no such run. Raises
        CannotJudgeError for one that is set aside."""
        about = self._read([run], judged)[0].get(run)
        if about is None:
            return None
        if about.version == SET_ASIDE:
            raise set_aside.CannotJudgeError(set_aside.Mark.read(about.state).error)
        try:
            return self._evaluator(run, about, now, judged(run))
        except StorageError:
            raise
        except Exception as error:
            raise set_aside.CannotJudgeError(spell(error)) from error

    def _read(self, names: Sequence[str], judged: Callable[[str], int]) -> tuple[dict[str, _Run], dict[str, int]]:
        """What the tables say of these runs, and the newest frame in the tail of those with a row of state, as far as
        the frames of their shards were judged."""
        with self._database.read() as connection:
            known = _runs(connection, names)
            with_state = [run for run, about in known.items() if about.version is not None]
            newest: dict[str, int] = {}
            for upto in {judged(run) for run in with_state}:
                its = tail.c.run.in_([run for run in with_state if judged(run) == upto]), tail.c.id <= upto
                found = select(tail.c.run, func.max(tail.c.id)).where(*its).group_by(tail.c.run)
                newest.update((row[0], row[1]) for row in connection.execute(found))
        return known, newest

    def _waiting(self, run: str, after: int, upto: int) -> int:
        its = tail.c.run == run, tail.c.id > after, tail.c.id <= upto
        with self._database.read() as connection:
            return connection.execute(select(func.count()).select_from(tail).where(*its)).scalar_one()

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

    def snapshots(self, names: Iterable[str]) -> dict[str, bytes]:
        """Of those in memory; a run whose state cannot be written is rebuilt after a restart."""
        taken = {}
        for run in names:
            try:
                if (judge := self.in_memory.get(run)) is not None:
                    taken[run] = judge.snapshot()
            except Exception as error:  # noqa: BLE001 - one run's state
                self._on_failure(run, "the state", error)
        return taken

    def drop(self, run: str) -> None:
        self.in_memory.pop(run, None)
        self.moved.pop(run, None)

    def _evaluator(self, run: str, about: _Run, now: float, judged: int) -> Evaluator:
        plan = self._plan_of(about.project, stored_names(about.rules_off), stored_names(about.tags))
        judge = self._restored(run, about, plan)
        if judge is None:
            judge = Evaluator(run, plan, on_failure=partial(self._on_failure, run))
            upto = set_aside.Mark.read(about.state).upto if about.version == SET_ASIDE else judged
            rebuild(judge, self._database, self._store, upto, self._on_progress)
            judge.upto = max(judge.upto, upto)
        judge.set_clock(now)
        for one in judge.firing() & about.resolved:  # by hand, while no server judged the run
            judge.resolve(one, now, "")
        judge.window.world_size = max(judge.window.world_size, about.world_size)
        judge.start_clock(now)
        return judge

    def _restored(self, run: str, about: _Run, plan: Plan) -> Evaluator | None:
        """From the snapshot, if there is one of this version that can be read."""
        if about.version != STATE_VERSION:
            return None
        try:
            return Evaluator.restore(about.state, plan, on_failure=partial(self._on_failure, run))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is one run's
            about.version = None
            self._on_failure(run, "the snapshot", error)
            return None


def _runs(connection: Connection, names: Sequence[str]) -> dict[str, _Run]:
    columns = runs.c.id, runs.c.project, runs.c.world_size, runs.c.rules_off, runs.c.tags
    query = (
        select(*columns, rule_state.c.version, rule_state.c.state)
        .outerjoin(rule_state, rule_state.c.run == runs.c.id)
        .where(runs.c.id.in_(names))
    )
    rows = connection.execute(query).all()
    # A rule writes that an alert is over together with its snapshot.
    over = select(alert.c.run, alert.c.id).where(alert.c.run.in_(names), alert.c.state == "resolved")
    resolved: dict[str, set[str]] = {}
    for run, one in connection.execute(over):
        resolved.setdefault(run, set()).add(one)
    return {
        row.id: _Run(
            row.project,
            row.world_size or 1,
            row.rules_off,
            row.tags,
            row.version,
            row.state,
            resolved.get(row.id, set()),
        )
        for row in rows
    }
