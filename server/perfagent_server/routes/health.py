"""/healthz, /livez, /readyz and /metrics: for whatever watches the watcher."""

from __future__ import annotations

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Request
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from starlette.responses import PlainTextResponse, Response

from perfagent_server.database import StorageError
from perfagent_server.monitoring import Monitoring
from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.problems import problem
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require_everywhere
from perfagent_server.services import Services

__all__ = ["router"]

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    """200 if the process answers."""
    return reply({"status": "ok"})


@router.get("/livez")
async def livez(services: ServicesDep) -> Response:
    """200 unless the server needs a restart. It does not check the database, which a restart does not repair."""
    if not services.is_well:
        return problem(503, "not_well", "a thread has ended or is stuck (/readyz says which); restart the server")
    return reply({"status": "ok"})


@router.get("/readyz")
async def readyz(services: ServicesDep) -> Response:
    """200 if the database can be read, there is space to write, and runs are judged."""
    # on a thread of its own: all those of the routes may wait for something
    return await to_thread.run_sync(_readiness, services, limiter=CapacityLimiter(1))


def _readiness(services: Services) -> Response:
    try:
        with services.database.read() as connection:
            connection.execute(text("SELECT 1"))
    except (DBAPIError, StorageError):
        return problem(503, "not_ready", "the database cannot be read; the server's log has the cause")
    if services.database.out_of_reach:
        try:
            services.database.write(lambda _connection: None)  # while we are not ready, nobody else may send a write
        except StorageError as error:
            return problem(503, "not_ready", f"nothing can be stored: {error}")
    if services.database.full:
        return problem(
            503, "disk_full", "the disk with the data folder is full; reading works, writing waits for space"
        )
    if not services.database.is_alive:
        return problem(503, "not_ready", "the thread that writes has ended: nothing is stored; restart the server")
    if trouble := services.watchdog.trouble:
        return problem(
            503, "not_ready", f"nothing raises an alert: {trouble}; look at the server's log, and restart it"
        )
    if services.compactor.is_behind:
        return problem(503, "not_ready", f"senders have to wait: {services.compactor.trouble}")
    if services.compactor.trouble:  # what is sent is taken, and judged: only old samples cannot be read
        return reply({"status": "degraded", "message": services.compactor.trouble})
    return reply({"status": "ok"})


@router.get("/metrics", dependencies=[Depends(require_everywhere("read"))], response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    """The server and the active runs, in Prometheus' text format, or as OpenMetrics where the Accept header asks for
    it."""
    monitoring: Monitoring = request.app.state.monitoring
    content, media_type = monitoring.exposition(request.headers.get("accept", ""))
    return Response(content, media_type=media_type)
