"""The parts of a running server, wired once: made when the app starts, stopped in reverse when it ends."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sqlalchemy import Connection

from perfagent.endpoint.local_server import ADMIN_TOKEN_FILE
from perfagent.errors import ResourceError
from perfagent.wire import Finding, Spent
from perfagent_server.alerts.imported import put_findings
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.reports import Reports
from perfagent_server.alerts.senders import Post
from perfagent_server.alerts.tables import one_alert, tell_of_deletion
from perfagent_server.database import Database, open_database
from perfagent_server.engine.rule_settings import RULES_FILE, RuleSettings
from perfagent_server.engine.scheduler import Engine
from perfagent_server.engine.watchdog import Watchdog
from perfagent_server.ingest.group_commit import Ingest
from perfagent_server.ingest.json_rows import LogRows
from perfagent_server.ingest.new_runs import NewRuns
from perfagent_server.ingest.sender_limits import SenderLimits
from perfagent_server.live.hub import Hub
from perfagent_server.replicas.leases import OUTBOX, Leases
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.texts.reader import reader
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.runs.figures import Figures
from perfagent_server.runs.flame import Flames
from perfagent_server.runs.left_runs import is_left
from perfagent_server.runs.rule_profiles import RuleProfiles
from perfagent_server.runs.rule_stops import RuleStops
from perfagent_server.runs.run_commands import Orders
from perfagent_server.runs.run_groups import RunGroups
from perfagent_server.runs.run_queries import Runs
from perfagent_server.runs.run_table import RunTable
from perfagent_server.security.access import Access
from perfagent_server.security.audit import record_of_rule
from perfagent_server.security.keys import PEPPER_FILE, Keys, secret_file
from perfagent_server.security.outbound import post
from perfagent_server.security.people import People
from perfagent_server.security.sessions import Sessions
from perfagent_server.security.signed_cookies import SignedCookies
from perfagent_server.settings import RETENTION_SETTINGS, Settings
from perfagent_server.spending.finding_cost import with_money
from perfagent_server.spending.run_cost import Rate, rate_of, spent_of
from perfagent_server.store.artifacts import Profiles
from perfagent_server.store.changes import Change, newest_change
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.media import MediaStore
from perfagent_server.store.opening import open_store
from perfagent_server.store.retention import Retention, RetentionPolicy
from perfagent_server.store.samples import SampleCompactor
from perfagent_server.verdict.healthy import Healthy

if TYPE_CHECKING:
    from perfagent_server.replicas.replica import Replica
    from perfagent_server.security.oidc import OpenIdProvider

__all__ = ["Services", "open_services"]


@dataclass(slots=True, kw_only=True)
class Services:
    settings: Settings
    database: Database
    store: MetricStore
    runs: Runs
    figures: Figures
    run_table: RunTable
    run_groups: RunGroups
    ingest: Ingest
    sender_limits: SenderLimits
    new_runs: NewRuns
    log_rows: LogRows
    hub: Hub
    engine: Engine
    watchdog: Watchdog
    rule_settings: RuleSettings
    outbox: Outbox
    orders: Orders
    rule_profiles: RuleProfiles
    profiles: Profiles
    flames: Flames
    media: MediaStore
    compactor: SampleCompactor
    retention: Retention
    replica: Replica | None
    """What connects this server with others on the same database; None where it is alone."""
    access: Access
    people: People
    provider: OpenIdProvider | None
    forget: Callable[[str], None]
    """Drops what is in memory of a run that was deleted, whoever deleted it."""
    link: Callable[[str], str]
    """The address of a run's page."""
    verdict_of: Callable[[str], Finding]
    """A run's verdict as people read it."""
    started: float

    @property
    def is_well(self) -> bool:
        """Whether the threads that store samples, judge runs and send alerts are alive. If not, only a restart helps."""
        return self.database.is_alive and self.engine.can_judge and self.outbox.is_well

    def counters(self) -> dict[str, dict[str, float]]:
        """Every counter of every part, by part: what /api/v1/self and /metrics show."""
        parts: dict[str, Any] = {
            "ingest": self.ingest, "limits": self.sender_limits, "live": self.hub, "rules": self.engine, "outbox": self.outbox,
            "compactor": self.compactor, "retention": self.retention, "commands": self.orders,
            "rule_profiles": self.rule_profiles,
        }  # fmt: skip
        counted = {name: dict(getattr(part, "counters", {})) for name, part in parts.items()}
        if self.replica is not None:
            counted["replica"] = self.replica.counters
        counted["ingest"]["waiting"] = self.ingest.waiting
        counted["rules"]["stopped"] = int(bool(self.watchdog.trouble))
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
        timing = self.figures.of(run)  # before: who waits for a second connection keeps others from their first
        with self.database.read() as connection:
            return spent_of(connection, run, lambda _run: timing)

    def is_watched(self, run: str, project: str) -> bool:
        """Whether any page, of this server or another, shows the samples of a run as they come."""
        names = ("*", run, f"/{project}", f"{run}/{project}")
        elsewhere = self.replica.leases.watched if self.replica is not None else frozenset[str]()
        return not (self.hub.watched.isdisjoint(names) and elsewhere.isdisjoint(names))

    def resolve(self, run: str, alert: str, why: str) -> bool:
        """Closes an alert by hand. False when its run has no such alert open. Where another server judges the run, it is
        asked."""
        if self.replica is None or self.engine.judges(run):
            return self.engine.resolve(run, alert, why)
        return self.replica.ask_to_resolve(run, alert, why)

    def note_resolved(self, connection: Connection, run: str, alert: str, why: str) -> None:
        """An alert was closed in the tables, as no server did it when asked: whoever judges the run by now hears of it."""
        if self.replica is not None:
            self.replica.note_resolved(connection, run, alert, why)

    def remove_if_left(self, run: str) -> None:
        """Removes a run without a step whose processes have all gone on in another run."""
        with self.database.read() as connection:
            left = is_left(connection, run)
        if left:
            self.store.delete(run)
            self.forget(run)

    def rules_changed(self) -> None:
        """The rules of some runs have other thresholds now: runs are loaded with them when they move."""
        self.rule_settings.changed()
        self.engine.reload()

    async def start(self) -> None:
        await self.hub.start()
        self.ingest.is_behind = lambda: self.engine.is_behind or self.compactor.is_behind
        if self.replica is None:
            self.ingest.on_commit.append(self.hub.publish)
        else:  # pages get the frames of all servers from one place
            await asyncio.to_thread(self.replica.start)
        self.ingest.on_commit += [self.orders.note, lambda _stored: self.engine.wake()]
        self.compactor.start()
        self.retention.start()
        self.engine.start()
        self.outbox.start()
        self.watchdog.start()

    async def stop(self) -> None:
        """In the order of the data's way, so that what was accepted is also judged as far as time allows."""
        await self.hub.stop()
        for part in (self.watchdog, self.engine, self.outbox, self.retention, self.compactor, self.replica):
            if part is not None:
                await asyncio.to_thread(part.stop)
        await asyncio.to_thread(self.database.close)


