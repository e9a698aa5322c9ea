"""/healthz, /readyz and /metrics: for whatever watches the watcher."""

from __future__ import annotations

import re

from fastapi import APIRouter, Depends
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from starlette.responses import PlainTextResponse, Response

from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.problems import problem
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require

__all__ = ["router"]

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return reply({"status": "ok"})


@router.get("/readyz")
def readyz(services: ServicesDep) -> Response:
    """The database can be read, there is room to write, and the threads that write and judge run."""
    try:
        with services.database.read() as connection:
            connection.execute(text("SELECT 1"))
    except DBAPIError:
        return problem(503, "not_ready", "the database cannot be read; the server's log has the cause")
    if services.database.full:
        return problem(
            503, "disk_full", "the disk with the data folder is full; reading works, writing waits for space"
        )
    if not services.database.is_alive:
        return problem(503, "not_ready", "the thread that writes has ended: nothing is stored; restart the server")
    if not services.engine.is_alive:
        return problem(
            503, "not_ready", "the thread of the rules has ended: nothing raises an alert; restart the server"
        )
    return reply({"status": "ok"})


@router.get("/metrics", dependencies=[Depends(require("read"))], response_class=PlainTextResponse)
def metrics(services: ServicesDep) -> Response:
    """Every counter of /api/v1/self in Prometheus' text format."""
    lines = []
    for part, counters in sorted(services.counters().items()):
        for name, value in sorted(counters.items()):
            full = "perfagent_" + re.sub(r"[^a-zA-Z0-9_]", "_", f"{part}_{name}")
            lines += [f"# TYPE {full} untyped", f"{full} {value}"]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")
