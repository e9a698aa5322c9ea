"""Stops a run when an alert fires, where its project's rules, or the alert that a user made, say `stop = true`: once for
each alert, and only a run whose script may be stopped, which the agent decides."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from sqlalchemy import Connection, select

from perfagent.wire import Finding
from perfagent_server.database import Database, StorageError
from perfagent_server.runs.run_commands import Order, Orders, Request
from perfagent_server.store.tables import command
from perfagent_server.store.tables import run as runs

__all__ = ["RuleStops"]


class RuleStops:
    """is_on: whether a rule stops the runs of a project; audited: gives the job that writes it down, of who, what, which
    run, a detail and the project. Safe from any thread."""

    def __init__(
        self,
        database: Database,
        orders: Orders,
        is_on: Callable[[str, str], bool],
        audited: Callable[[str, str, str, str, str], Callable[[Connection], None]],
    ) -> None:
        self._database, self._orders, self._is_on, self._audited = database, orders, is_on, audited

    def fired(self, run: str, alert: str, finding: Finding) -> Future[Order | None] | None:
        """An alert fired, or opened again. Does not wait; its result is None where nothing was asked."""

        def job(connection: Connection) -> Order | None:
            project = connection.execute(select(runs.c.project).where(runs.c.id == run)).scalar()
            if project is None or not self._is_on(project, finding.rule):
                return None
            its = command.c.run == run, command.c.kind == "stop", command.c.alert == alert
            if connection.execute(select(command.c.id).where(*its)).first() is not None:
                return None
            who = f"rule {finding.rule}"
            request = Request(
                run=run, kind="stop", params={}, who=who, why=finding.message, rule=finding.rule, alert=alert
            )
            audit = self._audited(who, "run.command", run, "stop", project)
            return self._orders.issuing(request, also=audit)(connection)

        try:
            asked = self._database.submit(job)
        except StorageError:
            return None
        asked.add_done_callback(partial(self._orders.note_asked, run))
        return asked
