"""What a user's own alert would have told of a run that is stored: the engine's own judge, on the stored samples."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sqlalchemy import Connection, select

from perfagent.wire import Event, LogRow, whole_of
from perfagent_server.backtest.exported import Exported, OfAttempt
from perfagent_server.backtest.replay import BacktestAlert, replay
from perfagent_server.database import Database
from perfagent_server.rules.own_alert import MOST_SERIES, OwnAlert
from perfagent_server.rules.plan import Plan
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.tables import attempt as attempts
from perfagent_server.store.tables import run as runs

__all__ = ["MOST_SAMPLES", "Tried", "tried"]

MOST_SAMPLES = 100_000
"""They take some seconds; of a run with more the newest count."""
_LEAST_OF_A_RANK = 1000
_MOST_LOOKS = 10_000


@dataclass(frozen=True, slots=True)
class Tried:
    """series: those that were watched; samples: how many were judged; left_out: how many older ones were not."""

    alerts: list[BacktestAlert]
    series: list[str]
    samples: int
    left_out: int


def tried(alert: OwnAlert, store: MetricStore, database: Database, run: str) -> Tried:
    matching = [name for name in store.names(run) if alert.watches(whole_of(name) or name)][:MOST_SERIES]
    with database.read() as connection:
        life, world_size = _life(connection, run)
    most = max(_LEAST_OF_A_RANK, MOST_SAMPLES // max(1, len(matching)) // world_size)
    samples, count, left_out = Exported(), 0, 0
    for rows, total in _newest(store.samples(run, matching), most):
        count, left_out = count + len(rows), left_out + total - len(rows)
        for row in rows:
            samples.add(row.name, row.rank, row.step, row.time, row.value)
    plan = Plan([alert])
    plan.lives[alert.id] = replace(plan.lives[alert.id], cooldown_steps=0, cooldown_s=0.0)  # each opening counts
    # A run of weeks must not be looked at every five seconds.
    span = life[-1].event.time - life[0].event.time
    plan.clocked = tuple((max(each, alert.for_s / 20, span / _MOST_LOOKS), rule) for each, rule in plan.clocked)
    judged = replay(samples.moments(life), plan)
    series = list(dict.fromkeys(whole_of(name) or name for name in matching))
    return Tried(judged.alerts, series, count, left_out)


def _life(connection: Connection, run: str) -> tuple[list[OfAttempt], int]:
    """When the attempts began, and when the run was last heard."""
    about = connection.execute(select(runs.c.updated, runs.c.world_size).where(runs.c.id == run)).one()
    world_size = max(1, about.world_size or 1)
    began = connection.execute(select(attempts).where(attempts.c.run == run).order_by(attempts.c.attempt)).all()
    events = [
        OfAttempt(
            row.attempt, 0, Event(kind="state", time=row.started, data={"state": "running", "world_size": world_size})
        )
        for row in began
    ]
    newest = began[-1].attempt if began else 1
    events.append(OfAttempt(newest, 0, Event(kind="state", time=about.updated, data={"state": "finished"})))
    return events, world_size


def _newest(rows: Iterator[LogRow], most: int) -> Iterator[tuple[deque[LogRow], int]]:
    """The newest samples of each series and rank, and how many it has."""
    kept: dict[tuple[str, int], deque[LogRow]] = defaultdict(lambda: deque(maxlen=most))
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for row in rows:
        kept[row.name, row.rank].append(row)
        counts[row.name, row.rank] += 1
    for key, found in kept.items():
        yield found, counts[key]
