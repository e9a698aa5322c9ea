"""A connected page: its queue of encoded messages and the task that sends them. Only the event loop's thread uses it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from perfagent_server.live.subscription import Subscription

__all__ = ["LAGGED", "TICK_S", "Page"]

log = logging.getLogger("perfagent.server")

LAGGED = b'{"lagged":true}'
"""Tells a page that it has missed something: it fetches again what it shows."""
TICK_S = 0.1  # one message per tick and page
_QUEUE_BYTES = 2**20  # per page; a page that is this far behind fetches anew anyway
_QUEUE_MESSAGES = 64
_ALLOWED_EVERY_S = 10.0  # how long a page goes on whose key expired, or was revoked by another process


class Page:
    def __init__(self, projects: frozenset[str] | None = None) -> None:
        """projects: those that the viewer may see; None: all."""
        self.projects = projects
        self.subscription: Subscription | None = None
        self.queue: deque[bytes] = deque()
        self.bytes = 0
        self.ready = asyncio.Event()
        self.doubted = asyncio.Event()  # whether it may go on is to be asked now

    def put(self, message: bytes) -> int:
        """Queues a message; how many older ones had to go for it."""
        dropped = 0
        if self.bytes + len(message) > _QUEUE_BYTES or len(self.queue) >= _QUEUE_MESSAGES:
            dropped = len(self.queue)
            self.queue.clear()
            self.queue.append(LAGGED)
            self.bytes = len(LAGGED)
        self.queue.append(message)
        self.bytes += len(message)
        self.ready.set()
        return dropped

    def take(self) -> bytes:
        message = self.queue.popleft()
        self.bytes -= len(message)
        if not self.queue:
            self.ready.clear()
        return message

    async def write(self, socket: WebSocket, counters: dict[str, int]) -> None:
        """Sends what is queued, until the socket is closed."""
        last = -TICK_S
        loop = asyncio.get_running_loop()
        while True:
            await self.ready.wait()
            pause = last + TICK_S - loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
            message = self.take()
            last = loop.time()
            try:
                await socket.send_text(message.decode())
            except (WebSocketDisconnect, RuntimeError, OSError):
                return  # whoever reads from it sees the same end
            counters["messages"] += 1
            counters["bytes"] += len(message)

    async def until_refused(self, allowed: Callable[[], bool]) -> None:
        """Returns when the page may not go on. A question that fails (a busy database) is asked again."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.doubted.wait(), _ALLOWED_EVERY_S)
            self.doubted.clear()
            try:
                if not await asyncio.to_thread(allowed):
                    return
            except Exception:
                log.exception("whether a live page may go on could not be asked")
