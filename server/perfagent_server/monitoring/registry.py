"""Everything that Prometheus reads of one app."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, GCCollector, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from perfagent_server.monitoring.requests import RequestCounts
from perfagent_server.monitoring.runs import RunCollector
from perfagent_server.monitoring.server import ServerCollector
from perfagent_server.services import Services

__all__ = ["Monitoring"]

_COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Monitoring:
    """A registry of its own: two apps in one process do not count for each other. The requests are counted from the first
    one on; the parts are watched once they exist."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.requests = RequestCounts()
        self._registry.register(self.requests)
        self._commits = Histogram(
            "perfagent_database_commit_seconds", "From the first job of a commit to its end.",
            buckets=_COMMIT_SECONDS, registry=self._registry,
        )  # fmt: skip
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def watch(self, services: Services) -> None:
        services.database.on_commit.append(self._commits.observe)
        self._registry.register(ServerCollector(services))
        self._registry.register(RunCollector(services, services.settings.metrics_runs))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text and its media type, as the Accept header wishes: Prometheus' text format, or OpenMetrics."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type
