"""The typed client of a perfagent server's HTTP API, for scripts, notebooks, the command line and the dashboard."""

from perfagent_client.client import ApiError, AsyncClient, Client, RunDetails

__all__ = ["ApiError", "AsyncClient", "Client", "RunDetails"]
