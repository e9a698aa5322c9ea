"""The fast path: what programs send a thousand times a second is answered before the framework.

It stands behind the checks of the edge and before everything that only pages and people need: the login of pages,
compression, routing, dependencies. The answer comes from the route's own function, which the framework calls as well, for
whatever is not plain here (a query, a method of its own answer).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.datastructures import State
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from perfagent_server.routes import problems
from perfagent_server.security.access import authorize
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services

__all__ = ["COMPRESSED_FROM_BYTES", "COMPRESSION_LEVEL", "FastPath", "Route"]

COMPRESSED_FROM_BYTES = 2000
COMPRESSION_LEVEL = 4

Route = Callable[[Request, Services, Identity], Awaitable[Response]]


class FastPath:
    """routes: by path, each a POST that needs the scope "ingest". state: the app's."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, Route], state: State) -> None:
        self._app, self._routes, self._state = app, dict(routes), state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope.get("path", ""))
        if route is None or scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"]:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            identity = await authorize(request, "ingest")
            response = await route(request, self._state.services, identity)
        except Exception as error:
            told = await problems.answer(request, error)
            if told is None:
                raise
            response = told
        if len(response.body) < COMPRESSED_FROM_BYTES:
            await response(scope, receive, send)
        else:
            compressed = GZipMiddleware(response, COMPRESSED_FROM_BYTES, COMPRESSION_LEVEL)
            await compressed(scope, receive, send)
