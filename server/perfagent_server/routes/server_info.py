"""GET /self: what this server is and every counter it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Depends
from starlette.responses import Response

from perfagent import __version__
from perfagent.wire import WIRE_VERSION
from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()


@dataclass
class Self:
    version: str
    wire_version: int
    started: str
    counters: dict[str, dict[str, float]]


@router.get("/self", dependencies=[Depends(require("read"))], responses={200: {"model": Self}})
def self_(services: ServicesDep) -> Response:
    """Version and counters: accepted, refused, queued, dropped, judged, delivered."""
    return reply(
        Self(
            version=__version__,
            wire_version=WIRE_VERSION,
            started=rfc3339(services.started),
            counters=services.counters(),
        )
    )
