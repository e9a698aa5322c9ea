"""What routes ask for: the parts of the running server, and a run that exists."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from perfagent_server.routes.problems import ApiError
from perfagent_server.services import Services

__all__ = ["ServicesDep", "known_run"]


async def _services(request: Request) -> Services:  # async: a plain function would cost a hop to a worker thread
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(_services)]


def known_run(run: str, services: ServicesDep) -> str:
    """The run's id, checked. A dependency of every route below /runs/{run}."""
    if not services.runs.exists(run):
        raise ApiError(404, "not_found", f"there is no run {run[:128]!r}; GET /api/v1/runs lists them", "run")
    return run
