"""What the server has, kept up to date: its WebSocket; where that is refused, questions every few seconds; and while the
server is away, patience. The listener is informed of the connection's state."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from perfagent.errors import PerfagentError, ServerUnreachable
from perfagent_client.client import AsyncClient

__all__ = ["POLL_S", "Feed", "Link"]

POLL_S = 3.0
_PATH = "/ws/live"
_RETRY_S = 2.0
_DEAD_AFTER_S = 5.0
"""Without an answer to a ping: a server that stands still keeps its connections open."""
_LARGEST = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Link:
    """kind: how what is shown is kept up to date; since: Unix seconds, of `stale` the last time that the server answered;
    trouble: what it said, or what failed."""

    kind: Literal["connecting", "live", "polling", "stale"]
    since: float = 0.0
    trouble: str = ""


class Feed:
    """refresh: fetches again all that is shown; raises PerfagentError. on_message: one message of the WebSocket.
    on_link: the state of the connection, when it changes."""

    def __init__(
        self,
        client: AsyncClient,
        subscription: dict[str, Any],
        *,
        refresh: Callable[[], Awaitable[None]],
        on_message: Callable[[dict[str, Any]], None],
        on_link: Callable[[Link], None],
    ) -> None:
        self._client, self._subscription = client, subscription
        self._refresh, self._on_message, self._on_link = refresh, on_message, on_link
        self._link = Link("connecting")
        self._heard = time.time()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            why = ""
            try:
                await self._listen()
            except (OSError, TimeoutError, WebSocketException) as error:
                why = str(error)
            except PerfagentError as error:
                self._tell_away(error)
                await asyncio.sleep(_RETRY_S)
                continue
            await self._poll(why)

    async def _listen(self) -> None:
        """Returns when the connection has ended."""
        address = "ws" + self._client.server.removeprefix("http") + _PATH
        async with connect(
            address,
            additional_headers=self._client.authorization(_PATH),
            proxy=True if self._client.trust_env else None,
            ping_interval=_DEAD_AFTER_S,
            ping_timeout=_DEAD_AFTER_S,
            open_timeout=_DEAD_AFTER_S,
            close_timeout=1.0,
            max_size=_LARGEST,
        ) as socket:
            await socket.send(json.dumps({"subscribe": self._subscription}))
            await self._refresh()
            self._tell(Link("live"))
            try:
                async for raw in socket:
                    await self._hear(raw)
            finally:  # until now it was there, told or silent
                self._heard = time.time()

    async def _hear(self, raw: str | bytes) -> None:
        message = json.loads(raw)
        if not isinstance(message, dict):
            return
        if message.get("lagged"):
            await self._refresh()
        self._on_message(message)

    async def _poll(self, why: str) -> None:
        """Asks once, since there is no WebSocket; the next try of one is after that."""
        try:
            await self._refresh()
        except PerfagentError as error:
            self._tell_away(error)
            await asyncio.sleep(_RETRY_S)
        else:
            self._tell(Link("polling", trouble=why))
            await asyncio.sleep(POLL_S)

    def _tell_away(self, error: PerfagentError) -> None:
        """A server that refuses (a key that has ended) is as stale as one that is away, and says why."""
        since = self._link.since if self._link.kind == "stale" else self._heard
        self._tell(Link("stale", since, "" if isinstance(error, ServerUnreachable) else str(error)))

    def _tell(self, link: Link) -> None:
        if link.kind != "stale":
            self._heard = time.time()
        if link != self._link:
            self._link = link
            self._on_link(link)
