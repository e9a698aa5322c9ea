"""GET /self: what this server is and every counter it keeps."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.responses import Response

from perfagent import __version__
from perfagent.wire import WIRE_VERSION, Finding
from perfagent_server.routes.dependencies import Reader, ServicesDep
from perfagent_server.routes.reply import reply
from perfagent_server.settings import RETENTION_SETTINGS
from perfagent_server.timestamps import rfc3339

__all__ = ["router"]

router = APIRouter()


@dataclass
class Self:
    version: str
    wire_version: int
    started: str
    storage: dict[str, int]
    samples: str
    retention_days: dict[str, float | None]
    max_bytes: float | None
    counters: dict[str, dict[str, float]]
    set_aside: list[dict[str, str]]
    rules_stopped: Finding | None


@router.get("/self", responses={200: {"model": Self}})
def self_(services: ServicesDep, identity: Reader) -> Response:
    """Version, storage (bytes of the database, and that are free on its disk), samples (where they are, or why they wait
    in the database), retention (days, and bytes of the database;
    null is for ever, and no limit; GET /retention has that of projects) and counters: accepted, refused, queued, dropped,
    judged, delivered; set_aside: the runs that the rules cannot judge for now, why, and when they try again;
    rules_stopped: why this server judges no run, null while it does. Storage,
    counters and set_aside are of all projects: they are empty for users who see only some."""
    settings = services.settings
    sees_all = identity.seen_projects is None
    policy = services.retention.policies().default
    kept = {name.removesuffix("_days"): getattr(policy, name) for name in RETENTION_SETTINGS if name.endswith("_days")}
    return reply(
        Self(
            version=__version__,
            wire_version=WIRE_VERSION,
            started=rfc3339(services.started),
            storage={
                "database_bytes": services.database.size_bytes,
                "free_bytes": shutil.disk_usage(settings.data).free,
            }
            if sees_all
            else {},
            samples=services.compactor.trouble or ("ClickHouse" if settings.metrics else "database"),
            retention_days=kept,
            max_bytes=policy.max_bytes,
            counters=services.counters() if sees_all else {},
            rules_stopped=services.watchdog.finding(),
            set_aside=services.engine.aside.shown() if sees_all else [],
        )
    )
