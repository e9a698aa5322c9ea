"""Has a run profiled when an alert fires, where its project's rules say so (`profile = true`): once for each alert.

A profile slows the steps that it covers, and its trace is sent and stored. So rules ask seldom, however many of their
alerts fire. What was asked is read from the table of commands, in the transaction that asks: neither a restart of the
server nor data that is judged again asks twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from sqlalchemy import Connection, select

from perfagent.wire import Finding
from perfagent_server.database import Database, StorageError
from perfagent_server.runs.run_commands import Order, Orders, Request, checked
from perfagent_server.store.tables import command
from perfagent_server.store.tables import run as runs

__all__ = ["MOST", "PAUSE_S", "RuleProfiles"]

PAUSE_S = 600.0
"""From one such profile of a run to the next: what is slow for one reason makes several rules fire within minutes, and
they would show the same steps."""
MOST = 10
"""Such profiles of a run. The store keeps 50 of a run, the oldest go: those that people ask for must have room."""


class RuleProfiles:
    """is_on: whether a rule has the runs of a project profiled. `counters`: for /self. Safe from any thread."""

    def __init__(
        self,
        database: Database,
        orders: Orders,
        is_on: Callable[[str, str], bool],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._orders, self._is_on, self._clock = database, orders, is_on, clock
        self.counters = {"asked": 0, "held_back": 0}

    def fired(self, run: str, alert: str, finding: Finding) -> Future[Order | None] | None:
        """An alert of a rule for which a profile helps fired, or opened again. Does not wait; its result is None where
        nothing was asked."""

        def job(connection: Connection) -> Order | None:
            project = connection.execute(select(runs.c.project).where(runs.c.id == run)).scalar()
            if project is None or not self._is_on(project, finding.rule) or not self._is_free(connection, run, alert):
                return None
            order = self._orders.issuing(_request(run, alert, finding))(connection)
            self.counters["asked"] += 1
            return order

        try:
            asked = self._database.submit(job)
        except StorageError:
            return None
        asked.add_done_callback(partial(self._orders.note_asked, run))
        return asked

    def _is_free(self, connection: Connection, run: str, alert: str) -> bool:
        """Whether this alert has asked for nothing yet, and the run may be profiled again; counts what is held back."""
        its = command.c.run == run, command.c.kind == "profile", command.c.alert != ""
        earlier = connection.execute(select(command.c.alert, command.c.created).where(*its)).all()
        if any(one.alert == alert for one in earlier):
            return False
        is_free = len(earlier) < MOST and not _within_the_pause([one.created for one in earlier], self._clock())
        self.counters["held_back"] += not is_free
        return is_free


def _within_the_pause(asked: Sequence[float], now: float) -> bool:
    return any(0.0 <= now - one < PAUSE_S for one in asked)  # one of the future: the clock was set back


def _request(run: str, alert: str, finding: Finding) -> Request:
    """Of one rank: of those that the finding names the first, else rank 0. The agent is told what its profile
    explains."""
    params = {**checked("profile", {}), "rule": finding.rule, "since_step": finding.since_step}
    return Request(
        run=run, kind="profile", params=params, ranks=finding.ranks[:1] or [0], who=f"rule {finding.rule}",
        why=finding.message, rule=finding.rule, alert=alert,
    )  # fmt: skip
