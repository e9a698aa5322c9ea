"""Verdicts and findings of runs, as routes and reports ask for them, between two rounds of the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock, get_ident

from sqlalchemy import select

from perfagent.wire import Finding, healthy
from perfagent_server.database import Database, StorageError
from perfagent_server.database.errors import spell
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.engine.set_aside import CannotJudgeError, SetAside
from perfagent_server.rules.texts import Language
from perfagent_server.runs.earlier_attempts import earlier_attempts
from perfagent_server.store.tables import run as runs
from perfagent_server.verdict.healthy import Healthy

__all__ = ["Verdicts"]

_ANSWER_S = 10.0  # how long a question waits for the rules thread


class Verdicts:
    """lock: guards the evaluators. judge_of: returns the evaluator of a run; called with the lock held. on_failure: called
    with the run, the name of the step that failed, and the error."""

    def __init__(
        self, database: Database, lock: RLock, judge_of: Callable[[str], Evaluator | None], aside: SetAside,
        on_failure: Callable[[str, str, Exception], None],
    ) -> None:  # fmt: skip
        self._database, self._lock, self._judge_of = database, lock, judge_of
        self._aside, self._on_failure = aside, on_failure
        self._askers: set[int] = set()

    @property
    def is_asked(self) -> bool:
        """Whether a question waits: the lock alone does not let it in between two rounds that follow each other."""
        return bool(self._askers)

    def verdict(self, run: str, language: Language = "en") -> Finding:
        """Healthy, or the one thing that holds the run back. language: of what the verdict says beside that."""
        with self._database.read() as connection:
            state = connection.execute(select(runs.c.state).where(runs.c.id == run)).scalar()
            before = earlier_attempts(connection, run, language)
        try:
            with self.asking(run):
                judge = self._judge_of(run)
                if judge is None:
                    return healthy("Nothing is known of this run yet.")
                found = judge.verdict(lost=state == "lost", language=language)
        except CannotJudgeError as error:
            return self._aside.finding(run, str(error))
        if not before:
            return found
        if isinstance(found, Healthy):
            return replace(found, remarks=[*found.remarks, before])
        return replace(found, message=f"{found.message} {before}")

    def findings(self, run: str) -> list[Finding]:
        """Everything that the rules find now, worst first; for a run that ended also what held most of the time."""
        try:
            with self.asking(run):
                judge = self._judge_of(run)
                return judge.findings() if judge is not None else []
        except CannotJudgeError as error:
            return [self._aside.finding(run, str(error))]

    @contextmanager
    def asking(self, run: str) -> Iterator[None]:
        """A question about a run. Raises StorageError where the rules thread does not let anybody in, so that not all
        threads of routes end up waiting for it; CannotJudgeError where the run cannot answer."""
        self._askers.add(get_ident())
        try:
            is_free = self._lock.acquire(timeout=_ANSWER_S)
        finally:
            self._askers.discard(get_ident())
        if not is_free:
            raise StorageError(f"the rules did not answer within {_ANSWER_S:g} s; try again later")
        try:
            yield
        except (CannotJudgeError, StorageError):
            raise
        except Exception as error:
            self._on_failure(run, "the verdict", error)
            raise CannotJudgeError(spell(error)) from error
        finally:
            self._lock.release()
