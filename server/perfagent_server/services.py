"""The parts of a running server, wired once: made when the app starts, stopped in reverse when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from perfagent.errors import ResourceError
from perfagent.local_server import ADMIN_TOKEN_FILE
from perfagent.wire import Finding, Spent
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.reports import Reports
from perfagent_server.database import Database, open_database
from perfagent_server.engine.rule_settings import RULES_FILE, RuleSettings
from perfagent_server.engine.scheduler import Engine
from perfagent_server.ingest.group_commit import Ingest
from perfagent_server.ingest.json_rows import LogRows
from perfagent_server.live.hub import Hub
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.runs.figures import Figures
from perfagent_server.runs.rule_profiles import RuleProfiles
from perfagent_server.runs.run_commands import Orders
from perfagent_server.runs.run_queries import Runs
from perfagent_server.security.access import Access
from perfagent_server.security.keys import PEPPER_FILE, Keys, secret_file
from perfagent_server.security.sessions import Sessions
from perfagent_server.settings import Settings
from perfagent_server.spending.finding_cost import with_money
from perfagent_server.spending.run_cost import Rate, rate_of, spent_of
from perfagent_server.store.artifacts import Profiles
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.retention import Retention, RetentionPolicy
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import Compactor
from perfagent_server.verdict.healthy import Healthy

__all__ = ["Services", "open_services"]


@dataclass(slots=True, kw_only=True)
class Services:
    settings: Settings
    database: Database
    store: MetricStore
    runs: Runs
    figures: Figures
    ingest: Ingest
    log_rows: LogRows
    hub: Hub
    engine: Engine
    rule_settings: RuleSettings
    outbox: Outbox
    orders: Orders
    rule_profiles: RuleProfiles
    profiles: Profiles
    compactor: Compactor
    retention: Retention
    access: Access
    forget: Callable[[str], None]
    """Drops what is in memory of a run that was deleted, whoever deleted it."""
    link: Callable[[str], str]
    """The address of a run's page."""
    verdict_of: Callable[[str], Finding]
    """A run's verdict as people read it."""
    started: float

    def counters(self) -> dict[str, dict[str, float]]:
        """Every counter of every part, by part: what /api/v1/self and /metrics show."""
        parts: dict[str, Any] = {
            "ingest": self.ingest, "live": self.hub, "rules": self.engine, "outbox": self.outbox, "compactor": self.compactor,
            "retention": self.retention, "commands": self.orders, "rule_profiles": self.rule_profiles,
        }  # fmt: skip
        counted = {name: dict(getattr(part, "counters", {})) for name, part in parts.items()}
        counted["ingest"]["waiting"] = self.ingest.waiting
        counted["database"] = {
            "commits": self.database.commits, "jobs": self.database.jobs, "waiting": self.database.waiting,
            "full": int(self.database.full),
        }  # fmt: skip
        counted["access"] = {"failures": self.access.failures.total}
        counted["server"] = {"uptime_s": round(time.time() - self.started, 3)}
        return counted

    def rate_of(self, run: str) -> Rate | None:
        """What an hour of a run costs, where that is known."""
        with self.database.read() as connection:
            return rate_of(connection, run)

    def spent_of(self, run: str) -> Spent:
        """Hours, energy and money that a run has taken."""
        with self.database.read() as connection:
            return spent_of(connection, run, self.figures.of)

    def rules_changed(self) -> None:
        """The rules of some runs have other thresholds now: runs are loaded with them when they move."""
        self.rule_settings.changed()
        self.engine.reload()

    async def start(self) -> None:
        await self.hub.start()
        self.ingest.is_behind = lambda: self.engine.is_behind
        self.ingest.on_commit += [self.hub.publish, self.orders.note, lambda _stored: self.engine.wake()]
        self.compactor.start()
        self.retention.start()
        self.engine.start()
        self.outbox.start()

    async def stop(self) -> None:
        """In the order of the data's way, so that what was accepted is also judged as far as time allows."""
        await self.hub.stop()
        for part in (self.engine, self.outbox, self.retention, self.compactor):
            await asyncio.to_thread(part.stop)
        await asyncio.to_thread(self.database.close)


def open_services(settings: Settings) -> Services:
    """Opens the data and wires the parts; nothing runs yet but the database's writer. Raises ConfigError."""
    _private_folder(settings.data)
    admin_token = settings.admin_token or secret_file(settings.data / ADMIN_TOKEN_FILE)
    pepper = secret_file(settings.data / PEPPER_FILE)
    database = open_database(settings)
    store = SqlStore(database)
    runs = Runs(database)
    hub = Hub(runs.summaries, runs.rows)
    ingest = Ingest(database, store)
    orders = Orders(database)

    def link(run: str) -> str:
        return f"{settings.url}/run/{quote(run, safe='')}"

    outbox = Outbox(database, settings.webhook_allow)

    def publish_runs(changed: list[str]) -> None:
        for summary in runs.summaries(changed):
            hub.publish_run(summary)

    rule_settings = RuleSettings(database, settings.data / RULES_FILE)
    rule_profiles = RuleProfiles(database, orders, rule_settings.takes_profile)
    engine = Engine(
        database,
        store,
        hub,
        plan_of=rule_settings.plan_of,
        link=link,
        on_deliveries=outbox.wake,
        on_states=publish_runs,
        on_fire=partial(_ask_run, orders, rule_profiles),
    )
    figures = Figures(database, store)

    def verdict_of(run: str) -> Finding:
        found = engine.verdict(run)
        if isinstance(found, Healthy):
            return found.with_figures(figures.of(run))
        with database.read() as connection:
            return with_money(found, rate_of(connection, run))

    reports = Reports(
        database=database, verdict_of=verdict_of, is_well=lambda: engine.is_alive and not database.full, link=link
    )
    outbox.chores.append(reports.write)
    log_rows = LogRows(database, runs, ingest)

    def forget(run: str) -> None:
        log_rows.forget(run)
        orders.forget(run)
        engine.drop(run)
        hub.forget(run)

    return Services(
        settings=settings,
        database=database,
        store=store,
        runs=runs,
        figures=figures,
        ingest=ingest,
        log_rows=log_rows,
        hub=hub,
        engine=engine,
        rule_settings=rule_settings,
        outbox=outbox,
        orders=orders,
        rule_profiles=rule_profiles,
        profiles=Profiles(database),
        compactor=Compactor(database),
        retention=Retention(database, store, _policy(settings), on_deleted=forget),
        access=Access(settings, Keys(database, pepper), Sessions(database), admin_token=admin_token),
        forget=forget,
        link=link,
        verdict_of=verdict_of,
        started=time.time(),
    )


def _policy(settings: Settings) -> RetentionPolicy:
    return RetentionPolicy(
        samples_days=settings.samples_days,
        runs_days=settings.runs_days,
        events_days=settings.events_days,
        profiles_days=settings.profiles_days,
        alerts_days=settings.alerts_days,
        audit_days=settings.audit_days,
    )


def _ask_run(orders: Orders, rule_profiles: RuleProfiles, run: str, alert: str, finding: Finding) -> None:
    """An alert fired: every rank of the run gets the command that its rule asks for, and one may be profiled."""
    rule = next((rule for rule in all_rules() if rule.id == finding.rule), None)
    if rule is not None and rule.asks_for:
        orders.ask(run, rule.asks_for, rule=rule.id, why=finding.message, alert=alert)
    if rule is not None and rule.profile_helps:
        rule_profiles.fired(run, alert, finding)


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ResourceError(
            f"the data folder {folder} cannot be made ({error.strerror}); choose another with --data"
        ) from error
