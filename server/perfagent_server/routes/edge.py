"""Checks every request before any route: pure ASGI, no framework, nothing per user.

Host allow-list (a page of another site whose name was rebound to this address is refused), Origin and Sec-Fetch-Site on
unsafe methods and WebSockets, size and time limits for bodies, and the headers that tell a browser what a page of ours
may do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perfagent_server.deadlines import Deadlines
from perfagent_server.logs import current_request
from perfagent_server.routes.problems import problem
from perfagent_server.settings import Settings

__all__ = [
    "BodyLimits",
    "HeadAsGet",
    "HostCheck",
    "OriginCheck",
    "RequestId",
    "SecurityHeaders",
    "content_security_policy",
]

log = logging.getLogger("perfagent.server")

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# A body may take this long per received byte on top of the read timeout: 64 KiB/s is slow for a line that carries
# training data.
_SECONDS_PER_BYTE = 1 / 65536


async def _refuse(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    """Answers a request, or a WebSocket's handshake, with this response."""
    if scope["type"] == "http":
        await response(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await receive()  # websocket.connect
        headers = [item for item in response.raw_headers if item[0] != b"content-length"]
        await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": response.body})
    else:
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": ""})


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name, which is in lower case. Several are looked at in each request of a thousand agents:
    starlette's Headers take five times as long for one."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value, "latin-1")
    return None


def host_name(host: str) -> str:
    """The name in a Host header, without the port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


class HostCheck:
    """403 for a Host that is not ours. The port is ignored: port forwards change it, and it protects nobody."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        names = {host_name(name) for name in settings.allowed_hosts if name != "*"}
        names |= _LOOPBACK_NAMES
        if settings.public_url:
            names.add(urlsplit(settings.public_url).hostname or "")
        if not settings.loopback:
            names |= {settings.host.lower().strip("[]"), socket.gethostname().lower(), socket.getfqdn().lower()}
        self._names = frozenset(name for name in names if not name.startswith("."))
        self._suffixes = tuple(name for name in names if name.startswith("."))
        self._any = "*" in settings.allowed_hosts
        # A name can be rebound to our address, a literal address cannot.
        self._literals = not settings.loopback

    def allows(self, host: str) -> bool:
        name = host_name(host)
        if self._any or name in self._names or (self._suffixes and name.endswith(self._suffixes)):
            return True
        if self._literals:
            try:
                ipaddress.ip_address(name)
            except ValueError:
                return False
            return True
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            host = header(scope, b"host") or ""
            if not self.allows(host):
                name = host_name(host)[:100]
                log.warning("refused a request for host %r: not in the allowed hosts", name)
                text = (
                    f"the host {name!r} is not served here; allowed are this machine's own names and what "
                    "`perfagent up --allowed-hosts` (PERFAGENT_ALLOWED_HOSTS) names"
                )
                await _refuse(scope, receive, send, problem(403, "host_not_allowed", text))
                return
        await self._app(scope, receive, send)


class OriginCheck:
    """403 for a request that another site's page sent: on every method that changes something, and on WebSockets."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._also = frozenset({urlsplit(settings.public_url).netloc.lower()} if settings.public_url else ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unsafe = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] not in _SAFE_METHODS)
        if unsafe:
            cause = self._cause(scope)
            if cause:
                log.warning("refused a cross-origin request to %s: %s", scope["path"][:200], cause)
                await _refuse(scope, receive, send, problem(403, "cross_origin", cause))
                return
        await self._app(scope, receive, send)

    def _cause(self, scope: Scope) -> str:
        site = header(scope, b"sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            return f"this request comes from a page of another site (Sec-Fetch-Site: {site[:40]}); open the dashboard itself"
        origin = header(scope, b"origin")
        if origin is None:
            return ""  # not a browser: every browser sends it here
        try:
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            netloc = ""
        if netloc and (netloc == (header(scope, b"host") or "").lower() or netloc in self._also):
            return ""
        return f"this request comes from a page of {origin[:100]!r}, not from this server's own"


class BodyLimits:
    """413 for a body over the limit, 408 for one that comes too slowly."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._max, self._timeout_s = app, settings.max_body_bytes, settings.read_timeout_s
        self._deadlines = Deadlines()

    def _too_large(self) -> str:
        return f"the body is larger than {self._max} bytes; send it in smaller pieces"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = header(scope, b"content-length") or ""
        if length.isdecimal() and int(length[:20]) > self._max:
            await problem(413, "too_large", self._too_large())(scope, receive, send)
            return
        received, complete = 0, False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # what is waited for now is the client's hanging up
                return await receive()
            message = await self._within(deadline + received * _SECONDS_PER_BYTE, receive)
            if message is None:
                complete = True
                text = f"the body did not arrive within {self._timeout_s:g} s"
                raise HTTPException(408, text, headers={"Connection": "close"})
            received += len(message.get("body", b""))
            if received > self._max:
                complete = True
                raise HTTPException(413, self._too_large(), headers={"Connection": "close"})
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)

    async def _within(self, deadline: float, receive: Receive) -> Message | None:
        """The next message, None when it has not come by the deadline: asyncio.timeout_at without a timer of its own."""
        task = asyncio.current_task()
        assert task is not None
        is_over = False

        def over() -> None:
            nonlocal is_over
            is_over = True
            task.cancel()

        self._deadlines.set(task, deadline, over)
        try:
            return await receive()
        except asyncio.CancelledError:
            if is_over and task.uncancel() == 0:
                return None
            raise
        finally:
            self._deadlines.drop(task)


def content_security_policy(script_hashes: Sequence[str] = ()) -> str:
    """What a page may load: our own files only. Dash needs inline styles, and its few inline scripts by their
    hashes."""
    return "; ".join(
        (
            "default-src 'self'",
            " ".join(("script-src 'self'", *script_hashes)),
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "worker-src 'self' blob:",
            "object-src 'none'",
            "base-uri 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


class HeadAsGet:
    """HEAD is answered as GET: load balancers and `wget --spider` ask so. The HTTP server leaves the body out by
    itself. The login pages get no query: previews of links ask so too, and a one-time address would be used up."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            query = b"" if scope["path"].startswith("/login") else scope["query_string"]
            scope = {**scope, "method": "GET", "query_string": query}  # a copy: the server's own must still say HEAD
        await self._app(scope, receive, send)


_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestId:
    """Gives each request an id, its sender's X-Request-ID where it has a sensible one: log lines and the answer have it.
    Its own are counted behind a random beginning: random ones for each took a microsecond more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begin, self._count = secrets.token_hex(6), itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ident = ""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                ident = value.decode("latin-1")
        if not (ident and _REQUEST_ID.fullmatch(ident)):
            ident = f"{self._begin}-{next(self._count):x}"
        header = (b"x-request-id", ident.encode())

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        token = current_request.set((ident, scope["path"]))
        try:
            await self._app(scope, receive, sending)
        finally:
            current_request.reset(token)


class SecurityHeaders:
    """Adds the headers to every answer. policy: asked for each page, since the dashboard's script hashes come late."""

    def __init__(self, app: ASGIApp, policy: Callable[[], str]) -> None:
        self._app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                if headers.get("content-type", "").startswith("text/html"):
                    headers["Content-Security-Policy"] = self._policy()
                    headers["X-Frame-Options"] = "DENY"
                    # The login address holds a token; "same-origin" keeps it, and every address, from other sites.
                    headers["Referrer-Policy"] = "same-origin"
                    headers["Cross-Origin-Opener-Policy"] = "same-origin-allow-popups"  # a trace is handed to Perfetto
                elif scope["path"].startswith("/api/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, with_headers)
