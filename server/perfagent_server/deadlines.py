"""Ends what takes too long, with one timer for all: a timer for each request costs more than the rest of its checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Deadlines"]

_LOOKS_EVERY_S = 0.25


class Deadlines:
    """Of one event loop. What is over is called up to 0.25 s later."""

    def __init__(self) -> None:
        self._of: dict[object, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, what: object, at: float, over: Callable[[], None]) -> None:
        """over: called once the loop's clock is past `at`, unless drop(what) comes first. Replaces an earlier one."""
        self._of[what] = (at, over)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOKS_EVERY_S, self._look)

    def drop(self, what: object) -> None:
        self._of.pop(what, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for what in [what for what, (at, _) in self._of.items() if at <= now]:
            self._of.pop(what)[1]()
        self._timer = loop.call_later(_LOOKS_EVERY_S, self._look) if self._of else None
