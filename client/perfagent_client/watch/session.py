"""What the screens share: the client, what was done to alerts, the clock, and the tasks that hold connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from perfagent_client.client import AsyncClient
from perfagent_client.watch.acts import Acts

__all__ = ["Session"]

_END_S = 3.0


class Session:
    """clock: Unix seconds."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float]) -> None:
        self.client, self.clock, self.acts = client, clock, Acts(client)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The work as a task that is cancelled once: textual cancels a worker twice when it ends, and the second time would
        cut the closing of a connection short."""
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        finally:
            task.cancel()

    async def close(self) -> None:
        """Waits for what was cancelled to close its connections, then closes the others."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_END_S)
        await self.client.aclose()
