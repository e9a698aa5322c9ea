"""Keeps the pages behind the login where keys are required. Routes of the API ask for themselves (access.py)."""

from __future__ import annotations

from urllib.parse import quote

from starlette.datastructures import State
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from perfagent_server.refusal import RefusalError
from perfagent_server.routes.problems import of_refusal, problem
from perfagent_server.security.access import Access
from perfagent_server.settings import Settings

__all__ = ["PageGate"]

# What answers for itself, or shows nothing of anybody's.
_OPEN = ("/api/", "/ws/live", "/healthz", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs", "/login")


class PageGate:
    """A page without a session leads to /login; anything else of the dashboard's is 401."""

    def __init__(self, app: ASGIApp, settings: Settings, state: State) -> None:
        self._app, self._closed, self._state = app, not settings.open_access, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._closed or scope["type"] not in ("http", "websocket") or scope["path"].startswith(_OPEN):
            await self._app(scope, receive, send)
            return
        refused = await self._refusal(HTTPConnection(scope))
        if refused is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refused(scope, receive, send)
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    async def _refusal(self, connection: HTTPConnection) -> Response | None:
        access: Access = self._state.access
        try:
            identity = await access.identify(connection)
        except RefusalError as error:
            return of_refusal(error).response()
        if "read" in identity.may:
            return None
        if "text/html" in connection.headers.get("accept", ""):
            path = connection.scope.get("raw_path", b"").decode("latin-1") or quote(connection.url.path)
            asked = path + (f"?{connection.url.query}" if connection.url.query else "")
            return RedirectResponse("/login" if asked == "/" else f"/login?next={quote(asked)}", 303)
        return problem(
            401, "unauthorized", "pages need a session: open /login, or the one-time address that `perfagent up` prints"
        )
