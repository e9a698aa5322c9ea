"""uvicorn, set up the way this server needs it."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from perfagent_server.deadlines import Deadlines
from perfagent_server.services import Services
from perfagent_server.settings import Settings
from perfagent_server.systemd import notify, watchdog_period_s

__all__ = ["SHUTDOWN_S", "make_server"]

# A stop waits this long for requests in flight; open WebSockets are then cut. With the parts' own stop it stays below
# 10 s.
SHUTDOWN_S = 5


def make_server(app: FastAPI, settings: Settings, *, log_level: str = "warning") -> uvicorn.Server:
    """A server that is not started. Its log lines go where those of all other parts go (logs.py)."""
    _allow_many_connections()
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=_protocol(settings.read_timeout_s),
        ws="websockets-sansio",
        ws_max_size=64 * 1024,  # a page sends subscriptions only
        ws_max_queue=4,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=SHUTDOWN_S,
        limit_concurrency=20_000,
        proxy_headers=bool(settings.forwarded_allow_ips),
        forwarded_allow_ips=list(settings.forwarded_allow_ips),
        server_header=False,
        access_log=settings.access_log,
        log_config=None,
        log_level=None if settings.access_log else log_level,
        lifespan="on",
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return _Server(config, app)


class _Server(uvicorn.Server):
    """Tells systemd how it is. The loop itself says that it is well, so that a loop that hangs says nothing."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app
        self._period = watchdog_period_s()
        self._next = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            notify("READY=1")

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        if self._period is not None and now >= self._next and self._services.is_well:
            self._next = now + self._period
            notify("WATCHDOG=1")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        notify("STOPPING=1")
        await super().shutdown(sockets)

    @property
    def _services(self) -> Services:
        services: Services = self._app.state.services
        return services


def _is_news(record: logging.LogRecord) -> bool:
    """Not news: a WebSocket that was refused with a proper answer, which uvicorn 0.54 calls an error after we logged
    the cause; and the traceback of each request that was cut off at the end, after it said how many there are."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return record.msg != "ASGI callable returned without completing handshake."


def _protocol(header_timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn closes idle connections but waits for ever for the second half of a request's head; this one does not."""

    heads = Deadlines()

    class WithHeaderTimeout(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_head_timer()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._start_head_timer()

        def on_headers_complete(self) -> None:
            self._stop_head_timer()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            super().connection_lost(exc)

        def _start_head_timer(self) -> None:
            heads.set(self, self.loop.time() + header_timeout_s, self._head_too_slow)

        def _stop_head_timer(self) -> None:
            heads.drop(self)

        def _head_too_slow(self) -> None:
            if not self.transport.is_closing():
                # Nothing of a request has been handed to the app yet, so there is nobody else who answers.
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                self.transport.close()

    return WithHeaderTimeout


def _allow_many_connections() -> None:
    """A thousand agents and their pages need more files than the usual soft limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted: Any = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
