"""Counts wrong keys by address, in memory: they come with every request, and cannot be guessed. The limit on passwords,
which can be, is in login_limits.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Failures"]


class Failures:
    """Counts wrong credentials by address: more than `limit` in a minute are answered 429 for the rest of that
    minute. Safe from any thread."""

    def __init__(
        self, limit: int = 10, *, clock: Callable[[], float] = time.monotonic, addresses: int = 10_000
    ) -> None:
        self._limit, self._clock, self._addresses = limit, clock, addresses
        self._windows: dict[str, tuple[float, int]] = {}  # address -> (start of its minute, failures in it)
        self._lock = threading.Lock()
        self.total = 0

    def count(self, address: str) -> float:
        """Counts one failure; seconds to wait when there were too many, else 0."""
        now = self._clock()
        with self._lock:
            self.total += 1
            start, failures = self._windows.get(address, (now, 0))
            if now - start >= 60:
                start, failures = now, 0
            if address not in self._windows and len(self._windows) >= self._addresses:
                del self._windows[next(iter(self._windows))]
            self._windows[address] = (start, failures + 1)
        return start + 60 - now if failures >= self._limit else 0.0

    def take_back(self, address: str) -> None:
        """What was counted before it was known was no failure."""
        with self._lock:
            self.total -= 1
            start, failures = self._windows.get(address, (0.0, 1))
            self._windows[address] = (start, max(failures - 1, 0))
