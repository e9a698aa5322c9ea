"""create_app(settings): the whole server as one ASGI app. Nothing lives in this module; each app is its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, Response

from perfagent import __version__
from perfagent_server.database import StorageError
from perfagent_server.monitoring import CountRequests, Monitoring, otlp
from perfagent_server.refusal import RefusalError
from perfagent_server.routes import (
    alerts,
    audit,
    channels,
    commands,
    compare,
    export,
    findings,
    groups,
    health,
    imports,
    inbox,
    ingest,
    keys,
    live,
    log,
    login,
    media,
    openapi,
    own_alerts,
    panels,
    prices,
    problems,
    profiles,
    query_check,
    retention,
    rules,
    run_annotations,
    runs,
    series,
    server_info,
    session,
    silences,
    users,
    views,
)
from perfagent_server.routes.edge import (
    BodyLimits,
    HeadAsGet,
    HostCheck,
    OriginCheck,
    RequestId,
    SecurityHeaders,
    content_security_policy,
)
from perfagent_server.routes.fast_path import COMPRESSED_FROM_BYTES, COMPRESSION_LEVEL, FastPath, Route
from perfagent_server.routes.page_gate import PageGate
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reading import read_in_own_language
from perfagent_server.routes.reply import reply
from perfagent_server.services import Services, open_services
from perfagent_server.settings import Settings

__all__ = ["create_app"]

logger = logging.getLogger("perfagent.server")

_STATIC = Path(__file__).with_name("static")
_PREFIX = "/api/v1"
_API = (
    ingest,
    log,
    runs,
    series,
    export,
    findings,
    run_annotations,
    panels,
    inbox,
    alerts,
    silences,
    commands,
    compare,
    groups,
    imports,
    views,
    profiles,
    media,
    channels,
    rules,
    own_alerts,
    prices,
    retention,
    keys,
    users,
    session,
    audit,
    server_info,
)


def create_app(settings: Settings, *, dashboard: bool = True, services: Services | None = None) -> FastAPI:
    """The app. Its parts start with its lifespan and are then `app.state.services`.

    dashboard: mount it. services: parts that are open already; the app's end closes them.
    """

    monitoring = Monitoring()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = services or open_services(settings)
        app.state.services, app.state.access = running, running.access
        monitoring.watch(running)
        stop_sending = otlp.start(running)
        try:
            await running.start()
            yield
        finally:
            if stop_sending is not None:
                await asyncio.to_thread(stop_sending)
            await running.stop()

    app = FastAPI(
        title="perfagent", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # asked for in each request; /metrics has ours
        description="Training runs: ingest, series, findings, alerts. Non-finite numbers are the texts NaN, Infinity, -Infinity.",
    )  # fmt: skip
    app.state.monitoring = monitoring
    problems.install(app)
    app.router.routes.extend(_api().routes)
    app.include_router(health.router, tags=["health"])
    app.include_router(live.router)
    app.include_router(login.pages)
    app.include_router(_documentation(), include_in_schema=False)
    # Before the dashboard, which answers every path that is left with a page.
    for path in ("/api", "/api/{rest:path}"):
        app.add_api_route(path, _unknown, methods=list(_METHODS), include_in_schema=False)
    if dashboard:
        _mount_dashboard(app, settings)
    own_policy = content_security_policy()
    # The last one added is the first that a request meets.
    app.add_middleware(HeadAsGet)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_FROM_BYTES, compresslevel=COMPRESSION_LEVEL)
    app.add_middleware(PageGate, settings=settings, state=app.state)
    fast: dict[str, Route] = {f"{_PREFIX}/ingest": ingest.ingest, f"{_PREFIX}/log": log.log}
    app.add_middleware(FastPath, routes=fast, state=app.state)
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(OriginCheck, settings=settings)
    app.add_middleware(HostCheck, settings=settings)
    app.add_middleware(SecurityHeaders, policy=lambda: getattr(app.state, "dashboard_csp", None) or own_policy)
    app.add_middleware(RequestId)
    app.add_middleware(CountRequests, counts=monitoring.requests, before_routing=frozenset(fast))
    return app


@cache
def _api() -> APIRouter:
    """The routes below /api/v1. All apps of a process share them: include_router() on each app would build the models of
    every route again, which takes 0.4 s."""
    api = APIRouter()
    for module in _API:
        # What agents send a thousand times a second has no query.
        checks = [] if module is ingest else [Depends(query_check.only_known)]
        if module not in (ingest, log):  # they leave out what cannot be stored, and store the rest
            checks += [Depends(query_check.no_nul), Depends(read_in_own_language)]
        api.include_router(
            module.router, prefix=_PREFIX, tags=[module.__name__.rpartition(".")[2]], dependencies=checks
        )
    return api


_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def _unknown(request: Request) -> Response:
    """404, or 405 where only the method is wrong: this route matches everything, so the router cannot tell them
    apart."""
    path = request.url.path
    below = path.removeprefix(_PREFIX)
    allowed: set[str] = set()
    for route in _routes():
        if below != path and route.path_regex.match(below):
            allowed |= route.methods or set()
    if allowed:
        listed = ", ".join(sorted(allowed))
        message = f"{request.method} is not for {path[:200]}; allowed: {listed}"
        raise ApiError(405, "method_not_allowed", message, headers={"Allow": listed})
    raise ApiError(404, "not_found", f"there is nothing at {path[:200]}; /docs lists what there is")


def _routes() -> Iterator[APIRoute]:
    for module in _API:
        yield from (route for route in module.router.routes if isinstance(route, APIRoute))


def _documentation() -> APIRouter:
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi_json(request: Request) -> Response:
        return reply(openapi.document(request.app))

    @router.get("/docs")
    async def docs() -> Response:
        return FileResponse(_STATIC / "docs.html", media_type="text/html")

    @router.get("/docs/{name}")
    async def docs_file(name: str) -> Response:
        if name not in ("docs.js", "docs.css"):
            raise ApiError(404, "not_found", f"there is no file {name[:80]!r} here")
        return FileResponse(_STATIC / name)

    return router


def _mount_dashboard(app: FastAPI, settings: Settings) -> None:
    """Mounts what is registered as `perfagent.dashboard`."""
    for entry in entry_points(group="perfagent.dashboard"):
        entry.load()(
            app,
            server_url=settings.url,
            known_run=partial(_known_run, app),
            run_named=partial(_run_named, app),
        )


async def _known_run(app: FastAPI, asked: Request, run: str) -> bool:
    """Whether there is such a run that the viewer may see, as far as the database can tell: while it does not answer, the
    page itself says so."""
    services: Services = app.state.services
    try:
        identity = await services.access.identify(asked)
        project = await asyncio.to_thread(services.runs.project_of, run)
    except (StorageError, SQLAlchemyError, RefusalError):
        return True
    return project is not None and identity.sees(project)


async def _run_named(app: FastAPI, asked: Request, name: str) -> str | None:
    """The newest run of a name that the viewer may see, as far as the database can tell."""
    services: Services = app.state.services
    try:
        identity = await services.access.identify(asked)
        return await asyncio.to_thread(services.runs.named, name, identity.seen_projects)
    except (StorageError, SQLAlchemyError, RefusalError):
        return None
