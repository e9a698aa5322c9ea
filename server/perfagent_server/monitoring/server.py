"""Collects what the server's parts count, when it is scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select

from perfagent import __version__
from perfagent_server.database import StorageError
from perfagent_server.monitoring.counters import NAMES, Named
from perfagent_server.services import Services
from perfagent_server.store.tables import alert, delivery, tail

__all__ = ["ServerCollector"]

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class ServerCollector(Collector):
    def __init__(self, services: Services) -> None:
        self._services = services

    def describe(self) -> list[Metric]:
        return []  # the names are known only when there are values

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("perfagent_build_info", "Always 1; the labels say what runs.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from self._counters()
        size = GaugeMetricFamily("perfagent_database_size_bytes", "Bytes of the database.")
        size.add_metric([], self._services.database.size_bytes)
        yield size
        try:
            with self._services.database.read() as connection:
                found = list(_tables(connection))
        except StorageError:  # the rest is worth having while the database is away
            return
        yield from found

    def _counters(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for part, counters in sorted(self._services.counters().items()):
            for counter, value in sorted(counters.items()):
                named = NAMES.get((part, counter), Named(f"{part}_{counter}", "unknown", f"{counter} of {part}."))
                label, of = ([named.label[0]], [named.label[1]]) if named.label else ([], [])
                name = f"perfagent_{named.name}"
                if name not in families:
                    families[name] = _FAMILIES.get(named.kind, UnknownMetricFamily)(name, named.help, labels=label)
                families[name].add_metric(of, value)  # type: ignore[attr-defined]
        yield from families.values()


def _tables(connection: Connection) -> Iterator[Metric]:
    rows = GaugeMetricFamily("perfagent_tail_rows", "Stored frames that the compactor has not come to yet.")
    rows.add_metric([], connection.execute(select(func.count()).select_from(tail)).scalar_one())
    yield rows
    alerts = GaugeMetricFamily("perfagent_alerts", "Alerts that are not over.", labels=["severity", "state"])
    open_ones = (
        select(alert.c.severity, alert.c.state, func.count())
        .where(alert.c.state.in_(("pending", "firing")))
        .group_by(alert.c.severity, alert.c.state)
    )
    for severity, state, count in connection.execute(open_ones):
        alerts.add_metric([severity, state], count)
    yield alerts
    waiting = GaugeMetricFamily("perfagent_deliveries_waiting", "Messages of alerts that have not arrived yet.")
    count = connection.execute(select(func.count()).select_from(delivery).where(delivery.c.state == "waiting"))
    waiting.add_metric([], count.scalar_one())
    yield waiting
