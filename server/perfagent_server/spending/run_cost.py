"""What a run has taken, and what an hour of it costs.

Hours are those in which its processes ran, whether they used the hardware or not: a GPU for each rank that has one, and
of each host the cores that the run may use. Two runs on one host each count all cores that they may use.
Energy is read from the rows of the processes, not added up from the series of power: samples are thinned by age, and steps that a
later attempt did again are out of sight, though their energy was spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, select

from perfagent.wire import Spent, Timing
from perfagent_server.spending.prices import ALL_PROJECTS, Price, price_of, prices
from perfagent_server.store.statements import among
from perfagent_server.store.tables import run as runs
from perfagent_server.store.tables import source

__all__ = ["Rate", "present_rate_of", "rate_of", "rates_of", "spent_of"]

_HOUR_S, _KWH_J = 3600.0, 3.6e6
_GOES_ON = ("starting", "running")
_COLUMNS = (
    source.c.attempt, source.c.host, source.c.state, source.c.started, source.c.worked_until, source.c.gpus,
    source.c.cpu_cores, source.c.gpu_energy_j, source.c.gpu_energy_per_step_j,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rate:
    """Money an hour."""

    per_hour: float
    currency: str


@dataclass(frozen=True, slots=True)
class _Taken:
    """What some processes took together. hours: from the first beginning to the last end, attempt by attempt."""

    hours: float
    gpu_hours: float | None
    cpu_core_hours: float | None
    gpu_energy_kwh: float | None

    def priced(self, price: Price | None) -> float | None:
        return None if price is None else price.of(self.gpu_hours, self.cpu_core_hours, self.gpu_energy_kwh)


def spent_of(connection: Connection, run: str, timing_of: Callable[[str], Timing] | None = None) -> Spent:
    """timing_of: gives the figures of a run's newest steps. Without it, nothing is said of tokens."""
    rows = _processes(connection, run)
    taken = _taken(rows)
    price = _price(connection, run)
    rate = _rate(rows, price)
    return Spent(
        hours=taken.hours,
        gpu_hours=taken.gpu_hours,
        cpu_core_hours=taken.cpu_core_hours,
        gpu_energy_kwh=taken.gpu_energy_kwh,
        gpu_energy_per_token_j=None if timing_of is None else _per_token(rows, lambda: timing_of(run)),
        money=taken.priced(price),
        money_per_hour=None if rate is None else rate.per_hour,
        currency="" if price is None else price.currency,
    )


def rate_of(connection: Connection, run: str) -> Rate | None:
    """What an hour of the run costs: now, or on average once it has ended. None where its project has no price, or
    nothing that has one is known of the run."""
    price = _price(connection, run)
    return None if price is None else _rate(_processes(connection, run), price)


def present_rate_of(connection: Connection, run: str) -> Rate | None:
    """The same, of a run that goes on. One that has ended costs nothing any more."""
    ended = connection.execute(select(runs.c.ended).where(runs.c.id == run)).scalar()
    return rate_of(connection, run) if ended is None else None


def rates_of(connection: Connection, wanted: Iterable[str]) -> dict[str, Rate]:
    """Of several runs, those that have one: three questions for all of them."""
    known, names = prices(connection), set(wanted)
    if not known or not names:
        return {}
    projects = connection.execute(select(runs.c.id, runs.c.project).where(among(connection, runs.c.id, names)))
    priced = {run: known.get(project) or known.get(ALL_PROJECTS) for run, project in projects}
    query = _sources(source.c.run).where(
        among(connection, source.c.run, (run for run, price in priced.items() if price))
    )
    rows = connection.execute(query.order_by(source.c.run), execution_options={"yield_per": 1000}).mappings()
    found = {run: _rate(_counting(list(of_run)), priced[run]) for run, of_run in groupby(rows, lambda row: row["run"])}
    return {run: rate for run, rate in found.items() if rate is not None}


def _price(connection: Connection, run: str) -> Price | None:
    project = connection.execute(select(runs.c.project).where(runs.c.id == run)).scalar()
    return None if project is None else price_of(connection, project)


def _processes(connection: Connection, run: str) -> Sequence[RowMapping]:
    return _counting(connection.execute(_sources().where(source.c.run == run)).mappings().all())


def _sources(*columns: Any) -> Select[Any]:
    return select(*columns, *_COLUMNS).where(source.c.worked_until.is_not(None))


def _counting(rows: Sequence[RowMapping]) -> Sequence[RowMapping]:
    """The processes of a run that say what they had; where none does, as of a script that only logs, all."""
    hosts = {(row["attempt"], row["host"]) for row in rows if row["cpu_cores"]}
    return [row for row in rows if row["gpus"] or (row["attempt"], row["host"]) in hosts] or rows


def _rate(rows: Sequence[RowMapping], price: Price | None) -> Rate | None:
    """Of the processes that go on; where none does, of all that ran."""
    newest = max((row["attempt"] for row in rows), default=0)
    now = [row for row in rows if row["attempt"] == newest and row["state"] in _GOES_ON]
    taken = _taken(now or rows)
    money = taken.priced(price)
    if price is None or money is None or taken.hours <= 0:
        return None
    return Rate(money / taken.hours, price.currency)


def _taken(rows: Sequence[RowMapping]) -> _Taken:
    attempts: dict[int, list[RowMapping]] = {}
    hosts: dict[tuple[int, str | None], list[RowMapping]] = {}
    for row in rows:
        attempts.setdefault(row["attempt"], []).append(row)
        hosts.setdefault((row["attempt"], row["host"]), []).append(row)
    cores = [
        max(known) * _hours(of_host)
        for of_host in hosts.values()
        if (known := [row["cpu_cores"] for row in of_host if row["cpu_cores"]])
    ]
    gpus = [row["gpus"] * _hours([row]) for row in rows if row["gpus"]]
    energy = [row["gpu_energy_j"] for row in rows if row["gpu_energy_j"] is not None]
    return _Taken(
        hours=sum(_hours(of_attempt) for of_attempt in attempts.values()),
        gpu_hours=sum(gpus) if gpus else None,
        cpu_core_hours=sum(cores) if cores else None,
        gpu_energy_kwh=sum(energy) / _KWH_J if energy else None,
    )


def _hours(rows: Iterable[RowMapping]) -> float:
    """From the first beginning to the last end."""
    spans = [(row["started"], row["worked_until"]) for row in rows]
    lasted_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return max(0.0, float(lasted_s)) / _HOUR_S


def _per_token(rows: Sequence[RowMapping], timing_of_run: Callable[[], Timing]) -> float | None:
    newest = max((row["attempt"] for row in rows), default=0)
    energy = [row["gpu_energy_per_step_j"] for row in rows if row["attempt"] == newest and row["gpu_energy_per_step_j"]]
    if not energy:
        return None
    timing = timing_of_run()
    tokens, took = timing.rates.get("tokens_per_s"), timing.series.get("step_time_s")
    if tokens is None or took is None:
        return None
    tokens_a_step = tokens.mean * took.mean
    return float(sum(energy)) / tokens_a_step if tokens_a_step > 0 else None
