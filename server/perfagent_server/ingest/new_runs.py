"""Lets runs begin within the limits: how many a sender may begin, and in how many projects.

Asked once for each run that this server has not heard of since it started; the database is looked at on another thread,
for all that are asked at the same time together.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from perfagent_server.ingest.batcher import Batcher
from perfagent_server.ingest.sender_limits import Sender, SenderLimits
from perfagent_server.refusal import RefusalError

if TYPE_CHECKING:
    from perfagent_server.runs.run_queries import Runs

__all__ = ["NewRuns"]

_MOST = 50_000  # runs that are known to be there
_HOUR_S = 3600.0
_SHARE = 0.1  # of max_projects: so many one sender may begin in an hour, so that it does not use up those of all others
_FEW = 10  # projects that it may begin in any case

_Question = tuple[Sender, str, str]
"""Who sends, the run's id, its project."""


class NewRuns:
    """max_projects: in all of the database. Safe from any thread."""

    def __init__(
        self, runs: Runs, limits: SenderLimits, *, max_projects: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._begun: deque[tuple[float, str]] = deque()  # when a project was begun within the last hour, and who did
        self._runs, self._limits, self._max_projects = runs, limits, max_projects
        self._asking: Batcher[_Question, None] = Batcher(self._answer_all)
        self._known: set[str] = set()
        self._projects: set[str] = set()
        self._lock = threading.Lock()  # of _projects and _begun

    async def admit(self, sender: Sender, run: str, project: str) -> None:
        """Raises RefusalError if this run is not there yet and may not begin."""
        if run not in self._known:
            await self._asking.ask((sender, run, project))

    def forget(self, run: str) -> None:
        """After a run was deleted."""
        self._known.discard(run)

    def begin(self, sender: Sender, projects: Collection[str]) -> None:
        """Lets runs begin, one for each entry of `projects`. Raises RefusalError. Reads the database now and then."""
        if not projects:
            return
        self._begin_projects(sender, projects)
        self._limits.begin_runs(sender, len(projects))

    def _answer_all(self, questions: Sequence[_Question]) -> list[Exception | None]:
        there = self._runs.existing({run for _, run, _ in questions})
        answers: list[Exception | None] = []
        for sender, run, project in questions:
            try:
                if run not in there:
                    self.begin(sender, (project,))
                    there.add(run)
            except RefusalError as error:
                answers.append(error)
                continue
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known.add(run)
            answers.append(None)
        return answers

    def _begin_projects(self, sender: Sender, projects: Collection[str]) -> None:
        with self._lock:
            new = set(projects) - self._projects
            if not new:
                return
            self._projects = self._runs.projects()
            new -= self._projects
            if len(self._projects) + len(new) > self._max_projects:
                raise RefusalError(
                    "forbidden",
                    f"project {min(new)[:80]!r} would be one more than the {self._max_projects} projects that are "
                    "allowed: send to one that is there, delete runs, or raise PERFAGENT_MAX_PROJECTS at the server",
                    "project",
                )
            self._check_share(sender, new)
            self._projects |= new

    def _check_share(self, sender: Sender, new: Collection[str]) -> None:
        """Counts the projects that this sender begins. Raises RefusalError when these are too many."""
        now = self._clock()
        while self._begun and self._begun[0][0] <= now - _HOUR_S:
            self._begun.popleft()
        its = [at for at, name in self._begun if name == sender.name]
        most = max(_FEW, int(_SHARE * self._max_projects))
        if len(its) + len(new) > most:
            wait_s = math.ceil((its[0] if its else now) + _HOUR_S - now)
            raise RefusalError(
                "too_many_requests",
                f"{sender.name} would begin more than {most} projects within an hour: send to one that is there, wait "
                f"{wait_s} s, or raise PERFAGENT_MAX_PROJECTS at the server, of which one sender may begin a tenth in an hour",
                "project",
                retry_after_s=wait_s,
            )
        self._begun.extend((now, sender.name) for _ in new)
