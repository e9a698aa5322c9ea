"""The newest values of the runs that go on, for Prometheus: the newest runs only, so that the number of series is bounded.
Of several servers on one database, one shows them, so that a sum over servers counts each run once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perfagent_server.database import StorageError
from perfagent_server.runs.run_filters import TableQuery
from perfagent_server.services import Services
from perfagent_server.store.retention.policy import LIVE_STATES
from perfagent_server.store.shards import STORAGE
from perfagent_server.timestamps import unix_seconds

__all__ = ["GAUGES", "RunCollector"]

_LABELS = ["run", "project", "name"]
_STATES = (*LIVE_STATES, "lost")
Value = Callable[[dict[str, Any]], float | None]


def _latest(name: str, scale: float = 1.0) -> Value:
    def value(row: dict[str, Any]) -> float | None:
        found = row["latest"].get(name)
        return None if found is None else found * scale

    return value


def _loss(row: dict[str, Any]) -> float | None:
    return None if row["loss"] is None else row["latest"].get(row["loss"])


def _throughput(name: str) -> Value:
    def value(row: dict[str, Any]) -> float | None:
        return row["timing"]["throughput"] if row["timing"]["throughput_name"] == name else None

    return value


GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("loss", "Newest loss.", _loss),
    ("step", "Newest completed step.", lambda row: row["step"]),
    ("step_time_seconds", "Median step time of the newest 100 steps.", lambda row: row["timing"]["step_time_s"]),
    ("tokens_per_second", "Median of the newest 100 steps, all ranks together.", _throughput("tokens_per_s")),
    ("samples_per_second", "Median of the newest 100 steps, all ranks together.", _throughput("samples_per_s")),
    ("gpu_utilization_ratio", "0 to 1.", _latest("gpu/utilization_pct", 0.01)),
    ("gpu_memory_used_bytes", "Of the device.", _latest("gpu/memory_used_bytes")),
    ("resident_memory_bytes", "Of its processes.", _latest("process/rss_bytes")),
    ("last_contact_timestamp_seconds", "When a frame of it came last.", lambda row: unix_seconds(row["updated"])),
)


class RunCollector(Collector):
    """most: so many runs, the newest; 0: none."""

    def __init__(self, services: Services, most: int) -> None:
        self._services, self._most = services, most

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        replica = self._services.replica
        if self._most == 0 or (replica is not None and not replica.leases.holds(STORAGE)):
            return
        asked = TableQuery(
            parts=("latest", "timing"), states=_STATES, sort="updated", descending=True, limit=self._most
        )
        try:
            found = self._services.run_table.screen(asked)
        except StorageError:
            return
        hidden = GaugeMetricFamily("perfagent_runs_not_shown", "Runs that go on beyond PERFAGENT_METRICS_RUNS.")
        hidden.add_metric([], found["total"] - len(found["runs"]))
        yield hidden
        rows = found["runs"]
        for name, words, value in GAUGES:
            family = GaugeMetricFamily(f"perfagent_run_{name}", words, labels=_LABELS)
            for row in rows:
                if (current := value(row)) is not None:
                    family.add_metric(_labels(row), float(current))
            yield family
        states = GaugeMetricFamily("perfagent_run_state", "1 for the state that it is in.", labels=[*_LABELS, "state"])
        for row in rows:
            for state in _STATES:
                states.add_metric([*_labels(row), state], float(row["state"] == state))
        yield states


def _labels(row: dict[str, Any]) -> list[str]:
    return [row["run"], row["project"], row["name"]]
