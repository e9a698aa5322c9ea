"""The server and the runs that go on, as Prometheus reads them: one registry of its own for each app."""

from perfagent_server.monitoring.registry import Monitoring
from perfagent_server.monitoring.requests import CountRequests, RequestCounts

__all__ = ["CountRequests", "Monitoring", "RequestCounts"]