def open_services(
    settings: Settings, *, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic,
    send: Post = post,
) -> Services:  # fmt: skip
    """Opens the data and wires the parts; nothing runs yet but the database's writer. clock, monotonic: of what senders are
    allowed, runs are asked for, rules judge, channels are told, and logins and sessions last. send: one POST to a channel.
    Raises ConfigError."""
    _private_folder(settings.data)
    admin_token = settings.admin_token or secret_file(settings.data / ADMIN_TOKEN_FILE)
    pepper = settings.key_pepper or secret_file(settings.data / PEPPER_FILE)
    cookies = SignedCookies(pepper)
    provider = _provider(settings, cookies)
    database = open_database(
        settings, alone=not settings.replica, replica=secrets.token_hex(8) if settings.replica else ""
    )
    try:
        return _wired(settings, database, admin_token, pepper, cookies, provider, clock, monotonic, send)
    except BaseException:
        database.close()
        raise


def _wired(
    settings: Settings, database: Database, admin_token: str, pepper: str, cookies: SignedCookies,
    provider: OpenIdProvider | None, clock: Callable[[], float], monotonic: Callable[[], float], send: Post,
) -> Services:  # fmt: skip
    with database.read() as connection:
        known = newest_change(connection)  # before any cache is filled
    runs = Runs(database)
    hub = Hub(runs.summaries, runs.rows, runs.projects_of)
    leases = Leases(database, settings.url, admin_token + pepper, lambda: hub.watched) if settings.replica else None
    if leases is not None:
        leases.check_secrets()
    store, compactor, thin = open_store(database, settings.metrics, max_names=settings.max_names, leases=leases)
    ingest = Ingest(store, clock=clock)
    sender_limits = SenderLimits(settings.limits, clock=monotonic)
    new_runs = NewRuns(runs, sender_limits, max_projects=settings.max_projects, clock=monotonic)
    orders = Orders(database, clock=clock)

    def link(run: str) -> str:
        return f"{settings.url}/run/{quote(run, safe='')}"

    def holds(name: str) -> Callable[[], bool]:
        return (lambda: True) if leases is None else partial(leases.holds, name)

    keys = Keys(database, pepper)
    outbox = Outbox(database, settings.webhook_allow, is_mine=holds(OUTBOX), clock=clock, send=send)
    store.on_deletion.append(lambda connection, run: tell_of_deletion(connection, run, time.time(), link))
    store.on_import.append(put_findings)

    def publish_runs(changed: list[str]) -> None:
        for summary in runs.summaries(changed):
            hub.publish_run(summary)

    rule_settings = RuleSettings(database, settings.data / RULES_FILE)
    profiles = Profiles(database)
    rule_profiles = RuleProfiles(database, orders, rule_settings.takes_profile, clock=clock)
    rule_stops = RuleStops(database, orders, rule_settings.stops, record_of_rule)
    engine = Engine(
        database,
        store,
        hub,
        shards=leases,
        plan_of=rule_settings.plan_of,
        link=link,
        on_deliveries=outbox.wake,
        on_states=publish_runs,
        on_fire=partial(_ask_run, orders, rule_profiles, rule_stops),
        monotonic=monotonic,
    )
    if leases is not None:
        leases.can_judge = lambda: engine.can_judge
    figures = Figures(database, store)

    def verdict_of(run: str) -> Finding:
        found = spoken(engine.verdict(run, reader.get()))
        if isinstance(found, Healthy):
            return found.with_figures(figures.of(run))
        with database.read() as connection:
            return with_money(found, rate_of(connection, run))

    watchdog = Watchdog(
        database, store, engine, server=settings.url, link=link(""), on_deliveries=outbox.wake,
        outbox_trouble=lambda: outbox.trouble,
    )  # fmt: skip
    reports = Reports(
        database=database, verdict_of=verdict_of, is_well=lambda: not watchdog.trouble and not database.full, link=link
    )
    outbox.chores.append(reports.write)
    log_rows = LogRows(database, runs, ingest, new_runs)

    def forget(run: str) -> None:
        log_rows.forget(run)
        new_runs.forget(run)
        orders.forget(run)
        engine.drop(run)
        hub.forget(run)
        outbox.wake()

    def rules_changed(change: Change) -> None:
        if not change.subject:
            rule_settings.changed()
        engine.reload_soon(change.subject or None)

    def keys_changed(_change: Change) -> None:
        keys.changed()
        hub.check_pages()

    replica = None
    if leases is not None:
        from perfagent_server.replicas.replica import Replica, resolve_as_asked  # loads psycopg

        handlers: dict[str, Callable[[Change], object]] = {
            "alert": lambda change: _publish_alert(database, hub, change.subject),
            "command": lambda change: orders.load(change.subject),
            "deleted": lambda change: forget(change.subject),
            "delivery": lambda _change: outbox.wake(),
            "key": keys_changed,
            "resolve": lambda change: resolve_as_asked(engine, change),
            "rules": rules_changed,
            "run": lambda change: publish_runs([change.subject]),
            "session": lambda _change: hub.check_pages(),
        }
        replica = Replica(database, store, hub, leases, handlers, since=known, on_news=engine.wake)

    return Services(
        settings=settings,
        database=database,
        store=store,
        runs=runs,
        figures=figures,
        run_table=RunTable(database, store, runs, figures, verdict_of),
        run_groups=RunGroups(database, store),
        ingest=ingest,
        sender_limits=sender_limits,
        new_runs=new_runs,
        log_rows=log_rows,
        hub=hub,
        engine=engine,
        watchdog=watchdog,
        rule_settings=rule_settings,
        outbox=outbox,
        orders=orders,
        rule_profiles=rule_profiles,
        profiles=profiles,
        flames=Flames(profiles),
        media=MediaStore(database),
        compactor=compactor,
        retention=Retention(database, store, _policy(settings), on_deleted=forget, leases=leases, thin_elsewhere=thin),
        replica=replica,
        access=Access(settings, keys, Sessions(database, clock=clock), admin_token=admin_token, monotonic=monotonic),
        people=People(database, cookies, clock=clock),
        provider=provider,
        forget=forget,
        link=link,
        verdict_of=verdict_of,
        started=time.time(),
    )


def _publish_alert(database: Database, hub: Hub, alert_id: str) -> None:
    with database.read() as connection:
        found = one_alert(connection, alert_id)
    if found is not None:
        hub.publish_alert(found)


def _provider(settings: Settings, cookies: SignedCookies) -> OpenIdProvider | None:
    if not settings.oidc_issuer:
        return None
    from perfagent_server.security.oidc import OpenIdProvider  # authlib is loaded only where it is asked

    return OpenIdProvider(settings, cookies)


def _policy(settings: Settings) -> RetentionPolicy:
    limits: dict[str, Any] = {name: getattr(settings, name) for name in RETENTION_SETTINGS}
    kept: dict[str, Any] = {name: None if value == math.inf else value for name, value in limits.items()}
    return RetentionPolicy(**kept)


def _ask_run(
    orders: Orders, rule_profiles: RuleProfiles, rule_stops: RuleStops, run: str, alert: str, finding: Finding
) -> None:
    """An alert fired: every rank of the run gets the command that its rule asks for, one may be profiled, and all of it
    may be stopped."""
    rule_stops.fired(run, alert, finding)
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
